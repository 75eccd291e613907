# SPDX-License-Identifier: Apache-2.0
"""Time of a decode step, stock vLLM and ours side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.engine.stepper import EngineStepper

_WARM_UP = 8  # steps
_CHUNK = 1024  # prompt tokens of a step, at the least: while they fill in, the first requests decode already
_VOCABULARY = range(100, 10_000)  # token ids that every model has; which ones does not matter to the time


@dataclass(frozen=True)
class DecodeSetup:
    """What is measured.

    Attributes:
        model: path or name.
        context: prompt tokens of every request.
        batch: requests that decode together.
        steps: steps timed at a time.
        repeats: how often each engine's turn comes.

    """

    model: str
    context: int
    batch: int
    steps: int
    repeats: int

    @property
    def max_new_tokens(self) -> int:
        """Tokens that the first request generates until all has been measured."""
        fill = self.batch * (self.context // _CHUNK + 1)
        return fill + _WARM_UP + self.steps * self.repeats + 1

    @property
    def kv_tokens(self) -> int:
        """KV memory that holds all requests at full KV, with room for part blocks, padded groups and scratch pages."""
        return int(1.1 * self.batch * (self.context + self.max_new_tokens + 128)) + 4096


@dataclass(frozen=True)
class Filled:
    """An engine in which all requests decode.

    Attributes:
        kv_bytes: bytes that they hold.
        kept_fraction: of full KV.
        kv_cache_bytes: bytes of the pool.
        num_threads: OpenMP threads.

    """

    kv_bytes: int
    kept_fraction: float
    kv_cache_bytes: int
    num_threads: int


@dataclass(frozen=True)
class DecodeTimes:
    """One engine's times.

    Attributes:
        retention: None for stock.
        filled: what it holds.
        repeats: median step of every repeat, in seconds.

    """

    retention: float | None
    filled: Filled
    repeats: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Median over the repeats."""
        return median(self.repeats)

    def ratios(self, stock: DecodeTimes) -> list[float]:
        """Against stock, repeat by repeat: neighbours in time, so that other work of the machine cancels."""
        return [ours / theirs for ours, theirs in zip(self.repeats, stock.repeats, strict=True)]


def measure_decode(
    setup: DecodeSetup, retentions: Sequence[float], progress: Callable[[str], None] = lambda _: None
) -> list[DecodeTimes]:
    """Fill stock vLLM and one engine of ours per retention, then time them in turn: A B C, C B A, A B C, ...

    All have the same model and dtype, requests, KV memory and number of threads, run without compilation
    (``enforce_eager``) and else with their own defaults.

    Raises:
        TangramError: an engine failed, or the requests do not fit.

    """
    engines: list[float | None] = [None, *retentions]
    with ExitStack() as stack:
        processes = [stack.enter_context(_engine(setup, retention)) for retention in engines]
        filled = []
        for process in processes:
            progress(f"filling {process.name}")
            filled.append(process.call(fill, setup))
        times: list[list[float]] = [[] for _ in engines]
        for repeat in range(setup.repeats):
            order = range(len(engines)) if repeat % 2 == 0 else reversed(range(len(engines)))
            for index in order:
                progress(f"repeat {repeat + 1} of {setup.repeats}: {processes[index].name}")
                times[index].append(processes[index].call(median_step, setup.steps))
    return [DecodeTimes(*columns) for columns in zip(engines, filled, map(tuple, times), strict=True)]


def _engine(setup: DecodeSetup, retention: float | None) -> EngineProcess:
    options: dict[str, Any] = {
        "max_model_len": setup.context + setup.max_new_tokens,
        "max_num_seqs": setup.batch,
        "enforce_eager": True,
    }
    if retention is not None:
        options["retention"] = retention
    name = "stock" if retention is None else f"retention {retention:g}"
    return EngineProcess(name, setup.model, ours=retention is not None, kv_tokens=setup.kv_tokens, options=options)


def fill(stepper: EngineStepper, setup: DecodeSetup) -> Filled:
    """Run in the engine's process: prefill all requests.

    Raises:
        TangramError: they do not fit together.

    """
    random = Random(0)
    for number in range(setup.batch):
        prompt = random.choices(_VOCABULARY, k=setup.context)
        stepper.add(str(number), prompt, setup.max_new_tokens, ignore_eos=True)
    while len((step := stepper.step()).generated) < setup.batch:
        if step.finished:
            raise TangramError(
                f"{setup.batch} requests of {setup.context} tokens never decoded all together: "
                "lower --batch or --context"
            )
    for _ in range(_WARM_UP):
        step = stepper.step()
    assert step.kept_fraction is not None
    return Filled(sum(step.held_bytes), step.kept_fraction, stepper.kv_cache_bytes, stepper.num_threads)


def median_step(stepper: EngineStepper, steps: int) -> float:
    """Run in the engine's process: median seconds of that many steps."""
    return median(stepper.step().seconds for _ in range(steps))
