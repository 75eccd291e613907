# SPDX-License-Identifier: Apache-2.0
"""What a retention profile means for a server: budgets, groups, and what prompts will hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from vllm_tangram.budget import BudgetCurve, RetentionPlan, RetentionProfile, Sharding, group_members
from vllm_tangram.config import Grouping

_DTYPE_BYTES = 2  # KV is held in bfloat16 or float16


@dataclass(frozen=True)
class PromptCost:
    """What a prompt holds when its prefill is done.

    Attributes:
        tokens: its length.
        pages: pages held.
        full_pages: pages of ``G`` heads that its full KV cache would fill, not rounded.
        bytes: bytes of ``pages``; None where the profile does not say the head size. ``full_bytes`` likewise.
        fraction: pages / full_pages.
        promise: upper bound of ``fraction`` (docs/design.md, "The invariant"); None where the margin is on top.

    """

    tokens: int
    pages: int
    full_pages: float
    bytes: int | None
    full_bytes: int | None
    fraction: float
    promise: float | None


def head_budgets(profile: RetentionProfile, plan: RetentionPlan) -> NDArray[np.float64]:
    """[L, H] budget of each member at the plan's retention: what the head groups are formed from."""
    budgets = BudgetCurve.from_profile(profile, plan.config.alpha).at(plan.config.retention)
    return budgets.reshape(profile.num_layers, profile.num_kv_heads)


def over_allocations(budgets: NDArray[np.float64], group_size: int) -> dict[str, float]:
    """Grouping -> what its groups hold over what their heads need, for budgets [L, H]."""
    flat = budgets.ravel()
    layers, heads = budgets.shape
    return {
        mode: group_members(flat, (layers, heads), group_size, mode).over_allocation(flat)
        for mode in get_args(Grouping)
    }


def over_allocations_by_ranks(budgets: NDArray[np.float64], group_size: int, mode: Grouping) -> dict[int, float]:
    """Tensor parallel size -> what groups hold over what their heads need, for budgets [L, H].

    Every rank holds the pages that the richest of them needs. Sizes are those that divide H and leave a group to each.
    """
    (layers, heads), flat, found = budgets.shape, budgets.ravel(), {}
    for size in range(1, heads + 1):
        if heads % size == 0 and layers * heads // size >= group_size:
            ranks = Sharding(heads, size, (layers,)).ranks
            found[size] = group_members(flat, (layers, heads), group_size, mode, ranks).over_allocation(flat)
    return found


def prompt_cost(profile: RetentionProfile, plan: RetentionPlan, tokens: int) -> PromptCost:
    """What a prompt of that many tokens holds, against its full KV cache."""
    size = plan.groups.size
    pages = plan.schedule(plan.config.retention).num_pages(tokens, tokens)
    full_pages = profile.num_layers * profile.num_kv_heads * -(-tokens // plan.block_size) / size
    head_dim = profile.model.get("head_dim")
    page_bytes = None if head_dim is None else size * plan.block_size * 2 * int(head_dim) * _DTYPE_BYTES
    return PromptCost(
        tokens=tokens,
        pages=pages,
        full_pages=full_pages,
        bytes=None if page_bytes is None else pages * page_bytes,
        full_bytes=None if page_bytes is None else round(full_pages * page_bytes),
        fraction=plan.held_fraction(tokens),
        promise=_promise(plan, tokens),
    )


def _promise(plan: RetentionPlan, tokens: int) -> float | None:
    """``max(retention, floor)`` at a multiple of the chunk, elsewhere a window and a partial block per head more."""
    config, block_size = plan.config, plan.block_size
    if config.margin == "on_top":
        return None
    padding = plan.num_groups * plan.groups.size / plan.groups.group.size
    if config.retention == 1:  # everything is kept, whatever the columns of padding add
        return padding
    window = -(-config.window // block_size)
    first_window = -(-(config.sinks + config.window) // block_size)
    chunks = -(-tokens // config.chunk_size)
    floor = min(tokens // block_size, first_window + (chunks - 1) * window)
    per_block = padding / -(-tokens // block_size)
    promise = max(config.retention, floor * per_block)
    if tokens % config.chunk_size:
        promise += ((first_window if chunks == 1 else window) + 1) * per_block
    return min(promise, padding)
