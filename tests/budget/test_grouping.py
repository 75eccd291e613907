# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tangram.budget import group_members
from vllm_tangram.errors import TangramError

MODES = ["global", "layer", "neighbours"]


@given(st.integers(1, 6), st.integers(1, 5), st.data(), st.sampled_from(MODES))
def test_every_member_has_a_place_of_its_own(layers: int, heads: int, data: st.DataObject, mode: str) -> None:
    size = data.draw(st.integers(1, layers * heads))
    budgets = np.array(data.draw(st.lists(st.sampled_from([0.1, 0.2, 0.5]), min_size=layers * heads, max_size=30)))
    budgets = budgets[: layers * heads]
    groups = group_members(budgets, (layers, heads), size, mode)  # type: ignore[arg-type]
    per_layer = -(-heads // size)
    assert groups.num_groups == (layers * per_layer if mode == "layer" else -(-layers * heads // size))
    assert groups.group.dtype == groups.column.dtype == np.int32
    places = (groups.group * size + groups.column).ravel()
    assert len(set(places.tolist())) == layers * heads
    assert places.min() >= 0
    assert places.max() < groups.num_groups * size

    by_group = [groups.members(g) for g in range(groups.num_groups)]
    assert sorted(member for members in by_group for member in members) == list(np.ndindex(layers, heads))
    largest = [max(budgets[layer * heads + head] for layer, head in members) for members in by_group]
    np.testing.assert_array_equal(groups.group_max(budgets), largest)
    assert groups.over_allocation(budgets) == pytest.approx(size * sum(largest) / budgets.sum())
    if mode == "global":
        # Sorted: no member of a group is richer than one of the group before.
        assert largest == sorted(largest, reverse=True)
        assert all(
            min(budgets[layer * heads + head] for layer, head in before) >= following
            for before, following in zip(by_group, largest[1:], strict=False)
        )
    if mode == "layer":
        assert all(len({layer for layer, _ in members}) == 1 for members in by_group)
    if mode == "neighbours":
        assert [member for members in by_group for member in members] == list(np.ndindex(layers, heads))


def test_equal_budgets_stay_in_order() -> None:
    groups = group_members(np.ones(6), (3, 2), 4, "global")
    assert groups.group.tolist() == [[0, 0], [0, 0], [1, 1]]
    assert groups.column.tolist() == [[0, 1], [2, 3], [0, 1]]


def test_group_max_of_many_levels() -> None:
    groups = group_members(np.array([1.0, 3.0, 2.0]), (1, 3), 2, "global")
    np.testing.assert_array_equal(groups.group_max(np.array([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]])), [[3, 1], [1, 5]])


@pytest.mark.parametrize("size", [0, -1, 7])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(TangramError, match="--page-group-size must be from 1 to 6"):
        group_members(np.ones(6), (3, 2), size, "global")


def test_no_budget_wastes_nothing() -> None:
    assert group_members(np.zeros(4), (2, 2), 2, "global").over_allocation(np.zeros(4)) == 1


@pytest.mark.parametrize(("scorer", "neighbours"), [("snapkv", 1.5), ("fastkvzip", 2.0)])
def test_over_allocation_of_a_real_model(shared_data: Path, scorer: str, neighbours: float) -> None:
    file = shared_data / "profiles" / scorer / "qwen3-4b-instruct-2507" / "profile.npz"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    ratios = np.load(file)["raw_ratio"][0].mean(axis=0)  # [L, H]
    # Scale the appetites until all members together ask for a quarter of full KV.
    scales = np.geomspace(0.01, 100, 4000)
    asked = np.array([np.minimum(1, scale * ratios).mean() for scale in scales])
    budgets = np.minimum(1, scales[np.searchsorted(asked, 0.25)] * ratios).ravel()
    assert budgets.mean() == pytest.approx(0.25, abs=0.005)

    waste = {mode: group_members(budgets, ratios.shape, 4, mode).over_allocation(budgets) for mode in MODES}
    assert waste["global"] <= 1.05
    assert waste["global"] < waste["layer"] < waste["neighbours"]
    assert waste["neighbours"] >= neighbours
