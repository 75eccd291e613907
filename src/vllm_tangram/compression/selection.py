# SPDX-License-Identifier: Apache-2.0
"""Exactly k tokens per head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LOWEST, _HIGHEST = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max


def ranks(scores: Tensor, protect_head: int, protect_tail: int) -> Tensor:
    """Map scores to integers of the same order, so that ties can be broken in the bits below.

    Args:
        scores: ``[..., T]`` float32.
        protect_head: first tokens that beat every score.
        protect_tail: last tokens that beat every score.

    Returns:
        ``[..., T]`` int64 within the range of int32; -0.0 equals 0.0, NaN is below -inf, protected above inf.

    """
    bits = (scores.float() + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    # Two's complement and IEEE 754 disagree on the order of negative numbers: flip all bits but the sign.
    order = torch.where(bits < 0, bits ^ _HIGHEST, bits)
    order = order.masked_fill_(scores.isnan(), _LOWEST)
    order[..., :protect_head] = _HIGHEST
    order[..., max(0, scores.shape[-1] - protect_tail) :] = _HIGHEST
    return order.long()


def places(scores: Tensor, *, protect_head: int, protect_tail: int) -> Tensor:
    """Place of every token among those of its head, 0 for the best: all that `select_tokens` would choose, at once.

    ``places(...) < k`` are the k tokens that it chooses. One sort serves all counts, and nothing waits for the device.

    Args:
        scores: ``[..., T]`` float32.
        protect_head: first tokens of the chunk that are always kept.
        protect_tail: last tokens of the chunk that are always kept.

    Returns:
        ``[..., T]`` int32.

    """
    positions = torch.arange(scores.shape[-1], device=scores.device)
    order = (ranks(scores, protect_head, protect_tail) << 32 | positions).argsort(dim=-1, descending=True)
    places = torch.empty_like(order, dtype=torch.int32)
    return places.scatter_(-1, order, positions.int().expand_as(order))


def select_tokens(scores: Tensor, keep: Sequence[int], *, protect_head: int, protect_tail: int) -> Tensor:
    """Choose the ``keep[h]`` best tokens of every head h.

    Protected tokens come first, then the highest scores; of equal scores the later token wins; NaN is the lowest
    score. The result depends on nothing but the arguments.

    Args:
        scores: ``[H, T]`` float32.
        keep: tokens to keep, per head.
        protect_head: first tokens of the chunk that are always kept (the sinks that fall into it).
        protect_tail: last tokens of the chunk that are always kept.

    Returns:
        ``[sum(keep)]`` int64 token indices, ascending within each head, heads concatenated in order.

    Raises:
        ValueError: ``keep`` does not match the heads, exceeds the tokens or is less than the protected ones.

    """
    num_heads, num_tokens = scores.shape
    if len(keep) != num_heads:
        raise ValueError(f"keep has {len(keep)} entries for {num_heads} heads")
    protected = min(num_tokens, protect_head + protect_tail)
    for head, count in enumerate(keep):
        if not protected <= count <= num_tokens:
            raise ValueError(
                f"head {head} cannot keep {count} tokens of {num_tokens}, of which {protected} are protected"
            )
    positions = torch.arange(num_tokens, device=scores.device)
    keys = ranks(scores, protect_head, protect_tail) << 32 | positions  # distinct, so that a threshold counts exactly
    counts = torch.tensor(keep, device=scores.device)[:, None]
    best = keys.topk(max(keep), dim=-1).values
    none = torch.full_like(counts, torch.iinfo(torch.int64).max)  # the threshold of a head that keeps nothing
    threshold = torch.cat([none, best], dim=1).gather(1, counts)
    return (keys >= threshold).nonzero()[:, 1]
