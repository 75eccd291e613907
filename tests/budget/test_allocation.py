# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.budget.strategies import make_profile

from vllm_tangram.budget import BudgetCurve, RetentionProfile


@given(st.floats(0, 5), st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1))
def test_profile_budgets(alpha: float, seed: int, x: float, y: float) -> None:
    profile = make_profile(seed=seed)
    curve = BudgetCurve.from_profile(profile, alpha)
    assert not curve.at(0.0).any()
    assert (curve.at(1.0) == 1).all()
    low, high = sorted((x, y))
    assert (curve.at(low) <= curve.at(high) + 1e-12).all()
    expected = np.minimum(1, profile.mean[0] + alpha * profile.std[0]).ravel()
    np.testing.assert_allclose(curve.at(0.1), expected)
    reference = [np.interp(x, curve.levels, curve.budgets[:, member]) for member in range(6)]
    np.testing.assert_allclose(curve.at(x), reference)


def test_budgets_never_fall_as_the_level_rises() -> None:
    kept = np.array([[0.2, 0.4], [0.6, 0.4]]).reshape(2, 2, 1, 1)  # mean 0.4, 0.4; deviation 0.2, 0
    profile = RetentionProfile(np.array([0.3, 0.4]), kept, "snapkv", {}, 4, 64, 2048)
    np.testing.assert_allclose(BudgetCurve.from_profile(profile, 2.0).budgets[:, 0], [0, 0.8, 0.8, 1])


def test_many_levels_at_once() -> None:
    curve = BudgetCurve.from_profile(make_profile(), 1.0)
    levels = np.linspace(0, 1, 10).reshape(2, 5)
    assert curve.at(levels).shape == (2, 5, 6)
    np.testing.assert_array_equal(curve.at(levels)[1, 2], curve.at(float(levels[1, 2])))


def test_uniform() -> None:
    np.testing.assert_array_equal(BudgetCurve.uniform(5).at(0.375), np.full(5, 0.375))


@pytest.mark.parametrize(
    ("levels", "budgets"),
    [([0, 0.5], [0, 1]), ([0, 0.5, 0.5, 1], [0, 0.5, 0.5, 1]), ([0, 0.5, 1], [0, 1.5, 1]), ([0, 1], [0.1, 1])],
)
def test_broken_curves_are_refused(levels: list[float], budgets: list[float]) -> None:
    with pytest.raises(ValueError, match="must"):
        BudgetCurve(np.array(levels, dtype=float), np.array(budgets, dtype=float)[:, None])
