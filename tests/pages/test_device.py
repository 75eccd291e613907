# SPDX-License-Identifier: Apache-2.0
"""Page ids that kernels compute on the device against the CPU's page table, fed with the same flat lists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.budget.strategies import Case, cases, skewed_curve

from vllm_tangram.budget import EvictionSchedule, group_members
from vllm_tangram.pages.device import ROW_HEADER, DevicePages, page_ids
from vllm_tangram.pages.table import PageTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, BEYOND = 4, 3  # blocks after the longest prompt
_HEADER = tl.constexpr(ROW_HEADER)


@triton.jit
def list_pages_kernel(out, flat, rows, positions, slot, count, num_groups, max_blocks, flat_width, J: tl.constexpr):
    """``out[g, j]`` of one slot; -1 from ``count`` of the group on."""
    g, index = tl.program_id(0), tl.arange(0, J)
    row = rows + slot * (_HEADER + num_groups)
    mask = index < tl.load(count + g)
    page = page_ids(
        flat + slot * flat_width,
        positions + (tl.load(row + 2) * num_groups + g) * max_blocks,
        index,
        tl.load(row + _HEADER + g),
        tl.load(row + 1),
        g,
        num_groups,
        mask,
    )
    tl.store(out + g * J + index, tl.where(mask, page, page - 1))


def listed(pages: DevicePages, flat: np.ndarray, slot: int, count: np.ndarray) -> np.ndarray:
    """``[N, J]`` what a kernel finds; -1 beyond ``count``, where `page_ids` says 0."""
    width = triton.next_power_of_2(int(count.max()) + 1)
    out = torch.full((pages.num_groups, width), -77, dtype=torch.int32, device=DEVICE)
    list_pages_kernel[(pages.num_groups,)](
        out,
        torch.from_numpy(flat).to(DEVICE),
        pages.rows,
        pages.positions,
        slot,
        torch.from_numpy(count.astype(np.int32)).to(DEVICE),
        pages.num_groups,
        pages.positions.shape[2],
        flat.shape[1],
        J=width,
    )
    return out.cpu().numpy()


def check_slot(
    pages: DevicePages, table: PageTable, flat: np.ndarray, slot: int, schedule: EvictionSchedule, prompt: int, t: int
) -> None:
    """All pages that the request in ``slot`` holds after ``t`` tokens; ``table`` has ingested none of them."""
    total = schedule.num_pages(t, prompt)
    table.open(slot, prompt, schedule.kept)
    table.ingest(slot, flat[slot], total)
    count = table.held(slot)
    np.testing.assert_array_equal(count, -(-schedule.lengths(t, prompt) // schedule.block_size))
    visible = np.where(np.arange(flat.shape[1]) < total, flat, -9)  # what lies beyond is not to be looked at
    found = listed(pages, visible.astype(np.int32), slot, count)
    for g, held in enumerate(count.tolist()):
        assert found[g, :held].tolist() == table.pages[slot, g, :held].tolist()
        assert set(found[g, held:].tolist()) == {-1}


def make_both(
    num_groups: int, n_max: int, block_size: int, num_tables: int
) -> tuple[DevicePages, PageTable, np.ndarray]:
    blocks = n_max + 1 + BEYOND
    pages = DevicePages(SLOTS, num_groups, n_max, block_size, num_tables, DEVICE)
    table = PageTable(SLOTS, num_groups, blocks, block_size, group_size=1)
    ids = np.random.default_rng().permutation(np.arange(1, SLOTS * num_groups * blocks + 1))
    return pages, table, ids.astype(np.int32).reshape(SLOTS, -1)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.data())
def test_pages_equal_those_of_the_page_table(case: Case, data: st.DataObject) -> None:
    """Slots are opened again and again, at more retentions in turn than there are tables at once."""
    case = replace(case, n_max=data.draw(st.integers(1, 40)))
    retentions = data.draw(st.lists(st.integers(1, 1000), min_size=3, max_size=3, unique=True))
    schedules = [replace(case, retention=r / 1000).build() for r in retentions]
    longest = case.n_max * case.block_size + case.block_size // 2
    pages, table, flat = make_both(case.groups.num_groups, case.n_max, case.block_size, num_tables=2)
    addresses = pages.rows.data_ptr(), pages.positions.data_ptr()

    running: dict[int, tuple[EvictionSchedule, int]] = {}
    for _ in range(6):
        slot = data.draw(st.integers(0, SLOTS - 1))
        others = {id(schedule) for s, (schedule, _) in running.items() if s != slot}
        possible = [s for s in schedules if id(s) in others or len(others) < 2]
        running[slot] = data.draw(st.sampled_from(possible)), data.draw(st.integers(1, longest))
        pages.open(slot, running[slot][1], running[slot][0])
        for open_slot, (schedule, prompt) in running.items():  # a table taken over too early shows in the others
            # Any state: after a chunk, or beyond the prompt.
            t = min(data.draw(st.integers(1, prompt // case.block_size + 1)) * case.block_size, prompt)
            t = data.draw(st.sampled_from([t, prompt, prompt + data.draw(st.integers(0, BEYOND * case.block_size))]))
            check_slot(pages, table, flat, open_slot, schedule, prompt, t)
        if data.draw(st.booleans()):
            closed = data.draw(st.sampled_from(sorted(running)))
            pages.close(closed)
            pages.close(closed)  # as good as once
            del running[closed]
    assert (pages.rows.data_ptr(), pages.positions.data_ptr()) == addresses


def test_more_retentions_at_once_than_tables_are_refused() -> None:
    curve = skewed_curve(6)
    groups = group_members(curve.at(0.3), (2, 3), 2, "global")
    case = Case(curve, groups, 0.3, block_size=16, chunk=4, sinks=4, window=16, n_max=20)
    first, second, third = (replace(case, retention=r).build() for r in (0.3, 0.5, 0.7))
    pages, table, flat = make_both(groups.num_groups, 20, 16, num_tables=2)
    pages.open(0, 300, first)
    pages.open(1, 200, second)
    pages.open(2, 320, second)
    with pytest.raises(RuntimeError, match="more than 2 retentions"):
        pages.open(3, 300, third)
    pages.close(1)
    with pytest.raises(RuntimeError, match="more than 2 retentions"):
        pages.open(3, 300, third)  # the slot 2 still needs it
    check_slot(pages, table, flat, 0, first, 300, 300)
    check_slot(pages, table, flat, 2, second, 320, 330)
    pages.open(2, 320, third)  # a slot may take the place of its own retention
    check_slot(pages, table, flat, 0, first, 300, 340)
    check_slot(pages, table, flat, 2, third, 320, 160)


def test_a_retention_that_comes_back_finds_its_table() -> None:
    """A table without users stays: nothing is copied when its retention is asked for again."""
    curve = skewed_curve(6)
    groups = group_members(curve.at(0.3), (2, 3), 2, "global")
    case = Case(curve, groups, 0.3, block_size=16, chunk=4, sinks=4, window=16, n_max=20)
    schedule, other = case.build(), replace(case, retention=0.6).build()
    pages, table, flat = make_both(groups.num_groups, 20, 16, num_tables=2)
    pages.open(0, 300, schedule)
    pages.close(0)
    before = pages.positions.clone()
    pages.open(0, 250, other)  # goes where no retention was yet
    assert torch.equal(pages.positions[0], before[0])
    assert before[0].any()
    before = pages.positions.clone()
    pages.open(1, 250, schedule)
    assert torch.equal(pages.positions, before)
    check_slot(pages, table, flat, 1, schedule, 250, 260)
    check_slot(pages, table, flat, 0, other, 250, 260)
