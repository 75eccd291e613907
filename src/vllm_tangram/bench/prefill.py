# SPDX-License-Identifier: Apache-2.0
"""Latency of one prompt, and what compression costs in it, beside giving pages back afterwards (Tangram, Figure 11)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.bench.profiler import gpu_kernels, own_kernels
from vllm_tangram.bench.serving import Engine, Setup, Started, random_prompt, run_alone, run_engines

if TYPE_CHECKING:
    from vllm_tangram.engine.stepper import EngineStepper

_LISTED = 12  # kernels of a profile that are named, the costliest


@dataclass(frozen=True)
class Reclaim:
    """Compress and reclaim, modelled on the engine's real page pool, idle: a prompt gets the pages of its full KV when
    it is admitted and gives back, when it is compressed, those that the retention does not keep.

    Only the scheduler's work is measured. Moving what is kept together, which it also takes, would come on top.

    Attributes:
        full_pages: pages of the full prompt, those that pad the last group included.
        kept_pages: pages that it keeps: all that ours ever takes.
        allocate_full_seconds: taking ``full_pages``.
        allocate_kept_seconds: taking ``kept_pages``, chunk by chunk as ours does.
        free_seconds: giving the difference back.
        pool_pages: pages of the pool.
        at_once: prompts that ours admits into an empty pool.
        at_once_reclaim: prompts that are admitted when each waits for the one before to be compressed.
        at_once_unreclaimed: prompts that are admitted when none is compressed yet.

    """

    full_pages: int
    kept_pages: int
    allocate_full_seconds: float
    allocate_kept_seconds: float
    free_seconds: float
    pool_pages: int
    at_once: int
    at_once_reclaim: int
    at_once_unreclaimed: int


@dataclass(frozen=True)
class Prefilled:
    """One engine's prefill.

    Attributes:
        seconds: from the request to its first token, every repeat.
        steps: engine steps of one repeat.
        host_seconds: median host time of a repeat by part (``engine.clock``).
        kernels: name -> GPU seconds of one prefill; empty without CUDA. The costliest, and the sum of all (``total``).
        own_kernels: GPU seconds of this package's kernels: selecting, writing and reading pages. Scores are PyTorch's
            kernels and not among them. None without CUDA.
        reclaim: compress and reclaim at the same retention; None for stock, at retention 1, and where the pool does
            not hold the full prompt.

    """

    seconds: tuple[float, ...]
    steps: int
    host_seconds: dict[str, float]
    kernels: dict[str, float]
    own_kernels: float | None
    reclaim: Reclaim | None

    @property
    def median_seconds(self) -> float:
        """Of the repeats."""
        return median(self.seconds)


def measure_prefill(
    setup: Setup,
    engines: Sequence[Engine],
    prompt_tokens: int,
    repeats: int,
    done: Callable[[Engine, Started, Prefilled], None],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Time the prompt on one engine after the other.

    Args:
        setup: what the engines have in common.
        engines: in their order.
        prompt_tokens: length of the prompt.
        repeats: prompts that are timed, one after the other.
        done: called with every engine's result.
        progress: told what is going on.

    Raises:
        TangramError: an engine failed.

    """

    def measure(process: EngineProcess, engine: Engine) -> Prefilled:
        compressing = engine.retention is not None and engine.retention < 1
        return process.call(prefill, prompt_tokens, repeats, compressing)

    run_engines(setup, engines, prompt_tokens + 1, measure, done, progress)


def prefill(stepper: EngineStepper, prompt_tokens: int, repeats: int, compressing: bool) -> Prefilled:
    """Run in the engine's process."""
    run_alone(stepper, prompt_tokens, 1)
    random = Random(0)
    seconds, hosts, steps = [], [], 0
    for number in range(repeats):
        taken, steps, host = _one(stepper, str(number), random_prompt(random, prompt_tokens))
        seconds.append(taken)
        hosts.append(host)
    kernels = gpu_kernels(lambda: _one(stepper, "profiled", random_prompt(random, prompt_tokens)))
    own = own_kernels()
    listed = sorted(kernels, key=kernels.__getitem__, reverse=True)[:_LISTED]
    return Prefilled(
        seconds=tuple(seconds),
        steps=steps,
        host_seconds={part: median(host[part] for host in hosts) for part in hosts[0]},
        kernels={name: kernels[name] for name in listed} | ({"total": sum(kernels.values())} if kernels else {}),
        own_kernels=sum(kernels[name] for name in kernels if name in own) if kernels else None,
        reclaim=compress_and_reclaim(stepper.scheduler, prompt_tokens, repeats) if compressing else None,
    )


def _one(stepper: EngineStepper, name: str, prompt: list[int]) -> tuple[float, int, dict[str, float]]:
    """Seconds to the first token, steps, host seconds by part."""
    start = time.perf_counter()
    stepper.add_counted(name, prompt, 1)
    steps, host, done = 0, dict[str, float](), False
    while not done:
        step = stepper.advance()
        steps, done = steps + 1, bool(step.finished)
        host = {part: host.get(part, 0.0) + taken for part, taken in step.host.items()}
    return time.perf_counter() - start, steps, host


def compress_and_reclaim(scheduler: Any, prompt_tokens: int, repeats: int) -> Reclaim | None:
    """Measure on the pool of an idle engine of ours; None where the full prompt does not fit.

    Args:
        scheduler: the engine's.
        prompt_tokens: length of the prompt.
        repeats: medians of so many.

    """
    plan, pool = scheduler.plan, scheduler.kv_cache_manager.block_pool
    schedule = plan.schedule(plan.config.retention)
    ends = [*range(plan.config.chunk_size, prompt_tokens, plan.config.chunk_size), prompt_tokens]
    held = [0, *(schedule.num_pages(end, prompt_tokens) for end in ends)]
    full, kept, free = plan.num_groups * -(-prompt_tokens // plan.block_size), held[-1], pool.get_num_free_blocks()
    if full > free:
        return None
    times: list[tuple[float, float, float]] = []
    for _ in range(repeats):
        start = time.perf_counter()
        blocks = pool.get_new_blocks(full)
        allocated = time.perf_counter()
        pool.free_blocks(blocks[kept:])
        freed = time.perf_counter()
        pool.free_blocks(blocks[:kept])
        again = time.perf_counter()
        ours = [pool.get_new_blocks(after - before) for before, after in pairwise(held)]
        end = time.perf_counter()
        pool.free_blocks(block for some in ours for block in some)
        times.append((allocated - start, end - again, freed - allocated))
    allocate_full, allocate_kept, freeing = map(median, zip(*times, strict=True))
    return Reclaim(
        full_pages=full,
        kept_pages=kept,
        allocate_full_seconds=allocate_full,
        allocate_kept_seconds=allocate_kept,
        free_seconds=freeing,
        pool_pages=free,
        at_once=free // kept,
        at_once_reclaim=1 + (free - full) // kept,
        at_once_unreclaimed=free // full,
    )
