# SPDX-License-Identifier: Apache-2.0
"""Budgets: the fraction of its tokens that each member may keep."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_tangram.budget.profile import RetentionProfile


class BudgetCurve:
    """Budgets of all members as a function of the competition level ``x``.

    At the profiled levels a budget is ``min(1, mu + alpha * sigma)`` (Tangram, arXiv 2606.06302, section 4.1.1),
    between them it is interpolated linearly.

    Attributes:
        levels: [K] float64, strictly increasing from 0 to 1.
        budgets: [K, M] float64, nondecreasing along K, 0 in the first row and 1 in the last.

    """

    def __init__(self, levels: NDArray[np.float64], budgets: NDArray[np.float64]) -> None:
        if levels[0] != 0 or levels[-1] != 1 or np.any(np.diff(levels) <= 0):
            raise ValueError("levels must increase strictly from 0 to 1")
        if np.any(budgets[0] != 0) or np.any(budgets[-1] != 1) or np.any(np.diff(budgets, axis=0) < 0):
            raise ValueError("budgets must not decrease, from 0 at level 0 to 1 at level 1")
        self.levels = levels
        self.budgets = budgets

    @classmethod
    def from_profile(cls, profile: RetentionProfile, alpha: float) -> BudgetCurve:
        """Budgets of a profile; members in row-major (layer, head) order."""
        measured = np.minimum(1.0, profile.mean + alpha * profile.std).reshape(len(profile.retentions), -1)
        ends = np.zeros((1, measured.shape[1])), np.ones((1, measured.shape[1]))
        # A deviation that shrinks as x grows could make a budget fall; more memory must never keep less.
        budgets = np.maximum.accumulate(np.concatenate([ends[0], measured, ends[1]]), axis=0)
        return cls(np.concatenate([[0.0], profile.retentions, [1.0]]), budgets)

    @classmethod
    def uniform(cls, num_members: int) -> BudgetCurve:
        """The same budget ``x`` for every member."""
        return cls(np.array([0.0, 1.0]), np.repeat([[0.0], [1.0]], num_members, axis=1))

    def at(self, x: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Budgets at level ``x`` in [0, 1]: [M] for a number, [..., M] for an array of levels [...]."""
        x = np.asarray(x, dtype=np.float64)
        upper = np.clip(np.searchsorted(self.levels, x, side="right"), 1, len(self.levels) - 1)
        start, end = self.levels[upper - 1], self.levels[upper]
        share = ((x - start) / (end - start))[..., None]
        return (1.0 - share) * self.budgets[upper - 1] + share * self.budgets[upper]
