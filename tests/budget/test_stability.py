# SPDX-License-Identifier: Apache-2.0
"""Rank correlations and clipping, against scipy's and plain loops, and on measured profiles of real models."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tests.budget.strategies import make_profile

from vllm_tangram.bench.published import profile_and_shape
from vllm_tangram.budget import RetentionPlan, RetentionProfile, clipping, rank_stability
from vllm_tangram.budget.stability import held_fractions, rank_correlation
from vllm_tangram.config import TangramConfig

CONFIG = TangramConfig(page_group_size=1)


def of_samples(rows: list[list[float]], domains: tuple[str, ...] = ()) -> RetentionProfile:
    """A profile of two layers of two heads at retention 0.3."""
    kept = np.array(rows).reshape(len(rows), 1, 2, 2)
    return replace(make_profile(kept=kept, retentions=np.array([0.3])), domains=domains)


@pytest.mark.parametrize("distinct", [3, 1000])
def test_rank_correlation_is_spearmans(distinct: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(distinct)
    first, second = rng.integers(0, distinct, (2, 90)).astype(float)
    second = first + second
    assert rank_correlation(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)


def test_pairs_of_samples() -> None:
    profile = of_samples([[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.5], [0.4, 0.3, 0.2, 0.1]])
    assert rank_stability(profile, 0.3).samples == pytest.approx((1 - 1 - 1) / 3)
    # Ties share a rank: ranks (0.5, 0.5, 2, 3) against (0, 1, 2, 3).
    profile = of_samples([[0.1, 0.1, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]])
    assert rank_stability(profile, 0.3).samples == pytest.approx(np.corrcoef([0.5, 0.5, 2, 3], [0, 1, 2, 3])[0, 1])


def test_nothing_to_rank_is_no_reason_to_warn() -> None:
    for profile in (make_profile(samples=1), make_profile(kept=np.full((3, 3, 3, 2), 0.5))):
        found = rank_stability(profile, 0.25)
        assert np.isnan(found.samples)
        assert found.warning() is None


def test_the_least_pair_of_domains_counts() -> None:
    rows = {
        "prose": [[0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.3, 0.4]],
        "code": [[0.1, 0.2, 0.4, 0.3], [0.1, 0.25, 0.35, 0.3]],
        "records": [[0.4, 0.3, 0.2, 0.1]],
    }
    profile = of_samples(
        [row for domain in rows.values() for row in domain],
        tuple(domain for domain, samples in rows.items() for _ in samples),
    )
    means = {domain: np.mean(samples, axis=0) for domain, samples in rows.items()}
    pairs = {pair: rank_correlation(means[pair[0]], means[pair[1]]) for pair in combinations(means, 2)}
    found = rank_stability(profile, 0.3)
    assert found.domains == pytest.approx(min(pairs.values()))
    assert found.least_alike == ("prose", "records")
    assert "between prose and records" in (found.warning() or "")


def test_samples_that_agree_but_for_a_domain() -> None:
    """Nine samples of one kind outvote one of another in the mean over pairs, not in the domains."""
    agree = [[0.1, 0.2, 0.3, 0.4]] * 19
    found = rank_stability(of_samples([*agree, [0.4, 0.3, 0.2, 0.1]], ("a",) * 19 + ("b",)), 0.3)
    assert found.samples >= 0.8
    assert found.domains == pytest.approx(-1)
    assert found.warning() is not None
    assert rank_stability(of_samples(agree, ("a",) * 18 + ("b",)), 0.3).warning() is None


def plan_of(profile: RetentionProfile, config: TangramConfig, tokens: int) -> RetentionPlan:
    shape = {"num_layers": profile.num_layers, "num_kv_heads": profile.num_kv_heads}
    return RetentionPlan(config, profile, **shape, block_size=32, max_tokens=tokens)


def test_what_is_held_is_what_a_prompt_holds() -> None:
    profile, config = make_profile(shape=(5, 3), seed=1), TangramConfig(page_group_size=4)
    plan = plan_of(profile, config, 16384)
    held = held_fractions(profile, config, 32)
    assert held.sum() * 16384 == pytest.approx(
        sum(plan.schedule(0.25).lengths(16384, 16384)[group] for group in plan.groups.group.ravel())
    )
    assert held.mean() <= 0.25 + 1e-9
    # Three chunks, one by one, make up the whole.
    parts = [held_fractions(profile, config, 32, (start, start + 2048)) for start in (0, 2048, 4096)]
    np.testing.assert_allclose(np.mean(parts, axis=0), held_fractions(profile, config, 32, (0, 6144)))


def test_clipping_is_counted_token_by_token() -> None:
    random = Random(0)
    domains = tuple(random.choice(("a", "b")) for _ in range(6))
    profile = replace(make_profile(samples=6, shape=(4, 3), seed=2), domains=domains)
    for found in clipping(profile, CONFIG, 32):
        own = [i for i, domain in enumerate(domains) if domain == found.domain]
        others = profile.subset(np.array([domain != found.domain for domain in domains]))
        for plan_profile, share in ((profile, found.seen), (others, found.unseen)):
            plan = plan_of(plan_profile, CONFIG, 16384)
            lengths = plan.schedule(0.25).lengths(16384, 16384)
            lost = wanted = 0.0
            for i in own:
                for (layer, head), want in np.ndenumerate(profile.kept[i, 1]):
                    wanted += want
                    lost += max(0.0, want - lengths[plan.groups.group[layer, head]] / 16384)
            assert share == pytest.approx(lost / wanted)
        assert found.samples == len(own)


def test_without_domains_all_samples_are_one() -> None:
    (found,) = clipping(make_profile(), CONFIG, 32)
    assert (found.domain, found.samples) == ("all samples", 3)
    assert np.isnan(found.unseen)


@pytest.mark.parametrize("scorer", ["ea", "fastkvzip", "keydiff", "snapkv"])
@pytest.mark.parametrize("model", ["qwen3-4b-instruct-2507", "llama-3.1-8b-instruct"])
def test_real_profiles_of_two_tasks(shared_data: Path, scorer: str, model: str) -> None:
    """With the margin on top, budgets of a mixture clip next to nothing; those of one task clip another."""
    profile, _ = profile_and_shape(shared_data / "profiles" / scorer / model / "profile.npz", None)
    assert profile is not None
    assert profile.domains == ("scbench_kv_short",) * 16 + ("scbench_many_shot",) * 12
    found = rank_stability(profile, 0.25)
    assert 0.75 < found.samples < 1
    assert 0.75 < found.domains < 1
    for row in clipping(profile, TangramConfig(margin="on_top"), 32):
        assert row.seen < 0.01
        assert 0.02 < row.unseen < 0.25
