# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.budget.strategies import make_profile

from vllm_tangram.budget import RetentionPlan, RetentionProfile
from vllm_tangram.config import TangramConfig
from vllm_tangram.errors import TangramError

SHAPE = (6, 4)


def make_plan(profile: RetentionProfile | None = None, max_tokens: int = 8192, **options: object) -> RetentionPlan:
    ranks = {name: options.pop(name) for name in ("tensor_parallel_size", "stage_layers") if name in options}
    config = TangramConfig.parse({"chunk_size": 1024, "page_group_size": 3, **options})
    return RetentionPlan(
        config, profile, num_layers=SHAPE[0], num_kv_heads=SHAPE[1], block_size=32, max_tokens=max_tokens, **ranks
    )


@pytest.fixture
def profile() -> RetentionProfile:
    return make_profile(shape=SHAPE, seed=3)


def test_long_prompts_hold_what_is_promised(profile: RetentionProfile) -> None:
    plan = make_plan(profile)
    assert plan.num_groups == 8
    assert 0.24 < plan.held_fraction(8192) <= 0.25
    assert 0.48 < plan.held_fraction(8192, retention=0.5) <= 0.5
    assert plan.held_fraction(8192, retention=1.0) == 1
    assert plan.held_fraction(8192) < make_plan(profile, margin="on_top").held_fraction(8192)
    assert plan.held_fraction(1) == 1


def test_schedules_are_shared_within_a_thousandth(profile: RetentionProfile) -> None:
    plan = make_plan(profile)
    assert plan.schedule(0.3) is plan.schedule(0.3009)
    assert plan.schedule(0.3) is not plan.schedule(0.301)
    assert plan.schedule(0.3).kept.shape == (8192 // 32 + 1, 8)


@given(st.integers(1, 1000))
def test_thousandths_are_left_alone(thousandths: int) -> None:
    plan = make_plan(retention=1, max_tokens=32)
    assert plan.quantise(thousandths / 1000) == thousandths / 1000


@given(st.floats(0, 1))
def test_quantise_rounds_down(retention: float) -> None:
    quantised = make_plan(retention=1, max_tokens=32).quantise(retention)
    assert 0.001 <= quantised <= max(0.001, retention + 1e-8)
    assert quantised > retention - 0.001001
    assert len(f"{quantised!r}") <= 5


def test_profiles_are_needed_below_full_kv(profile: RetentionProfile) -> None:
    with pytest.raises(TangramError, match=r"give --profile, make one with `tangram profile`"):
        make_plan(None)
    full = make_plan(None, retention=1)
    assert full.held_fraction(4096) == 1
    with pytest.raises(TangramError, match=r"retention 0\.5 needs a retention profile"):
        full.schedule(0.5)
    assert 0.48 < make_plan(profile, retention=1).held_fraction(8192, retention=0.5) <= 0.5


def test_uniform_needs_no_profile(profile: RetentionProfile) -> None:
    plans = [make_plan(given, budgets="uniform") for given in (None, profile)]
    assert plans[0].digest() == plans[1].digest()
    kept = plans[0].schedule(0.25).kept
    assert (kept == kept[:, :1]).all()
    assert plans[0].groups.group.ravel().tolist() == [member // 3 for member in range(24)]


def test_saturated_budgets_still_group_by_appetite(profile: RetentionProfile) -> None:
    plan = make_plan(profile, retention=1)
    appetite = profile.mean[1].ravel()
    assert plan.groups.over_allocation(appetite) < 1.2
    neighbours = make_plan(profile, retention=1, grouping="neighbours")
    assert neighbours.groups.over_allocation(appetite) > 1.3


def test_profiles_of_another_shape_are_refused() -> None:
    with pytest.raises(TangramError, match="has 4 layers of 6 KV heads, the served model has 6 of 4"):
        make_plan(make_profile(shape=(4, 6)))


def test_ragged_chunks_are_refused(profile: RetentionProfile) -> None:
    with pytest.raises(TangramError, match=r"--chunk-size \(1000\)"):
        make_plan(profile, chunk_size=1000)


def test_digest_tells_plans_apart(profile: RetentionProfile) -> None:
    digests = {
        make_plan(profile).digest(),
        make_plan(profile, retention=0.3).digest(),
        make_plan(profile, page_group_size=4).digest(),
        make_plan(profile, grouping="neighbours").digest(),
        make_plan(profile, alpha=0).digest(),
        make_plan(make_profile(shape=SHAPE, seed=4)).digest(),
    }
    assert len(digests) == 6
    assert make_plan(profile).digest() in digests
    # The longest prompt is vLLM's to change until the pool is sized.
    assert make_plan(profile, max_tokens=2048).digest() == make_plan(profile).digest()
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests)


def test_full_pages_are_rounded_up() -> None:
    plan = make_plan(retention=1, page_group_size=5)
    assert plan.full_pages(64) == 10  # 24 members x 2 blocks = 48 of 5
    assert plan.full_pages(65) == 15


def test_the_server_groups_serve_other_retentions(profile: RetentionProfile) -> None:
    plan = make_plan(profile)
    less, more = plan.schedule(0.1), plan.schedule(0.6)
    assert (less.kept <= more.kept).all()
    assert np.any(less.kept < more.kept)


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 8}, {"stage_layers": (4, 2)}])
def test_ranks_together_hold_what_is_promised(profile: RetentionProfile, ranks: dict[str, object]) -> None:
    plan, alone = make_plan(profile, **ranks), make_plan(profile)
    assert 0.23 < plan.held_fraction(8192) <= 0.25
    assert 0.46 < plan.held_fraction(8192, retention=0.5) <= 0.5
    members, blocks = plan.groups.group.size, 8192 // 32
    assert members == (48 if ranks.get("tensor_parallel_size") == 8 else 24)
    assert plan.full_pages(8192) == -(-members * blocks // (3 * plan.groups.num_ranks))
    assert plan.digest() == make_plan(profile, **ranks).digest() != alone.digest()


def test_copies_of_a_head_have_its_budget(profile: RetentionProfile) -> None:
    """Two ranks for every head: each is one head of every layer, so all ranks of a head are grouped alike."""
    plan = make_plan(profile, tensor_parallel_size=8)
    for head in range(4):
        first, second = (plan.groups.of_rank(rank) for rank in (2 * head, 2 * head + 1))
        assert first.group.shape == (6, 1)
        np.testing.assert_array_equal(first.group, second.group)
        np.testing.assert_array_equal(first.column, second.column)


def test_heads_that_cannot_be_shared_evenly_are_refused(profile: RetentionProfile) -> None:
    with pytest.raises(TangramError, match="--tensor-parallel-size 3 does not fit the model's 4 KV heads"):
        make_plan(profile, tensor_parallel_size=3)


def test_neither_torch_nor_vllm_is_imported() -> None:
    code = "import sys, vllm_tangram.budget; assert not {'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
