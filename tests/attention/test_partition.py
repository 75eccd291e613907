# SPDX-License-Identifier: Apache-2.0
"""Shares of thread blocks against the definition, and the driver's answers."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from vllm_tangram.attention.decode import DecodeBatch
from vllm_tangram.attention.partition import AHEAD, PIECES, SplitPlan, resident_blocks
from vllm_tangram.budget.schedule import EvictionSchedule
from vllm_tangram.errors import TangramError
from vllm_tangram.pages.device import DevicePages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = TILE = 16


@dataclass(frozen=True)
class Planned:
    """A plan of two layers and what it is made for."""

    segments: np.ndarray  # [L, R * H, 13]
    shares: np.ndarray  # [L, C, 17]
    old: np.ndarray  # [L, R * H] tokens held without the new one; -1 without a request
    pages: list[list[list[int]]]  # [L][R * H] pages of what is held
    places: list[list[list[int]]]  # [L][R * H] where they stand in the flat list if born with the prompt, else 0
    switch: int

    @property
    def tiles(self) -> np.ndarray:
        """[L, R * H], at least 1."""
        return np.maximum(-(-self.old // TILE), 1)


def planned(
    lengths: list[tuple[int, int] | None],
    num_heads: int,
    num_blocks: int,
    seed: int,
    min_tiles: int = 1,
    switch: int = 0,
    *,
    even: bool = False,
) -> Planned:
    """Plan rows of (prompt, tokens) after another batch, which the plan must not show."""
    rng = np.random.default_rng(seed)
    num_groups, num_slots = 4, len(lengths) + 3
    blocks = -(-max((length[1] for length in lengths if length), default=1) // BLOCK)
    rises = rng.random((blocks, num_groups)) < rng.uniform(0.1, 1, num_groups)
    kept = np.concatenate([np.zeros((1, num_groups), int), rises.cumsum(0)]).astype(np.int32)
    schedule = EvictionSchedule(kept, BLOCK)
    pages = DevicePages(num_slots, num_groups, blocks, BLOCK, 1, DEVICE)
    flat = rng.permutation(num_slots * blocks * num_groups).reshape(num_slots, -1) + 1
    slots = rng.permutation(num_slots)[: len(lengths)]
    members = np.stack([rng.integers(0, num_groups, (2, num_heads)), rng.integers(0, 9, (2, num_heads))], axis=-1)
    old = np.full((2, len(lengths), num_heads), -1)
    held: list[list[list[int]]] = [[], []]
    places: list[list[list[int]]] = [[], []]
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
        of_group: list[list[int]] = [[] for _ in range(num_groups)]
        born_at: list[list[int]] = [[] for _ in range(num_groups)]
        if length is not None:
            prompt, tokens = length
            pages.open(slot, prompt, schedule)
            old[:, row] = schedule.lengths(tokens, prompt)[members[..., 0]] - 1
            born = enumerate(flat[slot].tolist())
            for n, g in itertools.product(range(-(-tokens // BLOCK)), range(num_groups)):
                if n >= prompt // BLOCK or rises[n, g]:
                    place, page = next(born)
                    of_group[g].append(page)
                    born_at[g].append(place if n < prompt // BLOCK else 0)
        for layer in range(2):
            held[layer] += [of_group[g] for g in members[layer, :, 0]]
            places[layer] += [born_at[g] for g in members[layer, :, 0]]

    def put(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    requests = [slot if length else -1 for slot, length in zip(slots.tolist(), lengths, strict=True)]
    plan = SplitPlan(
        put(members.tolist()), num_slots, num_blocks, TILE, min_tiles=min_tiles, switch_tiles=switch, even=even
    )
    on_device = put(flat.tolist())
    plan.make(DecodeBatch(put([-1] * num_slots), put([0] * num_slots), on_device, pages))
    plan.make(DecodeBatch(put(requests), put([length[1] if length else 0 for length in lengths]), on_device, pages))
    count = len(lengths) * num_heads
    segments, shares = plan.segments[:, :count].cpu().numpy(), plan.shares[:, : plan.num_blocks].cpu().numpy()
    np.testing.assert_array_equal(segments[..., 2], np.broadcast_to(np.repeat(requests, num_heads), (2, count)))
    np.testing.assert_array_equal(segments[..., 6:8], np.tile(members, (1, len(lengths), 1)))
    return Planned(segments, shares, old.reshape(2, -1), held, places, switch)


request_lengths = st.none() | st.integers(1, 300).flatmap(lambda p: st.tuples(st.just(p), st.integers(p, p + 40)))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(request_lengths, min_size=1, max_size=5),
    num_heads=st.integers(1, 4),
    num_blocks=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    min_tiles=st.integers(1, 3),
    switch=st.integers(0, 3),
    even=st.booleans(),
)
def test_every_tile_is_in_one_share(
    lengths: list[tuple[int, int] | None],
    num_heads: int,
    num_blocks: int,
    seed: int,
    min_tiles: int,
    switch: int,
    even: bool,
) -> None:
    plan = planned(lengths, num_heads, num_blocks, seed, min_tiles, switch, even=even)
    np.testing.assert_array_equal(plan.segments[..., 1], np.maximum(plan.old, 0))
    for segments, shares, tiles, held, places in zip(
        plan.segments, plan.shares, plan.tiles, plan.pages, plan.places, strict=True
    ):
        blocks = [-(-segment[1] // BLOCK) for segment in segments]  # that hold old tokens

        def ahead(segment: int, tile: int) -> list[int]:
            """The page of a tile, and where that of the next was born; a tile is a block here."""
            last = blocks[segment]  # noqa: B023 (called in this round only)
            page, born = held[segment][tile:last][:1], places[segment][tile + 1 : last][:1]  # noqa: B023
            return [*page, 0][:1] + [*born, 0][:1]

        for segment, (*_, new_page, first_page, second_born) in enumerate(segments.tolist()):
            assert [first_page, second_born] == ahead(segment, 0)
            pages = held[segment]
            assert new_page == (pages[segments[segment, 1] // BLOCK] if pages else 0)
        ends = (tiles + switch).cumsum()
        begins = ends - tiles
        np.testing.assert_array_equal(segments[:, 0], begins)
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in tiles]  # of each segment: block, first tile, end
        for block, (first, end, low, high, *record) in enumerate(shares.tolist()):
            for segment in range(first, end):
                part = max(low - begins[segment], 0), min(high - begins[segment], tiles[segment])
                assert part[0] < part[1]
                pieces[segment].append((block, *part))
            if first < end:
                assert record == segments[first, :AHEAD].tolist() + ahead(first, max(low - begins[first], 0))
        for (first_block, count), own, length in zip(
            segments[:, PIECES - 1 : PIECES + 1].tolist(), pieces, tiles, strict=True
        ):
            assert [block for block, _, _ in own] == list(range(first_block, first_block + count))
            assert [low for _, low, _ in own] == [0, *(high for _, _, high in own[:-1])]
            assert own[-1][2] == length
        if not even:  # all shares are equal, so none could be shorter
            assert set((shares[:, 3] - shares[:, 2]).tolist()) == {max(-(-int(ends[-1]) // num_blocks), min_tiles)}


def test_even_cuts_every_head_alike() -> None:
    plan = planned([(100, 120), (300, 310)], 2, 9, seed=0, even=True)
    assert (plan.segments[..., PIECES] <= 2).all()  # 9 blocks for 4 heads
    assert plan.segments[..., PIECES].max() == 2
    many = planned([(100, 120), (300, 310)], 2, 3, seed=0, even=True)
    assert (many.segments[..., PIECES] == 1).all()
    assert many.shares.shape[1] == 4  # a block for each head, however few run at once


def test_more_segments_than_the_kernel_takes_in_at_once() -> None:
    plan = planned([(33, 40), (20, 20), None, (1, 1)] * 90, 4, 396, seed=3)
    for segments, shares, tiles in zip(plan.segments, plan.shares, plan.tiles, strict=True):
        np.testing.assert_array_equal(segments[:, 0], tiles.cumsum() - tiles)
        length, total = int(shares[0, 3]), int(tiles.sum())
        assert length == -(-total // 396)
        busy = shares[:, 0] < shares[:, 1]
        assert busy.tolist() == [block * length < total for block in range(396)]
        np.testing.assert_array_equal(
            shares[busy, 0], np.searchsorted(tiles.cumsum(), np.arange(busy.sum()) * length, side="right")
        )


def test_refuses_more_rows_than_there_is_room_for() -> None:
    plan = SplitPlan(torch.zeros(1, 2, 2, dtype=torch.int32, device=DEVICE), 1, 4, TILE)
    pages = DevicePages(2, 1, 1, BLOCK, 1, DEVICE)
    rows = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="2 rows, but room for 1"):
        plan.make(DecodeBatch(rows, rows, rows[None], pages))


class _Driver:
    """Stands in for libcuda: 3 blocks per multiprocessor for 4 warps and 65 kB, an error for anything else."""

    @staticmethod
    def cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared):  # type: ignore[no-untyped-def]
        if (function.value, threads.value, shared.value) != (7, 128, 65536):
            return 1
        ctypes.cast(blocks, ctypes.POINTER(ctypes.c_int)).contents.value = 3
        return 0


def test_resident_blocks_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Driver if name == "libcuda.so.1" else None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    kernel = SimpleNamespace(
        _init_handles=lambda: None, function=7, metadata=SimpleNamespace(num_warps=4, shared=65536)
    )
    assert resident_blocks(kernel, torch.device("cuda")) == 396
    kernel.metadata.shared = 300000
    with pytest.raises(TangramError, match="4 warps and 300000 bytes"):
        resident_blocks(kernel, torch.device("cuda"))


def test_resident_blocks_needs_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(TangramError, match="driver library cannot be loaded"):
        resident_blocks(SimpleNamespace(), torch.device("cuda"))
