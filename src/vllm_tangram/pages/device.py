# SPDX-License-Identifier: Apache-2.0
"""Pages of head groups on the device, found by arithmetic from vLLM's flat page lists.

Pages are born in one canonical order (docs/design.md, "The invariant"). So where the j-th page of a group stands in the
flat list of a request is the same for all requests of one retention, as far as their prompts reach, and a sum beyond:

    page(g, j) = flat[positions[g, j]]                          j <  kept_g      (whole prompt blocks)
               = flat[tail + (j - kept_g) * N + g]              j >= kept_g      (every group at every block)

with ``kept_g`` the blocks that group g keeps of the whole prompt and ``tail`` the sum of them. No page table is kept
per request and nothing is written when pages are added: vLLM's own block table is enough, and a request costs one
row of ``N + 4`` integers when it arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from vllm_tangram.budget import EvictionSchedule

#: Columns of a request's row before the kept blocks of its groups: prompt length, tail, table, unused.
ROW_HEADER = 4


@triton.jit
def born_places(positions_row, index, kept, mask):
    """Where pages ``index`` that were born with the prompt stand in the flat list; else 0. First load of `page_ids`."""
    return tl.load(positions_row + index, mask=mask & (index < kept), other=0)


@triton.jit
def page_ids_at(flat_row, born, index, kept, tail, group, num_groups, mask):
    """Ids of pages ``index``, given their `born_places`, which may come long before. Second load of `page_ids`."""
    place = tl.where(index < kept, born, tail + (index - kept) * num_groups + group)
    return tl.load(flat_row + place, mask=mask, other=0)


@triton.jit
def page_ids(flat_row, positions_row, index, kept, tail, group, num_groups, mask):
    """Ids of pages ``index`` of one group; 0 where ``mask`` is false.

    Args:
        flat_row: pointer to the request's flat page list.
        positions_row: pointer to the positions of its retention and of the group.
        index: block of int32 page indices.
        kept: blocks that the group keeps of the whole prompt.
        tail: pages of all groups after the whole prompt blocks.
        group: g.
        num_groups: N.
        mask: which indices are wanted.

    """
    born = born_places(positions_row, index, kept, mask)
    return page_ids_at(flat_row, born, index, kept, tail, group, num_groups, mask)


class DevicePages:
    """What the kernels need beside vLLM's block table to find pages; addresses never change, so graphs may hold them.

    Slots are vLLM's request slots; ``-1`` in a batch stands for no request. Work is queued on the current stream, so a
    row may be rewritten while earlier steps that read it still run.

    Attributes:
        rows: ``[S, 4 + N]`` int32; prompt length P, tail, place of the retention's positions, unused, then the kept
            blocks of each group.
        positions: ``[K, N, J]`` int32; entries beyond what a whole prompt keeps are never read.
        num_groups: N.
        block_size: tokens of a block.

    """

    def __init__(
        self, num_slots: int, num_groups: int, max_blocks: int, block_size: int, num_tables: int, device: torch.device
    ) -> None:
        """Allocate for ``num_slots`` requests of up to ``max_blocks`` blocks and ``num_tables`` retentions at once."""
        self.rows = torch.zeros(num_slots, ROW_HEADER + num_groups, dtype=torch.int32, device=device)
        self.positions = torch.zeros(num_tables, num_groups, max_blocks, dtype=torch.int32, device=device)
        self.num_groups = num_groups
        self.block_size = block_size
        self._schedules: list[EvictionSchedule | None] = [None] * num_tables
        self._users = [0] * num_tables
        self._table_of: dict[int, int] = {}  # slot -> place of its retention

    def open(self, slot: int, prompt_len: int, schedule: EvictionSchedule) -> None:
        """Give ``slot`` to a request; what it held is forgotten.

        Raises:
            RuntimeError: more retentions at once than there are tables; the scheduler admits no more.

        """
        self.close(slot)
        table = self._acquire(schedule)
        self._table_of[slot] = table
        blocks = prompt_len // self.block_size
        row = np.empty(ROW_HEADER + self.num_groups, np.int32)
        row[:ROW_HEADER] = prompt_len, schedule.total[blocks], table, 0
        row[ROW_HEADER:] = schedule.kept[blocks]
        self._copy(self.rows[slot], row)

    def close(self, slot: int) -> None:
        """Forget the request in ``slot``; closing a closed slot does nothing."""
        table = self._table_of.pop(slot, None)
        if table is not None:
            self._users[table] -= 1

    def _acquire(self, schedule: EvictionSchedule) -> int:
        """Place of a retention's positions; a table without users stays until its place is needed."""
        for table, known in enumerate(self._schedules):
            if known is schedule:
                self._users[table] += 1
                return table
        free = [table for table, users in enumerate(self._users) if users == 0]
        if not free:
            raise RuntimeError(f"more than {len(self._users)} retentions at once")
        table = next((table for table in free if self._schedules[table] is None), free[0])
        self._schedules[table] = schedule
        self._users[table] = 1
        positions = schedule.positions()
        self._copy(self.positions[table, :, : positions.shape[1]], positions)
        return table

    @staticmethod
    def _copy(target: Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        if target.is_cuda:  # torch keeps the pinned buffer until the copy has run
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)
