# SPDX-License-Identifier: Apache-2.0
"""Random and realistic budget curves, and schedules over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from vllm_tangram.budget import (
    BudgetCurve,
    EvictionSchedule,
    HeadGroups,
    RetentionProfile,
    Sharding,
    build_schedule,
    group_members,
)


def skewed_curve(num_members: int, seed: int = 0, spread: float = 1.5) -> BudgetCurve:
    """Log-normal appetites, scaled at each level so that all members together keep that level."""
    levels = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9])
    appetite = np.random.default_rng(seed).lognormal(0, spread, num_members)
    rows = []
    for level in levels:
        low, high = 0.0, 1e6
        for _ in range(80):
            middle = (low + high) / 2
            enough = np.minimum(1, middle * appetite).mean() > level
            low, high = (low, middle) if enough else (middle, high)
        rows.append(np.minimum(1, low * appetite))
    budgets = np.vstack([np.zeros(num_members), *rows, np.ones(num_members)])
    return BudgetCurve(np.concatenate([[0.0], levels, [1.0]]), budgets)


def make_profile(
    samples: int = 3, shape: tuple[int, int] = (3, 2), seed: int = 0, **fields: object
) -> RetentionProfile:
    retentions = np.array([0.1, 0.25, 0.5])
    appetite = np.random.default_rng(seed).lognormal(0, 1, (samples, 1, *shape))
    kept = np.minimum(1, retentions[None, :, None, None] * appetite)
    profile = RetentionProfile(
        retentions=retentions,
        kept=kept.astype(np.float32),
        scorer="snapkv",
        model={"num_hidden_layers": shape[0], "num_key_value_heads": shape[1], "weights": None},
        sinks=4,
        window=64,
        chunk_size=2048,
        info={"date": "2026-01-01"},
    )
    return replace(profile, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """Everything that a schedule is built from; small enough to enumerate all its states."""

    curve: BudgetCurve
    groups: HeadGroups
    retention: float
    block_size: int
    chunk: int  # blocks
    sinks: int
    window: int
    n_max: int
    margin: str = "inside"

    @property
    def num_members(self) -> int:
        return self.groups.group.size

    @property
    def first_floor(self) -> int:
        return -(-(self.sinks + self.window) // self.block_size)

    @property
    def later_floor(self) -> int:
        return -(-self.window // self.block_size)

    def floor(self, n: int) -> int:
        """Blocks that the protected tokens alone keep of the first n."""
        starts = range(0, n, self.chunk)
        return sum(min(n - start, self.later_floor if start else self.first_floor) for start in starts)

    def build(self) -> EvictionSchedule:
        return build_schedule(
            self.curve,
            self.groups,
            retention=self.retention,
            margin=self.margin,  # type: ignore[arg-type]
            block_size=self.block_size,
            chunk_size=self.chunk * self.block_size,
            sinks=self.sinks,
            window=self.window,
            max_tokens=self.n_max * self.block_size + self.block_size // 2,
        )


@st.composite
def shardings(draw: st.DrawFn, max_layers: int = 5, max_heads: int = 4) -> Sharding:
    """One rank as often as several, with copies of heads and stages of different lengths."""
    stages = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)) if draw(st.booleans()) else None
    heads, factor = draw(st.integers(1, max_heads)), draw(st.integers(1, 3))
    size = draw(st.sampled_from([1, 1, heads * factor, *(k for k in range(2, heads + 1) if heads % k == 0)]))
    return Sharding(heads, size, tuple(stages or [draw(st.integers(1, max_layers))]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sharding = draw(shardings())
    layers, heads = sharding.num_layers, sharding.width
    members = layers * heads
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_levels = draw(st.integers(0, 4))
    inner = np.sort(rng.choice(np.arange(1, 100), num_levels, replace=False)) / 100
    # Powers make both flat and steep curves, with members stuck at 0 and at 1.
    steps = np.sort(rng.random((num_levels, members)) ** draw(st.sampled_from([0.2, 1.0, 8.0])), axis=0)
    steps = np.clip(steps * 1.3 - 0.15, 0, 1)
    curve = BudgetCurve(np.concatenate([[0.0], inner, [1.0]]), np.vstack([np.zeros(members), steps, np.ones(members)]))
    mode = draw(st.sampled_from(["global", "layer", "neighbours"]))
    retention = draw(st.one_of(st.integers(1, 999).map(lambda k: k / 1000), st.just(0.25)))
    size = draw(st.integers(1, int(np.bincount(sharding.ranks.ravel()).min())))
    groups = group_members(curve.at(retention), (layers, heads), size, mode, sharding.ranks)
    block_size = draw(st.sampled_from([16, 32]))
    chunk = draw(st.integers(1, 12))
    window = draw(st.integers(1, chunk * block_size))
    sinks = draw(st.integers(0, chunk * block_size - window))
    return Case(curve, groups, retention, block_size, chunk, sinks, window, draw(st.integers(0, 150)))
