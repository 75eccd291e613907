# SPDX-License-Identifier: Apache-2.0
"""Attention over head-group pages on CUDA.

Decode is one kernel of ours per layer, which also writes the new token. Prefill is FlashAttention over the chunk,
joined with FlashAttention over what earlier chunks kept: the pool ``[num_pages, G, block, 2 * d]`` is then read as
``num_pages * G`` blocks of one head. However many chunks a step has, each of these is one launch. Memory of a step:
one layer's scores (4 bytes per KV head and token) and places (as many), what the scorer takes, and where a chunk
continues a prompt the queries and attention of all chunks once more. vLLM profiles a step without pages, so the first
layer rehearses that then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_tangram.attention.decode import decode_attention
from vllm_tangram.attention.prefill import LayerHeads, merge_retained, select, write_tokens
from vllm_tangram.compression.base import Packing
from vllm_tangram.engine.chunk import Chunk
from vllm_tangram.engine.cuda.metadata import (
    DecodeStep,
    HeadGroupMetadata,
    HeadGroupMetadataBuilder,
    History,
    PrefillStep,
)
from vllm_tangram.engine.scoring import LayerScorer


class HeadGroupCUDABackend(FlashAttentionBackend):
    """FlashAttention's backend with head-group pages; attention layers get it after the model is loaded."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[HeadGroupCUDAAttention]:
        return HeadGroupCUDAAttention

    @staticmethod
    def get_builder_cls() -> type[HeadGroupMetadataBuilder]:
        return HeadGroupMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # a page column must be one run of memory

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return AttentionBackend.customize_spec.__func__(cls, spec)  # FlashAttention's own packing is not ours


class HeadGroupCUDAAttention(FlashAttentionImpl):
    """One layer.

    Args:
        stock: vLLM's implementation of the layer, whose settings are taken over.
        index: layer, 0-based.
        heads: groups and columns of its KV heads.
        scorer: ranks the tokens of a chunk.
        longest_chunk: most tokens of a chunk.

    """

    def __init__(
        self,
        stock: FlashAttentionImpl,
        *,
        index: int,
        heads: LayerHeads,
        scorer: LayerScorer,
        longest_chunk: int,
    ) -> None:
        self.__dict__.update(stock.__dict__)
        self.index = index
        self.heads = heads
        self.scorer = scorer
        self.longest_chunk = longest_chunk

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: HeadGroupMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend, compress and write one layer of a step.

        Args:
            layer: vLLM's attention module.
            query: ``[num_tokens, Hq, d]`` after RoPE.
            key: ``[num_tokens, H, d]`` after RoPE.
            value: ``[num_tokens, H, d]``.
            kv_cache: the page pool.
            attn_metadata: the step; None while memory is profiled.
            output: ``[num_tokens, Hq, d]``, written.
            output_scale: unused, quantised outputs are refused by vLLM for this backend.
            output_block_scale: likewise.

        """
        if attn_metadata is None:
            self.scorer.begin()
            if self.index == 0:  # every layer takes as much, one after the other
                self._rehearse(query, key, value)
            return output.fill_(0)
        if attn_metadata.decode is not None:
            self._decode(attn_metadata.decode, query, key, value, kv_cache, output)
        if attn_metadata.prefill is not None:
            tokens = slice(0, attn_metadata.num_tokens)
            self._prefill(
                attn_metadata.prefill,
                attn_metadata,
                query[tokens],
                key[tokens],
                value[tokens],
                kv_cache,
                output[tokens],
            )
        return output

    def _rehearse(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Take the memory of a prefill of all these tokens that goes on from earlier chunks, and read no page."""
        scores = torch.empty(self.num_kv_heads, len(key), dtype=torch.float32, device=key.device)
        lse = torch.empty(self.num_heads, len(key), dtype=torch.float32, device=key.device)
        held = [torch.empty_like(scores), lse]  # places
        firsts = range(0, len(key), self.longest_chunk)
        chunks = [Chunk(first, min(self.longest_chunk, len(key) - first), position=0, request=0) for first in firsts]
        index = torch.arange(len(key), device=key.device) // self.longest_chunk
        first = torch.tensor(firsts, dtype=torch.int32, device=key.device)
        self.scorer.score_all(
            *(chunks, query, key, value, scores),
            first=first,
            num_tokens=(len(key) - first).clamp_max(self.longest_chunk),
            packing=lambda: Packing.of(index, len(chunks)),
        )
        held += [torch.empty_like(tensor) for tensor in (query, query, lse)]  # as `_attend_history`

    def _decode(
        self, step: DecodeStep, query: Tensor, key: Tensor, value: Tensor, pool: Tensor, output: Tensor
    ) -> None:
        n = step.num_rows
        if self.index == 0:
            step.splits.plan.make(step.batch)  # for all layers; here, so that it is part of a CUDA graph
        decode_attention(
            query[:n],
            key[:n],
            value[:n],
            pool,
            output[:n],
            batch=step.batch,
            plan=step.splits.plan,
            layer=self.index,
            scratch=step.splits.scratch,
            scale=self.scale,
        )

    def _prefill(
        self,
        step: PrefillStep,
        metadata: HeadGroupMetadata,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        output: Tensor,
    ) -> None:
        rows = slice(step.first, None)
        _, lse = fa_utils.flash_attn_varlen_func(
            query[rows],
            key[rows],
            value[rows],
            max_seqlen_q=step.rows.max_tokens,
            cu_seqlens_q=step.starts,
            max_seqlen_k=step.rows.max_tokens,
            cu_seqlens_k=step.starts,
            softmax_scale=self.scale,
            causal=True,
            fa_version=self.vllm_flash_attn_version,
            return_softmax_lse=True,
            out=output[rows],
        )
        scores = torch.empty(self.num_kv_heads, len(key), dtype=torch.float32, device=key.device)
        places = torch.empty(self.num_kv_heads, len(key), dtype=torch.int32, device=key.device)
        observer = metadata.observer
        self.scorer.score_all(
            *(step.chunks if observer is not None else step.scored, query, key, value, scores),
            first=step.rows.first,
            num_tokens=step.rows.num_tokens,
            packing=lambda: step.packing,
        )
        if observer is not None:
            for chunk in step.chunks:
                observer.observe(self.index, chunk, scores[:, chunk.tokens])
        select(scores, places, rows=step.rows, heads=self.heads)
        write_tokens(
            key, value, places, pool, rows=step.rows, flat=metadata.flat, pages=metadata.pages, heads=self.heads
        )
        if step.history is not None:
            self._attend_history(step, step.history, query[rows], pool, output[rows], lse)

    def _attend_history(
        self, step: PrefillStep, history: History, query: Tensor, pool: Tensor, output: Tensor, lse: Tensor
    ) -> None:
        """Let the queries of all chunks also attend to what their requests retained before, and join both."""
        num_pages, group_size, block_size, _ = pool.shape
        num_tokens, num_heads = len(query), self.num_kv_heads
        queries = query.view(num_tokens, num_heads, -1, self.head_size).transpose(0, 1).flatten(0, 1)
        cache = pool.view(num_pages * group_size, block_size, 1, 2 * self.head_size)
        retained, retained_lse = fa_utils.flash_attn_varlen_func(
            queries,
            cache[..., : self.head_size],
            cache[..., self.head_size :],
            max_seqlen_q=step.rows.max_tokens,
            cu_seqlens_q=step.head_starts,
            max_seqlen_k=history.most,
            seqused_k=history.lengths[self.index],
            block_table=history.blocks[self.index],
            softmax_scale=self.scale,
            causal=False,
            fa_version=self.vllm_flash_attn_version,
            return_softmax_lse=True,
        )
        merge_retained(
            output,
            lse,
            retained.view(num_heads, num_tokens, -1, self.head_size),
            retained_lse,
            step.first,
            rows=step.rows,
            heads=self.heads,
        )
