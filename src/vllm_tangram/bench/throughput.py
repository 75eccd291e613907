# SPDX-License-Identifier: Apache-2.0
"""Requests per second of a queue that is full from the start, stock vLLM and ours (Tangram, Figure 10)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.bench.profiler import gpu_kernels
from vllm_tangram.bench.serving import Engine, Setup, Started, random_prompt, run_alone, run_engines
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.engine.stepper import Advance, EngineStepper

_PROFILED = 32  # decode steps
_SAMPLED = 16  # steps between two looks at what requests hold: the look takes time, too


@dataclass(frozen=True)
class Workload:
    """Requests of one size, all queued at once.

    Attributes:
        prompt_tokens: of each; all differ.
        output_tokens: of each.
        requests: how many.
        retention: what the requests ask an engine of ours for; None: its own.

    """

    prompt_tokens: int
    output_tokens: int
    requests: int
    retention: float | None = None

    @property
    def max_model_len(self) -> int:
        """Tokens of a request."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Served:
    """What one engine did with a workload. A number that nothing was seen of is None.

    Attributes:
        seconds: from the first step to the last token, or to the time limit.
        finished: requests completed.
        requests_per_second: finished / seconds.
        steady_requests_per_second: ``most_running`` over the median time that as many finish in, while the queue was
            not empty: how the run fills and drains is left out. Counted from request to request one batch later,
            because requests of one size often end in waves. None unless two batches were queued.
        output_tokens_per_second: new tokens / seconds, those of unfinished requests too.
        mean_running: requests that ran at once, mean over time.
        most_running: the largest number.
        preemptions: requests thrown back into the queue.
        kept_fraction: KV held over full KV, mean of samples.
        most_held_bytes: KV held by all requests on a rank, the largest sample.
        decode_steps: steps whose batch had one token of each request.
        decode_step_seconds: their median wall time.
        decode_rows: their median batch.
        decode_host_seconds: median host time by part (``engine.clock``) of these steps.

    """

    seconds: float
    finished: int
    requests_per_second: float
    steady_requests_per_second: float | None
    output_tokens_per_second: float
    mean_running: float
    most_running: int
    preemptions: int
    kept_fraction: float | None
    most_held_bytes: int
    decode_steps: int
    decode_step_seconds: float | None
    decode_rows: int | None
    decode_host_seconds: dict[str, float]


def measure_throughput(
    setup: Setup,
    engines: Sequence[Engine],
    workload: Workload,
    max_seconds: float | None,
    done: Callable[[Engine, Started, Served], None],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the workload on one engine after the other.

    Args:
        setup: what the engines have in common.
        engines: in their order.
        workload: the requests.
        max_seconds: an engine is stopped after so long; what it did until then counts. None: never.
        done: called with every engine's result.
        progress: told what is going on.

    Raises:
        TangramError: an engine failed, or the requests do not fit.

    """

    def measure(process: EngineProcess, _: Engine) -> Served:
        return process.call(serve, workload, max_seconds)

    run_engines(setup, engines, workload.max_model_len, measure, done, progress)


def serve(stepper: EngineStepper, workload: Workload, max_seconds: float | None = None) -> Served:
    """Run in the engine's process: warm up, queue everything, step until it is done.

    Raises:
        TangramError: no request got a token in ``max_seconds``.

    """
    run_alone(stepper, workload.prompt_tokens, min(workload.output_tokens, 8), count=2)
    _queue(stepper, workload, Random(0))
    log = _Log(workload.requests)
    while log.finished < workload.requests and (max_seconds is None or log.seconds < max_seconds):
        log.add(stepper.advance(), stepper)
    preemptions = stepper.preemptions
    stepper.abort_all()
    return log.served(preemptions)


def decode_kernels(stepper: EngineStepper, workload: Workload) -> dict[str, float]:
    """Run in the engine's process: how much of a decode step the GPU works. Needs CUDA.

    Under asynchronous scheduling the host prepares a step while the GPU computes the one before; what of a step's time
    the GPU does not work is what the host did not hide.

    Args:
        stepper: the engine.
        workload: requests that run all at once, each long enough for 64 steps after the others' prefill.

    Raises:
        TangramError: a request ended before so many steps.

    Returns:
        ``wall``: median seconds of a decode step of all requests, taken before the profiler slows the host;
        ``gpu``: seconds of all kernels of such a step, mean of 32.

    """
    _queue(stepper, workload, Random(1))
    walls: list[float] = []
    while len(walls) < _PROFILED:
        step = stepper.advance()
        if step.finished:
            raise TangramError(
                f"{workload.output_tokens} new tokens are too few to time {_PROFILED} decode steps of all"
            )
        walls = [*walls, step.seconds] if step.decode_only and step.running == workload.requests else []
    kernels = gpu_kernels(lambda: [stepper.advance() for _ in range(_PROFILED)])
    stepper.abort_all()
    return {"wall": median(walls), "gpu": sum(kernels.values()) / _PROFILED}


def _queue(stepper: EngineStepper, workload: Workload, random: Random) -> None:
    for number in range(workload.requests):
        prompt = random_prompt(random, workload.prompt_tokens)
        stepper.add_counted(str(number), prompt, workload.output_tokens, workload.retention)


class _Log:
    """The steps so far. Time runs on between them, so that what an asynchronous engine does meanwhile is no gift."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.start = time.perf_counter()
        self.times = [0.0]  # after every step
        self.tokens = [0]  # generated until then
        self.running = [0]
        self.finished_at: list[int] = []  # step of every finished request
        self.decode: list[tuple[float, int, dict[str, float]]] = []
        self.kept: list[float] = []
        self.most_held = 0

    @property
    def seconds(self) -> float:
        return self.times[-1]

    @property
    def finished(self) -> int:
        return len(self.finished_at)

    def add(self, step: Advance, stepper: EngineStepper) -> None:
        if len(self.times) % _SAMPLED == 0:
            held, fraction = stepper.held()
            self.most_held = max(self.most_held, held)
            self.kept += [] if fraction is None else [fraction]
        self.times.append(time.perf_counter() - self.start)
        self.tokens.append(self.tokens[-1] + sum(step.new_tokens.values()))
        self.running.append(step.running)
        self.finished_at += [len(self.times) - 1] * len(step.finished)
        if step.decode_only:
            self.decode.append((step.seconds, step.running, step.host))

    def served(self, preemptions: int) -> Served:
        if self.tokens[-1] == 0:
            raise TangramError(f"no request got a token in {self.seconds:.0f} s: give more time or shorter prompts")
        durations = [after - before for before, after in pairwise(self.times)]
        waited = sum(count * seconds for count, seconds in zip(self.running[1:], durations, strict=True))
        parts = self.decode[0][2] if self.decode else {}
        return Served(
            seconds=self.seconds,
            finished=self.finished,
            requests_per_second=self.finished / self.seconds,
            steady_requests_per_second=self._steady(),
            output_tokens_per_second=self.tokens[-1] / self.seconds,
            mean_running=waited / self.seconds,
            most_running=max(self.running),
            preemptions=preemptions,
            kept_fraction=sum(self.kept) / len(self.kept) if self.kept else None,
            most_held_bytes=self.most_held,
            decode_steps=len(self.decode),
            decode_step_seconds=median(seconds for seconds, _, _ in self.decode) if self.decode else None,
            decode_rows=round(median(rows for _, rows, _ in self.decode)) if self.decode else None,
            decode_host_seconds={part: median(host[part] for _, _, host in self.decode) for part in parts},
        )

    def _steady(self) -> float | None:
        batch = max(self.running)
        ends = [self.times[step] for step in self.finished_at]
        last = min(len(ends) - 1, self.requests - batch)  # later ones ran beside places that nobody took any more
        turns = [ends[number] - ends[number - batch] for number in range(batch, last + 1)]
        return batch / median(turns) if turns and median(turns) > 0 else None
