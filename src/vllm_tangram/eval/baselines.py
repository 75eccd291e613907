# SPDX-License-Identifier: Apache-2.0
"""Other ways to share out the memory that a static plan holds: what profiled budgets are to be compared with.

They exist for evaluation only: what a head keeps depends on the prompt, so no page table of theirs could be planned.
Here they count tokens, without pages or groups, and keep exactly as many over all heads as the static plan does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tangram.compression import compete, places
from vllm_tangram.compression.competition import ranking

SAFEGUARD = 0.2
"""Share of the uniform budget that AdaKV leaves to every head."""


def dynamic_counts(scores: Tensor, total: int, *, protect_head: int, protect_tail: int) -> Tensor:
    """One threshold for all heads of the model: the tokens of a chunk compete over all members.

    This is the per-request allocation that Tangram (arXiv 2606.06302, section 4.1.1) approximates by a profile; with
    the scores of KVzip it is the non-uniform allocation of that paper (arXiv 2505.23416).

    Args:
        scores: ``[L, H, T]`` float32.
        total: tokens to keep over all members, at least the protected ones, at most all.
        protect_head: first tokens of the chunk that every member keeps.
        protect_tail: last tokens of the chunk that every member keeps.

    Returns:
        ``[L, H]`` int64, which sums to ``total``.

    """
    (counts,) = compete(scores, [total / scores.numel()], protect_head=protect_head, protect_tail=protect_tail)
    return counts


def adakv_counts(scores: Tensor, total: int, *, protect_head: int, protect_tail: int) -> Tensor:
    """AdaKV (arXiv 2407.11550): all layers get the same, and the heads of a layer compete for it.

    Every head first keeps its best tokens up to a fifth of what uniform budgets would give it, protected tokens
    included; the rest of the layer's share goes to the highest scores of any of its heads. Tokens that do not divide
    by the layers go to the first ones, one each.

    Args:
        scores: ``[L, H, T]`` float32.
        total: see `dynamic_counts`.
        protect_head: see `dynamic_counts`.
        protect_tail: see `dynamic_counts`.

    Returns:
        ``[L, H]`` int64, which sums to ``total``.

    """
    num_layers, num_heads, num_tokens = scores.shape
    protected = min(num_tokens, protect_head + protect_tail)
    share, rest = divmod(total, num_layers)
    budgets = [max(share + (layer < rest), protected * num_heads) for layer in range(num_layers)]
    safe = [max(protected, int(SAFEGUARD * budget / num_heads)) for budget in budgets]

    def by_layer(numbers: list[int], dimensions: int) -> Tensor:
        return torch.tensor(numbers, device=scores.device).view(-1, *[1] * dimensions)

    best = places(scores, protect_head=protect_head, protect_tail=protect_tail) < by_layer(safe, 2)
    guarded = scores.masked_fill(best, torch.inf)
    winners = ranking(guarded, protect_head=protect_head, protect_tail=protect_tail)  # [L, H * T]
    taken = torch.arange(winners.shape[1], device=scores.device) < by_layer(budgets, 1)
    return torch.zeros(num_layers, num_heads, dtype=torch.int64, device=scores.device).scatter_add_(
        1, winners, taken.long()
    )
