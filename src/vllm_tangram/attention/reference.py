# SPDX-License-Identifier: Apache-2.0
"""Attention over KV heads of different lengths, written to be obviously right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ragged_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, causal_tail: bool = True
) -> Tensor:
    """Attend from ``T`` query tokens of one sequence to what each KV head holds, in float64.

    Args:
        query: ``[T, Hq, d]``; query heads of one KV head are neighbours.
        keys: per KV head ``[len_h, d]``.
        values: per KV head ``[len_h, d]``.
        scale: factor of the logits.
        causal_tail: the last T keys of every head are the query tokens themselves, so query i sees all keys but the
            last ``T - 1 - i``; otherwise every query sees every key.

    Returns:
        ``[T, Hq, d]`` float64.

    Raises:
        ValueError: heads do not divide, or a head holds fewer keys than there are queries to be causal over.

    """
    num_queries, num_query_heads, _ = query.shape
    if len(keys) != len(values) or num_query_heads % len(keys):
        raise ValueError(f"{num_query_heads} query heads do not fit {len(keys)} key and {len(values)} value heads")
    group = num_query_heads // len(keys)
    out = torch.empty(query.shape, dtype=torch.float64)
    for head, (key, value) in enumerate(zip(keys, values, strict=True)):
        if causal_tail and len(key) < num_queries:
            raise ValueError(f"head {head} holds {len(key)} keys, fewer than the {num_queries} queries")
        for query_head in range(head * group, (head + 1) * group):
            for i in range(num_queries):
                visible = len(key) - (num_queries - 1 - i if causal_tail else 0)
                logits = scale * (key[:visible].double() @ query[i, query_head].double())
                out[i, query_head] = logits.softmax(dim=0) @ value[:visible].double()
    return out
