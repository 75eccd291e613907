# SPDX-License-Identifier: Apache-2.0
"""What each head keeps, for every retention that a request may ask for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from vllm_tangram.budget.allocation import BudgetCurve
from vllm_tangram.budget.grouping import group_members
from vllm_tangram.budget.profile import RetentionProfile
from vllm_tangram.budget.schedule import EvictionSchedule, build_schedule
from vllm_tangram.budget.sharding import Sharding
from vllm_tangram.config import TangramConfig
from vllm_tangram.errors import TangramError

_STEPS = 1000  # retentions that are told apart
_CACHED_SCHEDULES = 64


class RetentionPlan:
    """Groups and eviction schedules of one engine; the same in every process that builds it from the same inputs.

    Attributes:
        config: the engine's options.
        sharding: which members each rank holds.
        groups: the head groups of all ranks, formed from the budgets at ``config.retention``.
        block_size: tokens of a block.

    """

    def __init__(
        self,
        config: TangramConfig,
        profile: RetentionProfile | None,
        *,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        max_tokens: int,
        tensor_parallel_size: int = 1,
        stage_layers: Sequence[int] = (),
    ) -> None:
        """Form the groups and the server's own schedule.

        Args:
            config: the engine's options.
            profile: the retention profile; None only with ``budgets="uniform"`` or ``retention=1``.
            num_layers: L of the served model.
            num_kv_heads: H of the served model.
            block_size: tokens of a block.
            max_tokens: longest prompt.
            tensor_parallel_size: ranks over which the heads of a layer are spread.
            stage_layers: layers of each pipeline stage; none: one stage.

        Raises:
            TangramError: the profile is missing or of another shape, or options do not fit each other or the ranks.

        """
        if profile is not None and (profile.num_layers, profile.num_kv_heads) != (num_layers, num_kv_heads):
            raise TangramError(
                f"profile {profile.source} has {profile.num_layers} layers of {profile.num_kv_heads} KV heads, the "
                f"served model has {num_layers} of {num_kv_heads}; run `tangram profile` for this model"
            )
        self.config = config
        self.block_size = block_size
        self._max_tokens = max_tokens
        self._profiled = profile is not None
        self.sharding = Sharding(num_kv_heads, tensor_parallel_size, tuple(stage_layers) or (num_layers,))
        if profile is None or config.budgets == "uniform":
            curve = BudgetCurve.uniform(num_layers * num_kv_heads)
        else:
            curve = BudgetCurve.from_profile(profile, config.alpha)
        self._curve = BudgetCurve(curve.levels, self.sharding.spread(curve.budgets))
        self.groups = group_members(
            _grouping_key(self._curve, config.retention),
            (num_layers, self.sharding.width),
            config.page_group_size,
            config.grouping,
            self.sharding.ranks,
        )
        self._num_members, self._page_members = int(self.groups.group.size), self.groups.page_members
        self._build_cached = lru_cache(maxsize=_CACHED_SCHEDULES)(self._build)
        self._in_use: WeakValueDictionary[float, EvictionSchedule] = WeakValueDictionary()
        self._base = self.schedule(config.retention)

    @classmethod
    def of_profile(
        cls, config: TangramConfig, profile: RetentionProfile, *, block_size: int, max_tokens: int
    ) -> RetentionPlan:
        """The plan of an engine of one rank that serves the very model of a profile; as the constructor otherwise."""
        return cls(
            config,
            profile,
            num_layers=profile.num_layers,
            num_kv_heads=profile.num_kv_heads,
            block_size=block_size,
            max_tokens=max_tokens,
        )

    @property
    def num_groups(self) -> int:
        """Number of head groups, N."""
        return self.groups.num_groups

    def quantise(self, retention: float) -> float:
        """Round down to a thousandth, at least 0.001, so that clients cannot make ever more schedules."""
        # The summand keeps 0.57 at 0.57 although 0.57 * 1000 is 569.99...
        return min(max(math.floor(retention * _STEPS + 1e-6), 1), _STEPS) / _STEPS

    def schedule(self, retention: float) -> EvictionSchedule:
        """The schedule of a retention in (0, 1], after ``quantise``; the same object as long as anybody holds it.

        Raises:
            TangramError: below 1 although there is no profile to take budgets from.

        """
        retention = self.quantise(retention)
        if retention < 1 and not self._profiled and self.config.budgets == "profile":
            raise TangramError(
                f"retention {retention:g} needs a retention profile: give --profile, make one with `tangram profile`, "
                "or choose --budgets uniform"
            )
        schedule = self._in_use.get(retention)
        if schedule is None:
            schedule = self._in_use[retention] = self._build_cached(retention)
        return schedule

    def digest(self) -> str:
        """16 hex digits over options, groups and budgets; processes compare them.

        The longest prompt is left out: vLLM may still shorten it when it sizes the pool.
        """
        sha = hashlib.sha256(f"{self.config.model_dump_json(exclude={'profile'})} {self.block_size}".encode())
        sha.update(self.groups.group.astype("<i4").tobytes())
        sha.update(self.groups.column.astype("<i4").tobytes())
        sha.update(self.groups.ranks.astype("<i4").tobytes())
        sha.update(self._curve.budgets.astype("<f8").tobytes())
        return sha.hexdigest()[:16]

    def full_pages(self, num_tokens: int) -> int:
        """Pages' worth of full KV of ``num_tokens`` tokens, without the padding of the last group."""
        return -(-self._num_members * -(-num_tokens // self.block_size) // self._page_members)

    def held_fraction(self, num_tokens: int, retention: float | None = None) -> float:
        """Memory of a prompt of ``num_tokens >= 1`` over that of full KV, both in whole blocks; padding counts as held.

        Both are those of all ranks together.

        Args:
            num_tokens: length of the prompt.
            retention: that of the request; None for the server's.

        """
        schedule = self._base if retention is None else self.schedule(retention)
        full = self.groups.group.size * -(-num_tokens // self.block_size)
        return self.groups.page_members * schedule.num_pages(num_tokens, num_tokens) / full

    def _build(self, retention: float) -> EvictionSchedule:
        return build_schedule(
            self._curve,
            self.groups,
            retention=retention,
            margin=self.config.margin,
            block_size=self.block_size,
            chunk_size=self.config.chunk_size,
            sinks=self.config.sinks,
            window=self.config.window,
            max_tokens=self._max_tokens,
        )


def _grouping_key(curve: BudgetCurve, level: float) -> NDArray[np.float64]:
    """[M] sort key: by budget at ``level``, equals by their mean over all levels.

    At a high level many budgets are 1; the mean still tells apart what requests of a lower retention want.
    """
    order = np.lexsort((-curve.budgets.mean(axis=0), -curve.at(level)))
    key = np.empty(len(order))
    key[order] = -np.arange(len(order))
    return key
