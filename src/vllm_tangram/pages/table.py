# SPDX-License-Identifier: Apache-2.0
"""The worker's page tables: from vLLM's flat page lists to the pages of every head group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tangram.pages import kernels
from vllm_tangram.pages.kept import KeptTables
from vllm_tangram.pages.kernels import IntArray


class PageTable:
    """Page tables of the running requests, rebuilt from flat page lists alone.

    Pages are born in one canonical order (docs/design.md, "The invariant"), so page i of a request's flat list
    belongs to a group and an index that follow from the prompt length P and the kept table::

        n        1        2    3 (after the last whole prompt block)
        flat   p0 p1 p2 | p3 | p4 p5 p6 | ...       kept_g rises at n=1 for all groups, at n=2 for g1 alone
        pages  g0: p0 p4     g1: p1 p3 p5     g2: p2 p6

    All methods work in place on arrays of the caller. Use int32 for ids, slots and lengths and int64 for token
    counts and physical slots, C-contiguous: another type or layout works but is compiled anew at its first use.

    Attributes:
        pages: ``[num_slots, N, J]`` int32; entries beyond the pages that a group holds are undefined.

    """

    def __init__(
        self, num_slots: int, groups_total: int, max_pages_per_group: int, block_size: int, group_size: int
    ) -> None:
        """Make an empty table for ``num_slots`` requests, ``groups_total`` (N) groups of ``group_size`` (G) members."""
        self.pages = np.zeros((num_slots, groups_total, max_pages_per_group), np.int32)
        self.block_size = block_size
        self.group_size = group_size
        self._kept = KeptTables(groups_total)
        self._table = np.full(num_slots, -1, np.int32)
        self._prompt_len = np.zeros(num_slots, np.int64)
        self._ingested = np.zeros(num_slots, np.int64)
        self._next_block = np.ones(num_slots, np.int64)
        self._next_group = np.zeros(num_slots, np.int64)

    def open(self, slot: int, prompt_len: int, kept: IntArray) -> None:
        """Give ``slot`` to a request that has no page yet (or that starts again after a preemption).

        Args:
            slot: any slot; what it held is forgotten.
            prompt_len: P, prompt tokens.
            kept: ``[n_max + 1, N]`` whole blocks kept of the first n, per group; tables are told apart by identity
                and must not change.

        Raises:
            ValueError: the table has another shape than those before it, or ends before the prompt does.

        """
        if prompt_len < 0 or prompt_len // self.block_size >= len(kept):
            raise ValueError(
                f"a prompt of {prompt_len} tokens needs a kept table of {prompt_len // self.block_size + 1} rows, "
                f"got {len(kept)}"
            )
        place = self._kept.acquire(kept)  # before the close: a slot reopened with its own table must not lose it
        self.close(slot)
        self._table[slot] = place
        self._prompt_len[slot] = prompt_len

    def close(self, slot: int) -> None:
        """Forget the request in ``slot``; closing a closed slot does nothing."""
        if self._table[slot] >= 0:
            self._kept.release(int(self._table[slot]))
        self._table[slot] = -1
        self._ingested[slot] = 0
        self._next_block[slot] = 1
        self._next_group[slot] = 0

    def ingest(self, slot: int, flat: IntArray, count: int) -> None:
        """Read the page ids of one request: ``flat[:count]``, of which only those not read before are looked at.

        Raises:
            ValueError: ``count`` shrank, exceeds ``flat`` or the table, or the slot is not open.

        """
        self.ingest_all(np.array([slot], np.int32), np.zeros(1, np.int32), flat[None], np.array([count], np.int32))

    def ingest_all(self, slots: IntArray, rows: IntArray, flat: IntArray, counts: IntArray) -> None:
        """Read the page ids of a batch; rows whose count did not change cost nothing.

        Args:
            slots: ``[R]`` slots of the requests.
            rows: ``[R]`` their rows in ``flat`` and ``counts``.
            flat: ``[max_reqs, W]`` page ids of each request so far, in birth order.
            counts: ``[max_reqs]`` valid ids in each row of ``flat``.

        Raises:
            ValueError: as for `ingest`.

        """
        kernels.ingest_pages(
            self.pages,
            self._ingested,
            self._next_block,
            self._next_group,
            self._prompt_len,
            self._table,
            self._kept.stacked,
            self.block_size,
            slots,
            rows,
            flat,
            counts,
        )

    def lengths(self, slots: IntArray, tokens: IntArray, out: IntArray) -> None:
        """Tokens that every member of a group holds: ``out[r, g] = length_g(tokens[r], P)``.

        Args:
            slots: ``[R]`` open slots.
            tokens: ``[R]`` tokens of the request, evicted ones included.
            out: ``[R, N]``.

        Raises:
            ValueError: a slot is not open.

        """
        kernels.group_lengths(self._prompt_len, self._table, self._kept.stacked, self.block_size, slots, tokens, out)

    def member_blocks(
        self, slots: IntArray, group: IntArray, column: IntArray, counts: IntArray, out: IntArray
    ) -> None:
        """Block table of a paged kernel that sees the pool as ``num_pages * G`` blocks of one head.

        Args:
            slots: ``[R]``.
            group: ``[H]`` group of each member (the heads of a layer, or any members).
            column: ``[H]`` column of each member in its group's pages.
            counts: ``[R * H]`` pages to read, row-major (r, h).
            out: ``[R * H, J']`` virtual blocks ``page * G + column``; entries from ``counts`` on stay as they are.

        Raises:
            ValueError: a count exceeds the table or ``out``.

        """
        kernels.member_blocks(self.pages, self.group_size, slots, group, column, counts, out)

    def member_slots(
        self, slot: int, group: IntArray, column: IntArray, starts: IntArray, counts: IntArray, out: IntArray
    ) -> None:
        """Physical token slots for appending tokens to the members of one request.

        Args:
            slot: the request.
            group: ``[H]``.
            column: ``[H]``.
            starts: ``[H]`` length of each member before the append.
            counts: ``[H]`` tokens to append to it.
            out: ``[sum(counts)]`` slots ``virtual block * block_size + offset``, members concatenated in order.

        Raises:
            ValueError: ``out`` has another length, or a member outgrows the table.

        """
        kernels.member_slots(self.pages, self.group_size, self.block_size, slot, group, column, starts, counts, out)

    def decode_slots(
        self, slots: IntArray, group: IntArray, column: IntArray, lengths: IntArray, out: IntArray
    ) -> None:
        """Physical slot of the newest token of every (request, member).

        Args:
            slots: ``[R]``.
            group: ``[H]``.
            column: ``[H]``.
            lengths: ``[R, N]`` with the new token counted.
            out: ``[R * H]``, row-major (r, h); -1 (vLLM's padding slot) where the length is 0.

        Raises:
            ValueError: a member outgrows the table.

        """
        kernels.decode_slots(self.pages, self.group_size, self.block_size, slots, group, column, lengths, out)

    def held(self, slot: int) -> npt.NDArray[np.int64]:
        """``[N]`` pages that each group of an open slot holds, by the birth order."""
        births = self._kept.stacked[self._table[slot]].astype(np.int64)
        prompt_blocks = int(self._prompt_len[slot]) // self.block_size
        block, group = int(self._next_block[slot]), int(self._next_group[slot])

        def after(n: int) -> npt.NDArray[np.int64]:
            last = min(n, prompt_blocks)
            pages: npt.NDArray[np.int64] = births[last] + (n - last)
            return pages

        return np.concatenate([after(block)[:group], after(block - 1)[group:]])

    def check_integrity(self) -> None:
        """Check that every open slot holds what the birth order says, and that requests share pages only where both
        have them at the same place: what they share is a compressed prefix.

        Slow; for tests.

        Raises:
            AssertionError: names the slot or the page.

        """
        holder: dict[int, tuple[int, int]] = {}
        for slot in np.flatnonzero(self._table >= 0).tolist():
            held = self.held(slot)
            if held.sum() != self._ingested[slot]:
                raise AssertionError(f"slot {slot} read {self._ingested[slot]} pages but places {held.sum()}")
            for group, count in enumerate(held.tolist()):
                for index, page in enumerate(self.pages[slot, group, :count].tolist()):
                    place = holder.setdefault(page, (group, index))
                    if place != (group, index):
                        raise AssertionError(f"page {page} is at {place} and, in slot {slot}, at {(group, index)}")


def compile_kernels() -> None:
    """Compile the kernels, or load them from disk, now rather than in a server's first request."""
    table = PageTable(1, 1, 1, block_size=32, group_size=1)
    slots, member = np.zeros(1, np.int32), np.zeros(1, np.int32)
    table.open(0, 1, np.zeros((1, 1), np.int32))
    table.ingest_all(slots, member, np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    table.lengths(slots, np.ones(1, np.int64), np.zeros((1, 1), np.int32))
    table.member_blocks(slots, member, member, np.ones(1, np.int32), np.zeros((1, 1), np.int32))
    table.member_slots(0, member, member, np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int64))
    table.decode_slots(slots, member, member, np.ones((1, 1), np.int32), np.zeros(1, np.int64))
