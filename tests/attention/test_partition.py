# SPDX-License-Identifier: Apache-2.0
"""The split map against exhaustive search, and the driver's answers."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_tangram.attention.partition import plan_work, resident_blocks, split_map, work_list
from vllm_tangram.errors import TangramError

shares_of_a_layer = st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.3, 0.7, 1.0]), min_size=1, max_size=3)


@given(shares=shares_of_a_layer, num_rows=st.integers(1, 5), resident=st.integers(1, 40), waves=st.floats(0.3, 3))
def test_longest_piece_is_as_short_as_can_be(shares: list[float], num_rows: int, resident: int, waves: float) -> None:
    pieces = split_map([shares], num_rows, resident, waves)[0]
    room = max(len(shares), int(waves * resident / num_rows))
    assert pieces.min() >= 1
    assert pieces.sum() <= room
    assert all(pieces[i] == pieces[j] for i, j in np.argwhere(np.equal.outer(shares, shares)))

    # No assignment within the room is better, unless it tells apart equal shares.
    most = min(room - len(shares) + 1, 12)
    best = min(
        max(share / n for share, n in zip(shares, choice, strict=True))
        for choice in itertools.product(range(1, most + 1), repeat=len(shares))
        if sum(choice) <= room and len(set(zip(shares, choice, strict=True))) == len(set(shares))
    )
    assert (np.array(shares) / pieces).max() <= best * (1 + 1e-12)


def test_layers_are_planned_apart() -> None:
    shares = np.random.default_rng().random((5, 8))
    together = split_map(shares, 4, 396, 1.5)
    assert together.dtype == np.int32
    np.testing.assert_array_equal(together, np.concatenate([split_map(row[None], 4, 396, 1.5) for row in shares]))
    assert (
        (together.sum(1) * 4 > 396 * 1.5 - 4 * 8) & (together.sum(1) * 4 <= 396 * 1.5)
    ).all()  # and the room is used


@given(
    pieces=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    num_rows=st.sampled_from([1, 2, 7]),
    round_up=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_work_list_holds_every_slot_once_longest_first(
    pieces: list[int], num_rows: int, round_up: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num_heads = len(pieces)
    shares, group, column = rng.random(num_heads), rng.integers(0, 99, num_heads), rng.integers(0, 9, num_heads)
    work = work_list(pieces, shares, group, column, num_rows=num_rows, round_up=round_up)
    slots = [n if num_rows == 1 else n + (n + round_up) // 2 for n in pieces]
    assert work.dtype == np.int32
    expected = {(h, p) for h in range(num_heads) for p in range(slots[h])}
    assert {(h, p) for h, p in work[:, :2].tolist()} == expected
    assert len(work) == len(expected)
    spare = work[:, 1] >= work[:, 2]
    assert (np.diff(spare.astype(int)) >= 0).all()  # what only longer requests use comes last
    for part in (work[~spare], work[spare]):
        assert (np.diff((shares / pieces)[part[:, 0]]) <= 0).all()
    for head, _, count, before, of_group, of_column, room, up in work.tolist():
        assert (count, before, room, up) == (pieces[head], sum(slots[:head]), slots[head], round_up)
        assert (of_group, of_column) == (group[head], column[head])


def test_planned_work_is_the_split_map_in_one_wave_or_two() -> None:
    shares = np.random.default_rng().random((2, 8))
    group, column = np.arange(16).reshape(2, 8), np.zeros((2, 8), int)
    for num_rows, waves in ((1, 1.0), (8, 1.0), (9, 2.0), (200, 2.0)):  # 396 blocks are 6 pieces for 66 heads
        for index, work in enumerate(plan_work(shares, group, column, num_rows, 396)):
            expected = split_map(shares, num_rows, 396, waves)[index]
            assert {(h, n) for h, n in work[:, [0, 2]].tolist()} == set(enumerate(expected.tolist()))
            assert (work[:, 4] == group[index][work[:, 0]]).all()
            assert (work[:, 7] == (waves > 1)).all()


@pytest.mark.parametrize(
    ("shares", "num_rows", "waves"),
    [([0.5], 1, 1.0), ([[-0.1]], 1, 1.0), ([[np.nan]], 1, 1.0), ([[1.0]], 0, 1.0), ([[1.0]], 1, 0.0)],
)
def test_refuses_nonsense(shares: list[float], num_rows: int, waves: float) -> None:
    with pytest.raises(ValueError):
        split_map(shares, num_rows, 132, waves)


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
