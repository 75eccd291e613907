# SPDX-License-Identifier: Apache-2.0
"""The per-step work of `PageTable` in plain Python: what the compiled loops are tested and timed against."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tangram.pages.kernels import IntArray


@dataclass
class _Request:
    prompt_blocks: int
    prompt_len: int
    kept: IntArray
    pages: list[list[int]]
    ingested: int = 0
    next_block: int = 1
    next_group: int = 0


class PythonPageTable:
    """Same interface for the per-step work as `vllm_tangram.pages.table.PageTable`, one Python step per page and group.

    Attributes:
        requests: open slots; ``requests[slot].pages[g]`` lists the pages of group g.

    """

    def __init__(self, groups_total: int, block_size: int) -> None:
        self.groups_total = groups_total
        self.block_size = block_size
        self.requests: dict[int, _Request] = {}

    def open(self, slot: int, prompt_len: int, kept: IntArray) -> None:
        """Give ``slot`` to a request without pages."""
        empty: list[list[int]] = [[] for _ in range(self.groups_total)]
        self.requests[slot] = _Request(prompt_len // self.block_size, prompt_len, kept, empty)

    def close(self, slot: int) -> None:
        """Forget the request in ``slot``."""
        del self.requests[slot]

    def ingest_all(self, slots: IntArray, rows: IntArray, flat: IntArray, counts: IntArray) -> None:
        """Read the page ids of a batch.

        Raises:
            ValueError: a count shrank.

        """
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            request, count = self.requests[slot], int(counts[row])
            if count < request.ingested:
                raise ValueError(f"the page count of slot {slot} shrank from {request.ingested} to {count}")
            for page in flat[row, request.ingested : count].tolist():
                request.pages[self._next_birth(request)].append(page)
            request.ingested = count

    def lengths(self, slots: IntArray, tokens: IntArray, out: IntArray) -> None:
        """``out[r, g] = length_g(tokens[r], P)``."""
        for r, (slot, t) in enumerate(zip(slots.tolist(), tokens.tolist(), strict=True)):
            request = self.requests[slot]
            n = min(t, request.prompt_len) // self.block_size
            out[r] = [t - self.block_size * (n - kept) for kept in request.kept[n].tolist()]

    def _next_birth(self, request: _Request) -> int:
        """Group of the next page; moves the cursor past it."""
        while True:
            n, g = request.next_block, request.next_group
            request.next_group = (g + 1) % self.groups_total
            request.next_block = n + (request.next_group == 0)
            if n > request.prompt_blocks or request.kept[n, g] > request.kept[n - 1, g]:
                return g
