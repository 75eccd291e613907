# SPDX-License-Identifier: Apache-2.0
"""The invariants of docs/design.md, verified at every step where ``TANGRAM_CHECK=1`` asks for it.

The scheduler's part runs when a step is planned, before anything is written: what every request holds, who shares pages
with whom, and that the pool counts no other page. The planned page lists then travel with vLLM's ``SchedulerOutput``,
and the CPU worker compares its page tables with them before the forward. Nothing here uses the page arithmetic of the
code that it checks: pages follow from the kept table alone.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_tangram.budget import RetentionPlan
    from vllm_tangram.engine.manager import HeadGroupManager
    from vllm_tangram.pages.table import PageTable

CHECK_VARIABLE = "TANGRAM_CHECK"

#: Name of the attribute of vLLM's ``SchedulerOutput`` under which ``Planned`` by request id travels.
PLANNED = "tangram_planned"

Ints = npt.NDArray[np.integer[Any]]


class BrokenInvariant(RuntimeError):
    """Pages are not what the design says: a fault of the program, after which answers may be wrong."""


@dataclass(frozen=True)
class Planned:
    """What a request holds in the step that was planned.

    Attributes:
        prompt_len: P.
        retention: that it is compressed to.
        pages: ``[n]`` int32 page ids, in order of birth.

    """

    prompt_len: int
    retention: float
    pages: npt.NDArray[np.int32]


def check_wanted() -> bool:
    """Whether ``TANGRAM_CHECK`` asks for the checks.

    Raises:
        TangramError: it is neither 0 nor 1.

    """
    value = os.environ.get(CHECK_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise TangramError(f"{CHECK_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


def places(kept: Ints, prompt_blocks: int, count: int) -> tuple[Ints, Ints]:
    """Where the first ``count`` pages of a request belong, by the order in which pages are born.

    Args:
        kept: ``[n_max + 1, N]`` blocks that each group keeps of the first n.
        prompt_blocks: whole blocks of the prompt.
        count: pages.

    Returns:
        (``[count]`` groups, ``[count]`` indices in the group).

    """
    num_groups = kept.shape[1]
    block, group = np.nonzero(np.diff(kept[: prompt_blocks + 1], axis=0))
    index = kept[block, group]
    later = max(count - len(group), 0)  # past the prompt every block adds a page to every group
    later_block, later_group = np.divmod(np.arange(later), num_groups)
    return (
        np.concatenate([group, later_group])[:count],
        np.concatenate([index, kept[prompt_blocks][later_group] + later_block])[:count],
    )


@dataclass(frozen=True)
class _Holding:
    """Pages of one request after a step: a copy of its list, and their ids."""

    preemptions: int
    blocks: Sequence[KVCacheBlock]
    ids: npt.NDArray[np.int32]


class PageCheck:
    """Verifies what a scheduler has planned. It remembers the step before: pages are append-only."""

    def __init__(self, manager: HeadGroupManager) -> None:
        self._manager = manager
        self._held: dict[str, _Holding] = {}
        self._held_last: dict[int, str] = {}  # page -> the request that gave it back

    def run(self, requests: Mapping[str, Request]) -> dict[str, Planned]:
        """Check all pages as they are after planning.

        Args:
            requests: those that are not done, by id.

        Returns:
            What the requests that hold pages hold.

        Raises:
            BrokenInvariant: names the request and, where it is about a page, the group.

        """
        budgets = self._manager.budgets
        for request_id in budgets.keys() ^ requests.keys():
            state = "ended, but is still announced" if request_id in budgets else "was never announced"
            raise BrokenInvariant(f"{CHECK_VARIABLE}: request {request_id} {state}")
        before, self._held = self._held, {}
        for request_id, blocks in self._manager.req_to_blocks.items():
            if blocks:
                if request_id not in requests:
                    raise BrokenInvariant(f"{CHECK_VARIABLE}: request {request_id} ended and holds {len(blocks)} pages")
                self._held[request_id] = self._holding(requests[request_id], blocks, before.get(request_id))
                self._check_count(requests[request_id])
        for request_id in before.keys() - self._held.keys():
            self._held_last.update(dict.fromkeys(before[request_id].ids.tolist(), request_id))
        self._check_sharing(requests)
        self._check_pool()
        return {
            request_id: Planned(budgets[request_id].prompt_len, budgets[request_id].retention, holding.ids)
            for request_id, holding in self._held.items()
        }

    def _holding(self, request: Request, blocks: Sequence[KVCacheBlock], before: _Holding | None) -> _Holding:
        """Its pages; of those that it had in the step before only that they are the same."""
        known = np.zeros(0, np.int32)
        if before is not None and before.preemptions == request.num_preemptions:
            known = before.ids
            # By identity: to vLLM blocks with equal fields are equal.
            if len(blocks) < len(known) or any(map(operator.is_not, before.blocks, blocks)):
                pairs = enumerate(zip(before.blocks, blocks, strict=False))
                index = next((i for i, (old, new) in pairs if old is not new), len(blocks))
                self._fail(
                    request.request_id, index, f"page {known[index]} was there in the step before and is not now"
                )
        new = np.array([block.block_id for block in blocks[len(known) :]], np.int32)
        if not new.all():
            self._fail(request.request_id, len(known) + int(np.argmin(new)), "holds page 0, which is nobody's")
        return _Holding(request.num_preemptions, list(blocks), np.concatenate([known, new]))

    def _check_count(self, request: Request) -> None:
        budget, held = self._manager.budgets[request.request_id], len(self._held[request.request_id].ids)
        tokens, prompt_len = request.num_computed_tokens, request.num_prompt_tokens
        if budget.prompt_len != prompt_len:
            self._fail(request.request_id, 0, f"was announced with {budget.prompt_len} prompt tokens, not {prompt_len}")
        block_size, kept = budget.schedule.block_size, budget.schedule.kept
        whole = min(tokens, prompt_len) // block_size
        due = int((kept[whole] + (-(-tokens // block_size) - whole)).sum())
        if held != due:
            self._fail(
                request.request_id,
                min(held, due),
                f"holds {held} pages, not {due}, after {tokens} tokens, {prompt_len} of them prompt, at retention "
                f"{budget.retention:g}; the first page too {'many' if held > due else 'few'}",
            )

    def _check_sharing(self, requests: Mapping[str, Request]) -> None:
        """A page is one request's, unless several have it at the same place of a compressed prefix of the same text."""
        names, ids = list(self._held), [holding.ids for holding in self._held.values()]
        holders = np.bincount(np.concatenate([np.zeros(0, np.int64), *ids]).astype(np.int64))
        first: dict[int, tuple[str, int]] = {}
        common: dict[tuple[str, str], int] = {}
        for name, pages in zip(names, ids, strict=True):
            for index in np.flatnonzero(holders[pages] > 1).tolist():
                page = int(pages[index])
                other, place = first.setdefault(page, (name, index))
                if (other, place) == (name, index):
                    continue
                if (other, name) not in common and other != name:
                    common[other, name] = self._common_pages(requests[other], requests[name])
                if place != index or index >= common.get((other, name), 0):
                    self._fail(name, index, f"page {page} is also {self._place(other, place)} of request {other}")

    def _common_pages(self, one: Request, other: Request) -> int:
        """Pages of the longest prefix of whole chunks that has the same text and retention in both."""
        mine, its = self._manager.budgets[one.request_id], self._manager.budgets[other.request_id]
        if not self._manager.enable_caching or mine.retention != its.retention:
            return 0
        for tokens in mine.boundaries(its.prompt_len):
            last = tokens // mine.schedule.block_size - 1
            if one.block_hashes[last] == other.block_hashes[last]:
                return mine.pages(tokens)
        return 0

    def _check_pool(self) -> None:
        """The pool counts the holders that there are, and everything else is free."""
        pool = self._manager.block_pool
        ids = [holding.ids for holding in self._held.values()]
        holders = np.bincount(np.concatenate([np.zeros(1, np.int32), *ids]), minlength=len(pool.blocks))
        counted = np.fromiter((block.ref_cnt for block in pool.blocks), np.int64, len(pool.blocks))
        wrong = np.flatnonzero(holders[1:] != counted[1:]) + 1
        if len(wrong):
            page = int(wrong[0])
            fault = f"the pool counts {counted[page]} holders of page {page}, there are {holders[page]}"
            for name, holding in self._held.items():
                if len(index := np.flatnonzero(holding.ids == page)):
                    self._fail(name, int(index[0]), fault)
            raise BrokenInvariant(
                f"{CHECK_VARIABLE}: {fault}; the last one was request {self._held_last.get(page, '(none known)')}"
            )
        free, taken = pool.get_num_free_blocks(), int(np.count_nonzero(holders[1:]))
        if free != len(pool.blocks) - 1 - taken:
            raise BrokenInvariant(
                f"{CHECK_VARIABLE}: {free} of {len(pool.blocks) - 1} pages are free although requests hold {taken}"
            )

    def _place(self, request_id: str, index: int) -> str:
        budget = self._manager.budgets[request_id]
        group, of_group = places(budget.schedule.kept, budget.prompt_len // budget.schedule.block_size, index + 1)
        return f"page {of_group[-1]} of group {group[-1]}"

    def _fail(self, request_id: str, index: int, fault: str) -> NoReturn:
        raise BrokenInvariant(f"{CHECK_VARIABLE}: request {request_id}, {self._place(request_id, index)}: {fault}")


def check_tables(
    planned: Mapping[str, Planned],
    plan: RetentionPlan,
    table: PageTable,
    batch: Sequence[str],
    slots: Ints,
    flat: Ints,
    counts: Ints,
) -> None:
    """Check that a worker reads the pages that were planned.

    Args:
        planned: by the scheduler.
        plan: the worker's own.
        table: the worker's page tables, this step's pages read.
        batch: ids of the R requests of the step.
        slots: ``[R]`` their slots in ``table``.
        flat: ``[R, W]`` page ids that the worker was told.
        counts: ``[R]`` how many of them are valid.

    Raises:
        BrokenInvariant: names the request and the group.

    """
    for row, (request_id, slot) in enumerate(zip(batch, slots.tolist(), strict=True)):
        if request_id not in planned:
            raise BrokenInvariant(f"{CHECK_VARIABLE}: request {request_id} is in the batch, but holds no pages")
        held = planned[request_id]
        count = len(held.pages)
        kept = plan.schedule(held.retention).kept
        group, index = places(kept, held.prompt_len // plan.block_size, max(count, int(counts[row])))
        for what, pages in (
            ("the worker's page list", flat[row, : counts[row]]),
            ("the worker's page table", table.pages[slot, group[:count], index[:count]]),
        ):
            shorter = min(len(pages), count)
            differ = np.flatnonzero(pages[:shorter] != held.pages[:shorter])
            first = int(differ[0]) if len(differ) else shorter
            if first < max(len(pages), count):
                theirs, ours = ([*ids.tolist(), *["no page"] * (first + 1)][first] for ids in (pages, held.pages))
                raise BrokenInvariant(
                    f"{CHECK_VARIABLE}: request {request_id}, page {index[first]} of group {group[first]}: {what} has "
                    f"{theirs}, the scheduler planned {ours}"
                )
