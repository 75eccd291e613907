# SPDX-License-Identifier: Apache-2.0
"""Throughput, over-allocation and host time against the number of heads of a page (Tangram, Figures 8 and 12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.bench.serving import Engine, Setup, Started, run_engines
from vllm_tangram.bench.throughput import Workload, serve
from vllm_tangram.budget import BudgetCurve, RetentionProfile

if TYPE_CHECKING:
    from vllm_tangram.engine.stepper import EngineStepper


@dataclass(frozen=True)
class Grouped:
    """What a group size does to pages.

    Attributes:
        group_size: heads of a page, G.
        num_groups: page lists of a request, N.
        over_allocation: memory of the groups' budgets over that of the heads' (``HeadGroups.over_allocation``), at the
            level of the retention; 1 without a profile.
        pool_pages: pages of the pool.
        prompt_pages: pages of a prompt.
        held_fraction: KV that a prompt holds over its full KV.

    """

    group_size: int
    num_groups: int
    over_allocation: float
    pool_pages: int
    prompt_pages: int
    held_fraction: float


def engines_of(base: Engine, sizes: Sequence[int]) -> list[Engine]:
    """One engine per group size, named ``G=8``."""
    return [replace(base, key=f"G={size}", options={**base.options, "page_group_size": size}) for size in sizes]


def measure_groups(
    setup: Setup,
    engines: Sequence[Engine],
    workload: Workload,
    max_seconds: float | None,
    done: Callable[[Engine, Started, dict[str, Any]], None],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the workload on one engine after the other; figures are the fields of `Served` and of `Grouped`.

    Args:
        setup: what the engines have in common.
        engines: those of ``engines_of``.
        workload: the requests.
        max_seconds: as in ``measure_throughput``.
        done: called with every engine's figures.
        progress: told what is going on.

    Raises:
        TangramError: an engine failed.

    """

    def measure(process: EngineProcess, _: Engine) -> dict[str, Any]:
        grouped = process.call(describe_groups, workload.prompt_tokens)
        return asdict(grouped) | asdict(process.call(serve, workload, max_seconds))

    run_engines(setup, engines, workload.max_model_len, measure, done, progress)


def describe_groups(stepper: EngineStepper, prompt_tokens: int) -> Grouped:
    """Run in the process of an engine of ours."""
    scheduler = stepper.scheduler
    plan, config = scheduler.plan, scheduler.plan.config
    over = 1.0
    if config.profile is not None and config.budgets == "profile":
        curve = BudgetCurve.from_profile(RetentionProfile.load(config.profile), config.alpha)
        over = plan.groups.over_allocation(curve.at(config.retention))
    return Grouped(
        group_size=plan.groups.size,
        num_groups=plan.num_groups,
        over_allocation=over,
        pool_pages=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        prompt_pages=plan.schedule(config.retention).num_pages(prompt_tokens, prompt_tokens),
        held_fraction=plan.held_fraction(prompt_tokens),
    )
