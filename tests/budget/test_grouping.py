# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.budget.strategies import shardings

from vllm_tangram.budget import Sharding, group_members
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


@given(shardings(), st.data(), st.sampled_from(MODES))
def test_ranks_group_their_own_members(sharding: Sharding, data: st.DataObject, mode: str) -> None:
    """Each rank is grouped as if it were alone; the ranks share numbers of groups, and the largest budget of each."""
    shape, ranks = (sharding.num_layers, sharding.width), sharding.ranks
    size = data.draw(st.integers(1, int(np.bincount(ranks.ravel()).min())))
    budgets = np.random.default_rng(data.draw(st.integers(0, 99))).random(shape)
    groups = group_members(budgets.ravel(), shape, size, mode, ranks)  # type: ignore[arg-type]
    assert groups.num_ranks == sharding.num_ranks
    assert groups.page_members == size * sharding.num_ranks

    places = {
        (int(ranks[at]), int(groups.group[at]), int(groups.column[at])): float(budgets[at]) for at in np.ndindex(shape)
    }
    assert len(places) == budgets.size
    largest = [max(value for (_, g, _), value in places.items() if g == group) for group in range(groups.num_groups)]
    np.testing.assert_array_equal(groups.group_max(budgets.ravel()), largest)
    assert groups.over_allocation(budgets.ravel()) == pytest.approx(groups.page_members * sum(largest) / budgets.sum())

    alone = []
    for rank in range(sharding.num_ranks):
        own = ranks == rank
        own_shape = int(own.any(1).sum()), int(own.any(0).sum())
        alone.append(group_members(budgets[own], own_shape, size, mode))  # type: ignore[arg-type]
        for found in (groups.of_rank(rank), alone[-1]):
            np.testing.assert_array_equal(found.group, groups.group[own].reshape(own_shape))
            np.testing.assert_array_equal(found.column, groups.column[own].reshape(own_shape))
    assert groups.num_groups == max(each.num_groups for each in alone)
    for group in range(groups.num_groups):
        assert sorted(groups.members(group), key=lambda at: (ranks[at], groups.column[at])) == groups.members(group)


def test_a_rank_with_few_members_limits_the_groups() -> None:
    with pytest.raises(TangramError, match="from 1 to 2 for the 2 KV heads of a rank, got 3"):
        group_members(np.ones(6), (3, 2), 3, "global", Sharding(2, 1, (2, 1)).ranks)


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
