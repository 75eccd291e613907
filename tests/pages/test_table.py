# SPDX-License-Identifier: Apache-2.0
"""The page table against the invariant of docs/design.md, against itself in one step, and against plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tangram.pages.kernels import IntArray
from vllm_tangram.pages.reference import PythonPageTable
from vllm_tangram.pages.table import PageTable

BLOCK = 4
N_MAX = 12
SLOTS = 5
GROUP_SIZE = 3


@dataclass
class Request:
    """A request's way through prefill and decode: its kept table, P, and t after each step."""

    kept: IntArray
    prompt_len: int
    steps: list[int]

    def pages(self, tokens: int) -> IntArray:
        """[N] pages_g(t, P), as docs/design.md has it."""
        n = min(tokens, self.prompt_len) // BLOCK
        return self.kept[n] + -(-tokens // BLOCK) - n

    def lengths(self, tokens: int) -> IntArray:
        n = min(tokens, self.prompt_len) // BLOCK
        return tokens - BLOCK * (n - self.kept[n])

    def births(self, tokens: int) -> list[int]:
        """Group of every page after ``tokens`` tokens, in the canonical order."""
        return [
            group
            for n in range(1, -(-tokens // BLOCK) + 1)
            for group in range(self.kept.shape[1])
            if n > self.prompt_len // BLOCK or self.kept[n, group] > self.kept[n - 1, group]
        ]


def kept_tables(num_groups: int) -> st.SearchStrategy[IntArray]:
    rises = st.lists(st.lists(st.booleans(), min_size=num_groups, max_size=num_groups), min_size=N_MAX, max_size=N_MAX)
    return rises.map(lambda rows: np.cumsum([[0] * num_groups, *rows], axis=0).astype(np.int32))


@st.composite
def requests(draw: st.DrawFn, num_groups: int) -> Request:
    kept = draw(kept_tables(num_groups))
    prompt_len = draw(st.integers(1, (N_MAX + 1) * BLOCK - 1))
    chunk = BLOCK * draw(st.integers(1, 5))
    chunk_ends = [*range(chunk, prompt_len, chunk), prompt_len]
    # The table need not look after every step: it catches up.
    seen = [t for t in chunk_ends if draw(st.booleans())]
    decoded = sorted(draw(st.sets(st.integers(0, 9), min_size=1)))
    return Request(kept, prompt_len, [*seen, *(prompt_len + d for d in decoded)])


batches = st.integers(1, 4).flatmap(lambda n: st.lists(requests(n), min_size=1, max_size=SLOTS))


def make_table(num_groups: int) -> PageTable:
    return PageTable(SLOTS, num_groups, N_MAX + 4, BLOCK, GROUP_SIZE)


def flat_lists(batch: list[Request]) -> IntArray:
    """[R, W] distinct page ids, in no order."""
    width = 4 * (N_MAX + 4)
    return np.random.default_rng(0).permutation(len(batch) * width).astype(np.int32).reshape(len(batch), width)


def held(table: PageTable, slot: int) -> list[list[int]]:
    return [table.pages[slot, g, :count].tolist() for g, count in enumerate(table.held(slot).tolist())]


@settings(max_examples=150, deadline=None)
@given(batches, st.randoms(use_true_random=False))
def test_pages_and_lengths_follow_the_invariant_whatever_the_steps(batch: list[Request], random: Random) -> None:
    num_groups = batch[0].kept.shape[1]
    table, python = make_table(num_groups), PythonPageTable(num_groups, BLOCK)
    flat = flat_lists(batch)
    rows = np.array(random.sample(range(len(batch)), len(batch)), np.int32)  # a request's row is not its slot
    slots = np.array(random.sample(range(SLOTS), len(batch)), np.int32)
    for slot, request in zip(slots.tolist(), batch, strict=True):
        table.open(slot, request.prompt_len, request.kept)
        python.open(slot, request.prompt_len, request.kept)

    counts = np.zeros(len(batch), np.int32)
    tokens = np.zeros(len(batch), np.int64)
    for step in range(max(len(request.steps) for request in batch)):
        for r, request in enumerate(batch):
            if step < len(request.steps):
                tokens[r] = request.steps[step]
                counts[rows[r]] = request.pages(request.steps[step]).sum()
        out = np.full((len(batch), num_groups), -1, np.int32)
        out_python = out.copy()
        table.ingest_all(slots, rows, flat, counts)
        table.lengths(slots, tokens, out)
        python.ingest_all(slots, rows, flat, counts)
        python.lengths(slots, tokens, out_python)
        table.check_integrity()

        np.testing.assert_array_equal(out, out_python)
        for r, request in enumerate(batch):
            slot, now = int(slots[r]), int(tokens[r])
            np.testing.assert_array_equal(out[r], request.lengths(now))
            np.testing.assert_array_equal(table.held(slot), request.pages(now))
            expected: list[list[int]] = [[] for _ in range(num_groups)]
            for page, group in zip(flat[rows[r]].tolist(), request.births(now), strict=False):
                expected[group].append(page)
            assert held(table, slot) == expected == python.requests[slot].pages


@settings(max_examples=100, deadline=None)
@given(requests(3), st.data())
def test_any_cut_of_the_flat_list_gives_the_same_table(request_: Request, data: st.DataObject) -> None:
    """Even where the list is cut within a round of births, which the scheduler never does."""
    flat = flat_lists([request_])[0]
    total = int(request_.pages(request_.prompt_len + 9).sum())
    cuts = [*sorted(data.draw(st.sets(st.integers(0, total)))), total]
    once, piecewise = make_table(3), make_table(3)
    for table in (once, piecewise):
        table.open(0, request_.prompt_len, request_.kept)
    once.ingest(0, flat, total)
    for cut in cuts:
        unread = flat.copy()
        unread[cut:] = -7  # what lies beyond the count is not looked at
        piecewise.ingest(0, unread, cut)
        piecewise.check_integrity()
    assert held(piecewise, 0) == held(once, 0)


def test_a_slot_starts_afresh_when_it_is_opened_again() -> None:
    kept = np.arange(N_MAX + 1, dtype=np.int32)[:, None].repeat(2, axis=1)
    table = make_table(2)
    table.open(1, 8, kept)
    table.ingest(1, np.arange(3, dtype=np.int32), 3)  # stops between the groups
    table.open(1, 8, kept)
    assert held(table, 1) == [[], []]
    table.ingest(1, np.arange(10, 14, dtype=np.int32), 4)
    assert held(table, 1) == [[10, 12], [11, 13]]
    table.close(1)
    table.close(1)
    with pytest.raises(ValueError, match="not open"):
        table.ingest(1, np.arange(4, dtype=np.int32), 4)


def test_misuse_is_refused() -> None:
    kept = np.zeros((N_MAX + 1, 2), np.int32)
    table = make_table(2)
    with pytest.raises(ValueError, match="kept table of 14 rows"):
        table.open(0, (N_MAX + 1) * BLOCK, kept)
    with pytest.raises(ValueError, match=r"\[n_max \+ 1, 2\]"):
        table.open(0, 1, kept[:, :1])
    table.open(0, 4, kept)
    with pytest.raises(ValueError, match="must all have 13 rows"):
        table.open(1, 4, kept[:-1].copy())
    flat = np.arange(100, dtype=np.int32)
    table.ingest(0, flat, 4)
    with pytest.raises(ValueError, match="shrank"):
        table.ingest(0, flat, 3)
    with pytest.raises(ValueError, match="width"):
        table.ingest(0, flat[:5], 6)
    with pytest.raises(ValueError, match="room"):
        table.ingest(0, flat, 2 * (N_MAX + 4) + 1)
    with pytest.raises(ValueError, match="open slot"):
        table.lengths(np.array([3], np.int32), np.array([4], np.int64), np.zeros((1, 2), np.int32))


def test_integrity_check_finds_a_page_at_two_places() -> None:
    """At one place two requests may share it: both begin with the same compressed prefix."""
    kept = np.zeros((N_MAX + 1, 2), np.int32)
    table = make_table(2)
    for slot in (0, 1):
        table.open(slot, 1, kept)
        table.ingest(slot, np.array([7 + slot, 3 + slot], np.int32), 2)
    table.check_integrity()
    table.pages[1, 0, 0] = 7
    table.check_integrity()
    table.pages[1, 1, 0] = 7
    with pytest.raises(AssertionError, match="page 7"):
        table.check_integrity()


def test_tables_are_shared_recycled_and_survive_growth() -> None:
    """More distinct tables than the registry starts with, opened and closed in waves."""
    rng = np.random.default_rng(1)
    table = PageTable(20, 2, N_MAX + 4, BLOCK, GROUP_SIZE)
    opened: dict[int, IntArray] = {}
    for wave in range(6):
        shared = np.cumsum(rng.random((N_MAX + 1, 2)) < 0.5, axis=0).astype(np.int32)
        shared -= shared[0]
        for slot in rng.permutation(20)[:12].tolist():
            own = np.cumsum(rng.random((N_MAX + 1, 2)) < 0.5, axis=0).astype(np.int32)
            opened[slot] = shared if slot % 2 else own - own[0]
            table.open(slot, 40, opened[slot])
        for slot in list(opened)[wave::4]:
            table.close(slot)
            del opened[slot]
        slots = np.array(list(opened), np.int32)
        out = np.zeros((len(slots), 2), np.int32)
        table.lengths(slots, np.full(len(slots), 43), out)
        np.testing.assert_array_equal(out, [43 - BLOCK * (10 - kept[10]) for kept in opened.values()])
    assert len(table._kept.stacked) <= 32  # 120 tables came by, at most 20 at a time


@settings(max_examples=60, deadline=None)
@given(requests(3), st.data())
def test_member_addresses(request_: Request, data: st.DataObject) -> None:
    """Slots for appending, slots of the newest token and block tables all name the same places."""
    table, t, slot = make_table(3), request_.prompt_len + 3, 2
    table.open(slot, request_.prompt_len, request_.kept)
    table.ingest(slot, flat_lists([request_])[0], int(request_.pages(t).sum()))
    members = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, GROUP_SIZE - 1)), min_size=1, max_size=4))
    group, column = np.array(members, np.int32).T.copy()
    lengths = request_.lengths(t).astype(np.int32)

    # Where token i of each member must be, by the layout [num_pages, G, block_size].
    places = [
        [(int(table.pages[slot, g, i // BLOCK]) * GROUP_SIZE + c) * BLOCK + i % BLOCK for i in range(int(lengths[g]))]
        for g, c in members
    ]
    starts = np.array([data.draw(st.integers(0, len(p))) for p in places], np.int64)
    counts = np.array([data.draw(st.integers(0, len(p) - s)) for p, s in zip(places, starts, strict=True)], np.int64)
    out = np.zeros(counts.sum(), np.int64)
    table.member_slots(slot, group, column, starts, counts, out)
    assert out.tolist() == [x for p, s, n in zip(places, starts, counts, strict=True) for x in p[s : s + n]]

    # Twice the same request, then a padded row of length 0.
    slots = np.array([slot, slot, 0], np.int32)
    newest = np.zeros(3 * len(members), np.int64)
    table.decode_slots(slots, group, column, np.stack([lengths, lengths, np.zeros_like(lengths)]), newest)
    last = [p[-1] for p in places]
    assert newest.tolist() == [*last, *last, *([-1] * len(members))]

    pages = request_.pages(t)[group].astype(np.int32)
    blocks = np.full((2 * len(members), N_MAX + 4), -1, np.int32)
    table.member_blocks(slots[:2], group, column, np.tile(pages, 2), blocks)
    for row, p, count in zip(blocks.tolist(), places * 2, np.tile(pages, 2).tolist(), strict=True):
        assert row[:count] == [x // BLOCK for x in p[::BLOCK]]
        assert set(row[count:]) <= {-1}


def test_addresses_beyond_the_table_are_refused() -> None:
    table = make_table(1)
    one, far = np.zeros(1, np.int32), (N_MAX + 4) * BLOCK
    with pytest.raises(ValueError, match="one entry per"):
        table.member_slots(0, one, one, np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="room"):
        table.member_slots(0, one, one, np.array([far]), np.ones(1, np.int64), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="room"):
        table.decode_slots(one, one, one, np.array([[far + 1]], np.int32), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="room"):
        table.member_blocks(one, one, one, np.array([3], np.int32), np.zeros((1, 2), np.int32))
