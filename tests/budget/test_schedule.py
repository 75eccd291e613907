# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.budget.strategies import Case, cases, skewed_curve

from vllm_tangram.budget import BudgetCurve, build_schedule, group_members
from vllm_tangram.errors import TangramError


def realistic(group_size: int = 3, retention: float = 0.25, **fields: object) -> Case:
    curve = skewed_curve(90)
    groups = group_members(curve.at(retention), (30, 3), group_size, "global")
    case = Case(curve, groups, retention, block_size=32, chunk=64, sinks=4, window=64, n_max=512)
    return replace(case, **fields)  # type: ignore[arg-type]


@given(cases(), st.sampled_from(["inside", "on_top"]))
def test_counts_rise_by_at_most_one_and_keep_every_window(case: Case, margin: str) -> None:
    kept = replace(case, margin=margin).build().kept
    assert kept.shape == (case.n_max + 1, case.groups.num_groups)
    assert kept.dtype == np.int32
    assert not kept[0].any()
    assert np.isin(np.diff(kept, axis=0), (0, 1)).all()
    for n in range(1, case.n_max + 1):
        start = (n - 1) // case.chunk * case.chunk
        protected = min(n - start, case.later_floor if start else case.first_floor)
        assert (kept[n] - kept[start] >= protected).all()


@given(cases())
@settings(max_examples=300)
def test_promise(case: Case) -> None:
    _check_promise(case)


@pytest.mark.parametrize("seed", range(2))
def test_promise_with_more_chunks_than_levels_are_solved(seed: int) -> None:
    curve = skewed_curve(90, seed)
    groups = group_members(curve.at(0.3), (30, 3), 2, "global")
    _check_promise(Case(curve, groups, 0.3, block_size=32, chunk=60, sinks=1300, window=480, n_max=6000))


def _check_promise(case: Case) -> None:
    schedule = case.build()
    groups = case.groups.num_groups
    for n in range(1, case.n_max + 1):
        held = int(schedule.total[n])
        promised = case.retention * n * case.num_members / case.groups.page_members + 1e-3  # pages on every rank
        floor = groups * case.floor(n)
        if n % case.chunk == 0:
            assert held <= max(promised, floor)
        else:
            window = case.later_floor if n > case.chunk else case.first_floor
            assert held <= max(promised + groups * window, floor)


@given(cases(), st.sampled_from(["inside", "on_top"]), st.floats(0.001, 1))
def test_larger_retention_never_keeps_less_of_any_group(case: Case, margin: str, other: float) -> None:
    low, high = sorted((case.retention, other))
    less = replace(case, margin=margin, retention=low).build()
    more = replace(case, margin=margin, retention=high).build()
    assert (less.kept <= more.kept).all()


@given(cases())
def test_where_the_floor_does_not_fit_only_the_floor_is_kept(case: Case) -> None:
    # At most 0.012 blocks per group and chunk are promised; a window takes one at least.
    case = replace(case, retention=0.001)
    assert (case.build().kept == np.array([case.floor(n) for n in range(case.n_max + 1)])[:, None]).all()


@given(cases())
def test_retention_one_is_full_kv(case: Case) -> None:
    kept = replace(case, retention=1.0).build().kept
    assert (kept == np.arange(case.n_max + 1)[:, None]).all()


@pytest.mark.parametrize("group_size", [1, 3, 4, 7])
@pytest.mark.parametrize("retention", [0.1, 0.25, 0.5, 0.9])
def test_long_prompts_use_what_is_promised(group_size: int, retention: float) -> None:
    case = realistic(group_size, retention)
    promised = retention * case.n_max * 90 / group_size
    assert 0.97 * promised <= case.build().total[-1] <= promised


def test_on_top_follows_the_group_budgets_at_the_retention() -> None:
    case = realistic(margin="on_top")
    budgets = case.groups.group_max(case.curve.at(case.retention))
    rich = budgets * case.chunk > 2 * case.first_floor
    assert 0 < rich.sum() < len(rich)
    np.testing.assert_array_equal(case.build().kept[512, rich], np.floor(budgets[rich] * 512 + 1e-9))


@pytest.mark.parametrize("retention", [0.1, 0.25, 0.5, 0.75])
def test_on_top_at_the_memory_of_inside_is_inside(retention: float) -> None:
    """For one chunk: a margin on top differs by the memory that it holds and by nothing else."""
    case = realistic(retention=retention, chunk=512)
    inside = case.build()
    low, high = 0.0, retention
    for _ in range(40):
        middle = (low + high) / 2
        held = replace(case, margin="on_top", retention=middle).build().total[-1]
        low, high = (middle, high) if held <= inside.total[-1] else (low, middle)
    assert (replace(case, margin="on_top", retention=low).build().kept[-1] == inside.kept[-1]).all()
    assert replace(case, margin="on_top").build().total[-1] > inside.total[-1]


def test_uniform_budgets_keep_the_same_of_every_group() -> None:
    groups = group_members(np.ones(12), (4, 3), 3, "global")
    case = Case(BudgetCurve.uniform(12), groups, 0.3, block_size=16, chunk=10, sinks=0, window=16, n_max=100)
    expected = [max(1, int(0.3 * n + 1e-9)) if n else 0 for n in range(11)]
    kept = case.build().kept
    assert (kept == kept[:, :1]).all()
    assert kept[:11, 0].tolist() == expected
    assert kept[100, 0] == 30


def test_ragged_chunk_and_block_sizes_are_refused() -> None:
    case = realistic()
    with pytest.raises(TangramError, match=r"--chunk-size \(100\).*--block-size \(32\)"):
        build_schedule(
            case.curve,
            case.groups,
            retention=0.25,
            margin="inside",
            block_size=32,
            chunk_size=100,
            sinks=4,
            window=64,
            max_tokens=1000,
        )


@given(cases(), st.integers(0, 4000), st.integers(0, 4000))
def test_pages_hold_exactly_the_lengths(case: Case, t: int, prompt_len: int) -> None:
    schedule = case.build()
    longest = case.n_max * case.block_size + case.block_size // 2
    prompt_len = min(prompt_len, longest)
    lengths = schedule.lengths(t, prompt_len)
    assert (lengths >= 0).all()
    assert (lengths <= t).all()
    assert schedule.num_pages(t, prompt_len) == (-(-lengths // case.block_size)).sum()
    if t:
        # One shared offset inside the last page: all groups cross page boundaries in the same step.
        assert len(set(lengths % case.block_size)) == 1


@given(cases(), st.integers(0, 4000), st.integers(0, 400))
def test_max_tokens_within(case: Case, prompt_len: int, pages: int) -> None:
    schedule = case.build()
    prompt_len = min(prompt_len, case.n_max * case.block_size)
    answer = schedule.max_tokens_within(prompt_len, pages)
    if schedule.num_pages(prompt_len, prompt_len) > pages:
        assert answer == -1
        return
    assert answer >= prompt_len
    ends = range(0, prompt_len, case.chunk * case.block_size)
    states = [*ends, prompt_len, *range(prompt_len, answer + 1, 7), answer]
    assert all(schedule.num_pages(t, prompt_len) <= pages for t in states)
    assert schedule.num_pages(answer + 1, prompt_len) > pages


def test_building_is_fast() -> None:
    curve = skewed_curve(36 * 32)
    groups = group_members(curve.at(0.25), (36, 32), 4, "global")
    case = Case(curve, groups, 0.25, block_size=16, chunk=128, sinks=4, window=64, n_max=4096)
    started = time.process_time()
    assert case.build().kept.shape == (4097, 288)
    assert time.process_time() - started < 1.0  # about 0.05 s where nothing else runs
