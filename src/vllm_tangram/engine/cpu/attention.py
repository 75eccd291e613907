# SPDX-License-Identifier: Apache-2.0
"""Attention over head-group pages on the CPU, with vLLM's own paged kernel.

The pool ``[num_pages, G, block, 2 * d]`` is read as ``num_pages * G`` blocks of one head, so the kernel runs with
batch = requests x KV heads, one KV head and ``Hq / H`` query heads. Keys may be stored packed for the CPU's matrix
instructions: they are written through vLLM's operator only and never read back here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, _get_attn_isa

from vllm_tangram.compression import select_tokens
from vllm_tangram.config import TangramConfig
from vllm_tangram.engine.cpu.metadata import (
    DecodeRows,
    HeadGroupMetadata,
    HeadGroupMetadataBuilder,
    Ints,
    PrefillRow,
)
from vllm_tangram.engine.scoring import LayerScorer
from vllm_tangram.pages.table import PageTable


class HeadGroupCPUBackend(CPUAttentionBackend):
    """The CPU backend with head-group pages; attention layers get it after the model is loaded."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[HeadGroupCPUAttention]:
        return HeadGroupCPUAttention

    @staticmethod
    def get_builder_cls() -> type[HeadGroupMetadataBuilder]:
        return HeadGroupMetadataBuilder


class HeadGroupCPUAttention(CPUAttentionBackendImpl):
    """One layer.

    Args:
        stock: vLLM's implementation of the layer, whose settings are taken over.
        index: layer, 0-based.
        group: ``[H]`` head group of each KV head of the layer.
        column: ``[H]`` column of each KV head in its group's pages.
        block_size: tokens per page.
        config: options.
        scorer: ranks the tokens of a chunk.

    """

    def __init__(
        self,
        stock: CPUAttentionBackendImpl,
        *,
        index: int,
        group: Ints,
        column: Ints,
        block_size: int,
        dtype: torch.dtype,
        config: TangramConfig,
        scorer: LayerScorer,
    ) -> None:
        self.__dict__.update(stock.__dict__)
        self.index = index
        self.group = np.ascontiguousarray(group, np.int32)
        self.column = np.ascontiguousarray(column, np.int32)
        self.block_size = block_size
        self.config = config
        self.scorer = scorer
        self.dtype = dtype
        self.isa: str = _get_attn_isa(dtype, block_size, self.head_size, self.kv_cache_dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HeadGroupMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, compress and write one layer of a step.

        Args:
            layer: vLLM's attention module.
            query: ``[num_tokens, Hq, d]`` after RoPE.
            key: ``[num_tokens, H, d]`` after RoPE.
            value: ``[num_tokens, H, d]``.
            kv_cache: the page pool, staging pages last.
            attn_metadata: the step; None while the model is warmed up.
            output: ``[num_tokens, Hq, d]``, written.
            output_scale: unused by the CPU backend.
            output_block_scale: unused by the CPU backend.

        """
        self.scorer.begin()
        if attn_metadata is None:
            return output
        keys, values = kv_cache.view(-1, 1, 2 * self.block_size, self.head_size).chunk(2, dim=2)
        cache = (keys, values)
        if (decodes := attn_metadata.decodes) is not None:
            n = len(decodes.slots)
            self._decode(decodes, attn_metadata.table, query[:n], key[:n], value[:n], cache, output[:n])
        for row in attn_metadata.prefills:
            q, k, v = query[row.tokens], key[row.tokens], value[row.tokens]
            scores = None
            if not row.direct or attn_metadata.observer is not None:
                scores = self.scorer.score(row, q, k, v)
            self._prefill(row, attn_metadata.table, q, k, v, scores, cache, output[row.tokens])
            if attn_metadata.observer is not None and scores is not None:
                attn_metadata.observer.observe(self.index, row, scores)
        return output

    def _decode(
        self,
        rows: DecodeRows,
        table: PageTable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
    ) -> None:
        num_rows, num_heads = len(rows.slots), len(self.group)
        slots = np.empty(num_rows * num_heads, np.int64)
        table.decode_slots(rows.slots, self.group, self.column, rows.lengths, slots)
        self._write(key.reshape(-1, 1, self.head_size), value.reshape(-1, 1, self.head_size), slots, cache)

        lengths = np.take(rows.lengths, self.group, axis=1).reshape(-1)
        blocks = -(-lengths // self.block_size)
        block_table = np.zeros((num_rows * num_heads, int(blocks.max())), np.int32)
        table.member_blocks(rows.slots, self.group, self.column, blocks, block_table)
        shape = (num_rows * num_heads, self.num_queries_per_kv, self.head_size)
        self._attend(query.reshape(shape), 1, lengths, block_table, cache, output.view(shape))

    def _prefill(
        self,
        row: PrefillRow,
        table: PageTable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: torch.Tensor | None,
        cache: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
    ) -> None:
        num_heads, num_tokens = len(self.group), row.num_tokens
        before, after = row.before[self.group].astype(np.int64), row.after[self.group].astype(np.int64)
        # Head-major, as the kernel's batch is over heads: [H, T, ...] flattened.
        k = key.transpose(0, 1).reshape(-1, 1, self.head_size)
        v = value.transpose(0, 1).reshape(-1, 1, self.head_size)
        q = query.view(num_tokens, num_heads, self.num_queries_per_kv, self.head_size).transpose(0, 1)
        q = q.reshape(num_heads * num_tokens, self.num_queries_per_kv, self.head_size)

        held = after if row.direct else before
        blocks = -(-held // self.block_size)
        staged_blocks = 0 if row.direct else -(-num_tokens // self.block_size)
        block_table = np.zeros((num_heads, int(blocks.max()) + staged_blocks), np.int32)
        table.member_blocks(
            np.array([row.slot], np.int32), self.group, self.column, blocks.astype(np.int32), block_table
        )
        if row.direct:
            slots = self._append_slots(table, row.slot, before, after - before)
        else:
            staging = row.staging_block + np.arange(num_heads * staged_blocks, dtype=np.int64).reshape(num_heads, -1)
            np.put_along_axis(block_table, blocks[:, None] + np.arange(staged_blocks), staging.astype(np.int32), axis=1)
            slots = (staging[:, :1] * self.block_size + np.arange(num_tokens)).reshape(-1)
        self._write(k, v, slots, cache)
        attended = torch.empty_like(q)
        self._attend(q, num_tokens, (before + num_tokens).astype(np.int32), block_table, cache, attended)
        output.view(num_tokens, num_heads, self.num_queries_per_kv, self.head_size).copy_(
            attended.view(num_heads, num_tokens, self.num_queries_per_kv, self.head_size).transpose(0, 1)
        )
        if row.direct:
            return
        assert scores is not None
        keep = after - before
        indices = select_tokens(
            scores,
            keep.tolist(),
            protect_head=row.protect_head(self.config),
            protect_tail=row.protect_tail(self.config),
        )
        kept = indices + torch.from_numpy(np.repeat(np.arange(num_heads) * num_tokens, keep))
        self._write(k[kept], v[kept], self._append_slots(table, row.slot, before, keep), cache)

    def _append_slots(self, table: PageTable, slot: int, starts: Ints, counts: Ints) -> Ints:
        slots = np.empty(int(counts.sum()), np.int64)
        table.member_slots(slot, self.group, self.column, starts, counts, slots)
        return slots

    def _write(
        self, key: torch.Tensor, value: torch.Tensor, slots: Ints, cache: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        ops.cpu_attn_reshape_and_cache(key, value, *cache, torch.from_numpy(slots), self.isa)

    def _attend(
        self,
        query: torch.Tensor,
        query_len: int,
        lengths: Ints,
        block_table: Ints,
        cache: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
    ) -> None:
        """Causal attention of ``query_len`` tokens each of ``len(lengths)`` single-head sequences."""
        starts = torch.arange(0, len(lengths) * query_len + 1, query_len, dtype=torch.int32)
        seq_lens = torch.from_numpy(lengths)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=self.num_queries_per_kv,
            num_kv_heads=1,
            head_dim=self.head_size,
            seq_lens=seq_lens,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=cache[0],
            value_cache=cache[1],
            output=output,
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=torch.from_numpy(block_table),
            softcap=0,
            scheduler_metadata=schedule,
            s_aux=None,
        )
