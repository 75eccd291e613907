# SPDX-License-Identifier: Apache-2.0
"""Decode batches as the engine meets them: requests of different lengths whose heads hold different numbers of tokens.

Lengths, head groups and page lists come from the product's own code; only the page ids are drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vllm_tangram.budget import EvictionSchedule, RetentionPlan, RetentionProfile
from vllm_tangram.config import TangramConfig
from vllm_tangram.errors import TangramError
from vllm_tangram.pages.table import PageTable

CHUNK_SIZE = 8192  # what long prompts hold hardly depends on it
_JITTER = 0.4  # requests are up to this much longer or shorter than the mean
_SEED = 0  # every run measures the same batches


@dataclass(frozen=True)
class Cell:
    """Requests that decode together.

    Attributes:
        requests: R.
        tokens: mean tokens of a request.

    """

    requests: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.requests} x {self.tokens}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Read ``"4x32768"``.

        Raises:
            TangramError: not two whole numbers, at least one request of 256 tokens.

        """
        requests, _, tokens = text.lower().replace(" ", "").partition("x")
        if not (requests.isdecimal() and tokens.isdecimal() and int(requests) >= 1 and int(tokens) >= 256):
            raise TangramError(f"--cells: {text!r} is not requests x tokens (256 at least), such as 4x32768")
        return cls(int(requests), int(tokens))

    def request_tokens(self) -> NDArray[np.int64]:
        """[R] tokens of each request, the newest included."""
        jitter = np.random.default_rng(_SEED).uniform(1 - _JITTER, 1 + _JITTER, self.requests)
        return np.floor(self.tokens * jitter / jitter.mean()).astype(np.int64)


CELLS = (Cell(1, 100_000), Cell(4, 32_768), Cell(4, 100_000), Cell(16, 32_768), Cell(32, 16_384))


def plan_for(
    profile: RetentionProfile | None,
    shape: tuple[int, int],
    retention: float,
    *,
    group_size: int,
    block_size: int,
    cells: Sequence[Cell],
) -> RetentionPlan:
    """What an engine of this retention lets each head keep.

    Args:
        profile: None gives every head the same.
        shape: (L, H).
        retention: in (0, 1].
        group_size: members of a page, G.
        block_size: tokens of a page.
        cells: the longest of their requests must fit.

    Raises:
        TangramError: the options do not fit each other or the profile.

    """
    config = TangramConfig.parse(
        {
            "retention": retention,
            "page_group_size": group_size,
            "chunk_size": CHUNK_SIZE,
            "budgets": "uniform" if profile is None else "profile",
        }
    )
    longest = max(int(cell.request_tokens().max()) for cell in cells)
    return RetentionPlan(
        config, profile, num_layers=shape[0], num_kv_heads=shape[1], block_size=block_size, max_tokens=longest
    )


class Workload:
    """A cell at one retention: all requests take their first decode step.

    Attributes:
        cell: the requests.
        plan: what each head keeps.
        schedule: the same, tabulated.
        tokens: [R] int64, tokens of each request, the newest included; the others are its prompt.
        flat: [R, W] int32, page ids of each request in birth order, as vLLM's block table has them; random, none twice,
            none 0 but beyond a request's own.

    """

    def __init__(self, cell: Cell, plan: RetentionPlan) -> None:
        """Hand out pages to the requests of ``cell``."""
        self.cell = cell
        self.plan = plan
        self.schedule: EvictionSchedule = plan.schedule(plan.config.retention)
        self.tokens = cell.request_tokens()
        counts = np.array([self.schedule.num_pages(t, t - 1) for t in self.tokens.tolist()])
        ids = np.random.default_rng(_SEED).permutation(counts.sum()).astype(np.int32) + 1
        self.flat = np.zeros((cell.requests, counts.max()), np.int32)
        self.flat[np.arange(counts.max()) < counts[:, None]] = ids
        self._counts = counts.astype(np.int32)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, vLLM's null page included."""
        return int(self._counts.sum()) + 1

    @property
    def pool_numbers(self) -> int:
        """Numbers of one column and one channel of the pool: ``num_pages * G * block_size``."""
        return self.num_pages * self.plan.groups.size * self.plan.block_size

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[R, L, H] tokens that each head holds, the newest included."""
        groups = np.stack([self.schedule.lengths(t, t - 1) for t in self.tokens.tolist()])
        return groups[:, self.plan.groups.group]

    @property
    def uniform_lengths(self) -> NDArray[np.int64]:
        """[R] tokens that every head would hold if all held the same, rounded up: at least as much memory."""
        return np.ceil(self.lengths.mean(axis=(1, 2))).astype(np.int64)

    @property
    def shares(self) -> NDArray[np.float64]:
        """[L, H] fraction that each head holds of the longest prompt; known before the first request."""
        kept = self.schedule.kept
        return np.maximum(kept[-1], 1)[self.plan.groups.group] / (len(kept) - 1)

    def member_blocks(self, layer: int) -> NDArray[np.int32]:
        """[R * H, J] block table of a paged kernel that sees the pool as ``num_pages * G`` blocks of one head."""
        groups = self.plan.groups
        counts = -(-self.lengths[:, layer].ravel() // self.plan.block_size)
        out = np.zeros((len(counts), int(counts.max())), np.int32)
        slots = np.arange(self.cell.requests, dtype=np.int32)
        self._table.member_blocks(slots, groups.group[layer], groups.column[layer], counts.astype(np.int32), out)
        return out

    @cached_property
    def _table(self) -> PageTable:
        most = int(-(-self.lengths.max() // self.plan.block_size))
        slots = np.arange(self.cell.requests, dtype=np.int32)
        table = PageTable(len(slots), self.plan.num_groups, most, self.plan.block_size, self.plan.groups.size)
        for slot, t in enumerate(self.tokens.tolist()):
            table.open(slot, t - 1, self.schedule.kept)
        table.ingest_all(slots, slots, self.flat, self._counts)
        return table
