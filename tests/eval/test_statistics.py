# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from random import Random

import pytest
from scipy.stats import binomtest

from vllm_tangram.eval.run import Answer
from vllm_tangram.eval.settings import Allocation, Setting
from vllm_tangram.eval.statistics import bootstrap, cells, compare, wilson


def answers(budgets: Allocation, hits: list[int], logprobs: list[float], held: float = 0.5) -> list[Answer]:
    setting = Setting("snapkv", budgets, 0.5)
    rows = enumerate(zip(hits, logprobs, strict=True))
    return [Answer(10, case, "q", setting, held, held, 2, hit, logprob) for case, (hit, logprob) in rows]


@pytest.mark.parametrize(("correct", "count"), [(0, 16), (1, 16), (25, 40), (40, 40), (137, 200)])
def test_wilson_is_scipys(correct: int, count: int) -> None:
    expected = binomtest(correct, count).proportion_ci(method="wilson")
    assert wilson(correct, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_bootstrap_covers_the_mean() -> None:
    """Of means of clustered values, about 95 % lie in their intervals; ignoring clusters, far fewer would."""
    random = Random(0)
    covered = alone = 0
    for _ in range(200):
        effects = [random.gauss(0, 1) for _ in range(40)]
        values = [effect + random.gauss(0, 0.3) for effect in effects for _ in range(4)]
        clusters = [cluster for cluster in range(40) for _ in range(4)]
        low, high = bootstrap(values, clusters)
        covered += low < 0 < high
        low, high = bootstrap(values, list(range(160)))
        alone += low < 0 < high
    assert 180 <= covered <= 199
    assert alone < 160


def test_bootstrap_of_one_context_has_no_interval() -> None:
    assert all(math.isnan(end) for end in bootstrap([1.0, 2.0], [0, 0]))
    assert bootstrap([1.0, 1.0], [0, 1]) == (1.0, 1.0)


def test_cells() -> None:
    (cell,) = cells(answers("profile", [2, 1, 0, 2], [-1, -2, -3, -4])).values()
    assert (cell.count, cell.correct, cell.logprob, cell.hits) == (4, 2, -2.5, 5 / 8)
    assert cell.logprob_interval[0] < -2.5 < cell.logprob_interval[1]


def test_paired_comparison() -> None:
    profiled = answers("profile", [2, 2, 2, 2, 1], [-1, -1, -1, -1, -1])
    uniform = answers("uniform", [1, 0, 1, 2, 2], [-2, -3, -2, -3, -1])
    ((other, result),) = compare(profiled + uniform[::-1], "uniform").values()
    assert other.budgets == "uniform"
    assert (result.gained, result.lost) == (3, 1)
    assert result.p_value == pytest.approx(2 * (1 + 4) / 16)
    assert result.logprob == pytest.approx(6 / 5)
    assert result.logprob_interval == pytest.approx((0.5, 1.8), abs=0.11)  # mean 1.2, standard error 0.33
    assert compare(profiled, "uniform") == {}
    assert compare(uniform, "uniform") == {}
