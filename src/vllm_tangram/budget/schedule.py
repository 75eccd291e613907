# SPDX-License-Identifier: Apache-2.0
"""How many blocks each head group has kept after any number of prompt blocks (docs/design.md, "The invariant")."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vllm_tangram.budget.allocation import BudgetCurve
from vllm_tangram.budget.grouping import HeadGroups
from vllm_tangram.config import Margin
from vllm_tangram.errors import TangramError

_SOLVED_CHUNK_ENDS = 64
_BISECTIONS = 40
# Blocks. A budget found by bisection is a little too small; 0.3 * 10 must still be 3 blocks.
_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class EvictionSchedule:
    """What a request holds after any step, for one retention.

    Attributes:
        kept: [n_max + 1, N] int32, blocks that each group keeps of the first n prompt blocks.
            ``kept[0] = 0`` and ``kept[n + 1] - kept[n]`` is 0 or 1.
        block_size: tokens of a block.

    """

    kept: NDArray[np.int32]
    block_size: int

    @cached_property
    def total(self) -> NDArray[np.int64]:
        """[n_max + 1] int64, blocks that all groups together keep of the first n: the pages of n whole blocks."""
        return self.kept.sum(axis=1, dtype=np.int64)

    def lengths(self, t: int, prompt_len: int) -> NDArray[np.int64]:
        """[N] int64, tokens that every member of each group holds after ``t`` tokens."""
        n = min(t, prompt_len) // self.block_size
        return t - self.block_size * (n - self.kept[n].astype(np.int64))

    def num_pages(self, t: int, prompt_len: int) -> int:
        """Pages held after ``t`` tokens; constant time."""
        n = min(t, prompt_len) // self.block_size
        return self._totals[n] + self._num_groups * (-(-t // self.block_size) - n)

    def positions(self) -> NDArray[np.int32]:
        """[N, J] int32, where the j-th page of a group stands in a request's flat page list.

        Of the whole prompt blocks only: what comes after them follows by arithmetic (`pages.device`). Pages are born
        block by block, and within a block by group (docs/design.md). J is the largest ``kept``; entries beyond what a
        group ever keeps are 0.
        """
        block, group = np.nonzero(np.diff(self.kept, axis=0))  # row-major: the order of birth
        positions = np.zeros((self._num_groups, int(self.kept[-1].max())), np.int32)
        positions[group, self.kept[block, group]] = np.arange(len(block), dtype=np.int32)
        return positions

    def max_tokens_within(self, prompt_len: int, pages: int) -> int:
        """Largest ``t >= prompt_len`` at which a request holds at most ``pages``; -1 if its prompt alone holds more.

        No earlier state needs more: a chunk ends inside the prompt on a whole block, where ``total`` does not decrease,
        and every block after the prompt adds one page per group.
        """
        n = prompt_len // self.block_size
        blocks = n + (pages - int(self.total[n])) // self._num_groups
        t = blocks * self.block_size
        return t if t >= prompt_len else -1

    # Schedulers ask for every request in every step, and numbers of numpy take several times as long.
    @cached_property
    def _totals(self) -> list[int]:
        return self.total.tolist()

    @cached_property
    def _num_groups(self) -> int:
        return int(self.kept.shape[1])


def build_schedule(
    curve: BudgetCurve,
    groups: HeadGroups,
    *,
    retention: float,
    margin: Margin,
    block_size: int,
    chunk_size: int,
    sinks: int,
    window: int,
    max_tokens: int,
) -> EvictionSchedule:
    """Tabulate what each group keeps.

    A group's count rises in the first blocks of every chunk, so that the chunk's window (and the sinks, in the first
    chunk) always fit, and else whenever it is below ``budget(x_n) * n``. With margin "inside" the level ``x_n`` is
    solved at chunk ends: it is that of the last one at or before ``n``, in the first chunk that of its end.

    Why the promise holds at every chunk end ``n = q * C``: the floor ``w0 + (q - 1) * w`` is a shrinking share of
    ``n``, so the levels do not decrease, and a group is there at some earlier target plus ``w`` per chunk since. That
    sum is at most linear in the chunk where it started, hence at most the larger of its ends: the floor and today's
    target. These are what the level was solved for. Between chunk ends the same argument leaves one window more.

    Args:
        curve: budgets of the members of ``groups``.
        groups: the partition; a group's budget is the largest of its members' on any rank.
        retention: fraction of full KV, in (0, 1]; 1 keeps everything, whatever the budgets (padding comes on top).
        margin: "inside" fits budgets, grouping and floor within ``retention`` of the full KV of all ranks together;
            "on_top" uses ``retention`` as level.
        block_size: tokens of a block.
        chunk_size: tokens of a chunk, a multiple of ``block_size``, at least ``sinks + window``.
        sinks: first tokens that are always kept.
        window: last tokens of every chunk that are always kept.
        max_tokens: longest prompt.

    Raises:
        TangramError: ``chunk_size`` is not a multiple of ``block_size``.

    """
    if chunk_size % block_size:
        raise TangramError(f"--chunk-size ({chunk_size}) must be a multiple of --block-size ({block_size})")
    n_max = max_tokens // block_size
    if retention >= 1:
        full = np.arange(n_max + 1, dtype=np.int32)[:, None]
        return EvictionSchedule(np.repeat(full, groups.num_groups, axis=1), block_size)

    chunk = chunk_size // block_size
    first_floor = -(-(sinks + window) // block_size)
    later_floor = -(-window // block_size)
    num_chunks = max(1, n_max // chunk)
    solved = np.unique(np.geomspace(1, num_chunks, _SOLVED_CHUNK_ENDS).astype(np.int64))  # chunk ends, in chunks
    floor_share = (first_floor + (solved - 1) * later_floor) / (solved * chunk)
    if margin == "inside":
        levels = _fit_levels(curve, groups, retention, floor_share)
    else:
        levels = np.full(len(solved), retention)
    budgets = groups.group_max(curve.at(levels))  # [solved, N]
    solved_at = np.maximum(np.searchsorted(solved, np.arange(num_chunks + 1), side="right") - 1, 0)  # chunks -> row

    kept = np.zeros((n_max + 1, groups.num_groups), dtype=np.int32)
    for n in range(1, n_max + 1):
        chunk_index, block = divmod(n - 1, chunk)
        if block < (later_floor if chunk_index else first_floor):
            kept[n] = kept[n - 1] + 1
        else:
            target = budgets[solved_at[n // chunk]] * n + _ROUNDING
            kept[n] = kept[n - 1] + (kept[n - 1] + 1 <= target)
    return EvictionSchedule(kept, block_size)


def _fit_levels(
    curve: BudgetCurve, groups: HeadGroups, retention: float, floor_share: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Largest level at which all groups fit ``retention``, for each share that the floor takes; 0 where none does."""
    allowed = retention * groups.group.size / groups.page_members
    low, high = np.zeros_like(floor_share), np.ones_like(floor_share)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        held = np.maximum(groups.group_max(curve.at(middle)), floor_share[:, None]).sum(axis=1)
        low, high = np.where(held <= allowed, middle, low), np.where(held <= allowed, high, middle)
    return low
