# SPDX-License-Identifier: Apache-2.0
"""Time of a step's page-table work: reading new pages and computing lengths."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from vllm_tangram.pages.reference import PythonPageTable
from vllm_tangram.pages.table import PageTable

_BLOCK_SIZE = 32
_GROUP_SIZE = 4
_PROMPT_BLOCKS = 64
_PYTHON_STEPS = 20

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PageTableTimes:
    """Median seconds of one step's work.

    Attributes:
        crossing: every request begins a page in every group.
        common: no request does; all but one of ``block_size`` decode steps.
        python_crossing: the same in plain Python.
        python_common: likewise.

    """

    crossing: float
    common: float
    python_crossing: float
    python_common: float


class _Batch:
    """Decoding requests, with page lists as vLLM's scheduler would hand them over, each page in use once."""

    def __init__(self, requests: int, groups: int, steps: int) -> None:
        rates = np.linspace(0.05, 0.6, groups)  # budgets as skewed as real ones
        self.kept = np.floor(np.arange(_PROMPT_BLOCKS + 1)[:, None] * rates).astype(np.int32)
        self.prompt_len = _PROMPT_BLOCKS * _BLOCK_SIZE
        self.prompt_pages = int(self.kept[-1].sum())
        self.groups = groups
        width = self.prompt_pages + groups * steps
        self.flat = np.arange(requests * width, dtype=np.int32).reshape(requests, width)
        self.slots = np.arange(requests, dtype=np.int32)
        self.lengths = np.zeros((requests, groups), np.int32)

    def open(self, table: PageTable | PythonPageTable) -> None:
        for slot in self.slots.tolist():
            table.open(slot, self.prompt_len, self.kept)
        self.advance(table, 0)

    def advance(self, table: PageTable | PythonPageTable, crossed: int) -> Int32s:
        """A step's work after as many page boundaries past the prompt; gives the lengths."""
        counts = np.full(len(self.slots), self.prompt_pages + crossed * self.groups, np.int32)
        tokens = np.full(len(self.slots), self.prompt_len + crossed * _BLOCK_SIZE, np.int64)
        table.ingest_all(self.slots, self.slots, self.flat, counts)
        table.lengths(self.slots, tokens, self.lengths)
        return self.lengths


def measure_page_table(requests: int = 64, groups: int = 72, steps: int = 200) -> PageTableTimes:
    """Time the compiled page table beside the plain Python one, on the same pages.

    Args:
        requests: R, all decoding.
        groups: N, head groups.
        steps: steps timed; the plain Python table takes 20 at most.

    Raises:
        AssertionError: the two tables differ.

    """
    batch = _Batch(requests, groups, steps)
    table = PageTable(requests, groups, _PROMPT_BLOCKS + steps, _BLOCK_SIZE, _GROUP_SIZE)
    python = PythonPageTable(groups, _BLOCK_SIZE)
    batch.open(table)  # compiles, too
    batch.open(python)
    python_steps = min(steps, _PYTHON_STEPS)
    python_crossing = [_seconds(batch, python, n) for n in range(1, python_steps + 1)]
    python_common = [_seconds(batch, python, python_steps) for _ in range(python_steps)]
    crossing = [_seconds(batch, table, n) for n in range(1, python_steps + 1)]
    _assert_equal(batch, table, python, python_steps)
    crossing += [_seconds(batch, table, n) for n in range(python_steps + 1, steps + 1)]
    common = [_seconds(batch, table, steps) for _ in range(steps)]
    return PageTableTimes(median(crossing), median(common), median(python_crossing), median(python_common))


def _seconds(batch: _Batch, table: PageTable | PythonPageTable, crossed: int) -> float:
    start = time.perf_counter()
    batch.advance(table, crossed)
    return time.perf_counter() - start


def _assert_equal(batch: _Batch, table: PageTable, python: PythonPageTable, crossed: int) -> None:
    lengths = batch.advance(table, crossed).copy()
    assert (lengths == batch.advance(python, crossed)).all(), "the tables give different lengths"
    for slot in batch.slots.tolist():
        for group, pages in enumerate(python.requests[slot].pages):
            assert table.pages[slot, group, : len(pages)].tolist() == pages, f"slot {slot}, group {group} differ"
