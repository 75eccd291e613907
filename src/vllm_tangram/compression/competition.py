# SPDX-License-Identifier: Apache-2.0
"""All heads of a model compete for one budget: what a retention profile is made of (Tangram, section 4.1.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_tangram.compression.selection import ranks


def compete(scores: Tensor, retentions: Sequence[float], *, protect_head: int, protect_tail: int) -> Tensor:
    """Count the tokens that each member keeps of one chunk when all members share one budget.

    At retention x exactly ``round(x * L * H * T)`` tokens (half to even) are kept over all members, or all the
    protected ones if these are more. Protected tokens come first, then the highest scores of any member; of equal
    scores the later position wins, then the earlier member. So a scorer that looks only at positions gives all
    members the same count, give or take one.

    Args:
        scores: ``[L, H, T]`` float32; NaN is the lowest score.
        retentions: ``[R]`` fractions in [0, 1].
        protect_head: first tokens that every member keeps.
        protect_tail: last tokens that every member keeps.

    Returns:
        ``[R, L, H]`` int64.

    Raises:
        ValueError: a retention is outside [0, 1], or there are 2**32 scores or more.

    """
    num_layers, num_heads, num_tokens = scores.shape
    num_members = num_layers * num_heads
    if not all(0 <= x <= 1 for x in retentions):
        raise ValueError(f"retentions must be in [0, 1], got {list(retentions)}")
    protected = min(num_tokens, protect_head + protect_tail) * num_members
    winners = ranking(scores.reshape(num_members, num_tokens), protect_head=protect_head, protect_tail=protect_tail)
    counts = [
        torch.bincount(winners[: max(protected, round(x * scores.numel()))], minlength=num_members) for x in retentions
    ]
    return torch.stack(counts).view(len(counts), num_layers, num_heads)


def ranking(scores: Tensor, *, protect_head: int, protect_tail: int) -> Tensor:
    """Whose token is the best, the second best, and so on, by the rules of `compete`.

    Args:
        scores: ``[..., M, T]`` float32 of M members; leading dimensions are competitions of their own.
        protect_head: see `compete`.
        protect_tail: see `compete`.

    Returns:
        ``[..., M * T]`` int64 members.

    Raises:
        ValueError: there are 2**32 scores or more in a competition.

    """
    num_members, num_tokens = scores.shape[-2:]
    if num_members * num_tokens >= 2**32:
        raise ValueError(f"cannot rank {num_members * num_tokens} scores at once; score shorter chunks")
    # Below the score: position, then member, counted down so that the first member has the largest key.
    tokens = torch.arange(num_tokens, device=scores.device) * num_members
    members = torch.arange(num_members - 1, -1, -1, device=scores.device)
    keys = ranks(scores, protect_head, protect_tail) << 32
    keys |= members[:, None] + tokens
    order = keys.flatten(-2).sort(dim=-1, descending=True).values
    return num_members - 1 - (order & (2**32 - 1)) % num_members
