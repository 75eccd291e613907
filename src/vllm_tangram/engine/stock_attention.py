# SPDX-License-Identifier: Apache-2.0
"""Decode attention of stock vLLM on Hopper, to measure beside: FlashAttention 3 over a paged cache."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

_GRAPH_SPLITS = 32  # vLLM's default for CUDA graphs (attention_config.flash_attn_max_num_splits_for_cuda_graph)


def flash_decode(
    query: Tensor,
    cache: Tensor,
    output: Tensor,
    *,
    block_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    ahead: bool,
) -> Callable[[], None]:
    """One layer's attention of one new token per sequence, the token already in the cache.

    Args:
        query: [S, Hq, D].
        cache: [blocks, block size, H, 2 * D], keys before values, as vLLM's layout LBNHC.
        output: [S, Hq, D], written.
        block_table: [S, J] int32.
        lengths: [S] int32.
        starts: [S + 1] int32, 0 .. S.
        longest: the largest of ``lengths``.
        scale: factor of the logits.
        ahead: schedule the thread blocks now, as vLLM does once per step for its CUDA graphs; else in every call.

    """
    head_dim = query.shape[-1]
    key, value = cache[..., :head_dim], cache[..., head_dim:]
    metadata = None
    if ahead:
        metadata = get_scheduler_metadata(
            batch_size=query.shape[0],
            max_seqlen_q=1,
            max_seqlen_k=longest,
            num_heads_q=query.shape[1],
            num_heads_kv=cache.shape[2],
            headdim=head_dim,
            cache_seqlens=lengths,
            qkv_dtype=query.dtype,
            cu_seqlens_q=starts,
            page_size=cache.shape[1],
            causal=True,
            num_splits=_GRAPH_SPLITS,
        )

    def run() -> None:
        flash_attn_varlen_func(
            query,
            key,
            value,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=longest,
            seqused_k=lengths,
            block_table=block_table,
            softmax_scale=scale,
            causal=True,
            out=output,
            scheduler_metadata=metadata,
            num_splits=_GRAPH_SPLITS if ahead else 0,
            fa_version=3,
        )

    return run
