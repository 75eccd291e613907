# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of long prompts that arrive at random, against their rate (Tangram, Figure 14)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.bench.serving import Engine, Setup, Started, random_prompt, run_alone, run_engines

if TYPE_CHECKING:
    from vllm_tangram.engine.stepper import Advance, EngineStepper

_LONGEST_SLEEP = 0.01  # seconds: an idle engine looks for arrivals this often


@dataclass(frozen=True)
class Arrivals:
    """Requests of one size that arrive as a Poisson process.

    Attributes:
        prompt_tokens: of each; all differ.
        output_tokens: of each.
        requests: how many, at every rate.

    """

    prompt_tokens: int
    output_tokens: int
    requests: int

    @property
    def max_model_len(self) -> int:
        """Tokens of a request."""
        return self.prompt_tokens + self.output_tokens

    def times(self, rate: float) -> list[float]:
        """When they arrive, in seconds from 0, ascending; the same for every engine, and faster at a higher rate."""
        random = Random(0)
        return np.cumsum([random.expovariate(rate) for _ in range(self.requests)]).tolist()


@dataclass(frozen=True)
class FirstTokens:
    """One engine at one rate.

    Attributes:
        rate: requests per second.
        seconds: of every request, in the order of arrival: from when it was due to its first token. A step that was
            running when it arrived counts, as it does in a server.
        most_running: most requests at once.
        preemptions: requests thrown back into the queue.

    """

    rate: float
    seconds: tuple[float, ...]
    most_running: int
    preemptions: int

    @property
    def mean(self) -> float:
        """Mean in seconds."""
        return float(np.mean(self.seconds))

    def percentile(self, percent: float) -> float:
        """In seconds, interpolated linearly."""
        return float(np.percentile(self.seconds, percent))


def measure_ttft(
    setup: Setup,
    engines: Sequence[Engine],
    arrivals: Arrivals,
    rates: Sequence[float],
    done: Callable[[Engine, Started, list[FirstTokens]], None],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Run all rates on one engine after the other.

    Args:
        setup: what the engines have in common.
        engines: in their order.
        arrivals: the requests.
        rates: requests per second.
        done: called with every engine's results, one per rate.
        progress: told what is going on.

    Raises:
        TangramError: an engine failed.

    """

    def measure(process: EngineProcess, engine: Engine) -> list[FirstTokens]:
        process.call(run_alone, arrivals.prompt_tokens, min(arrivals.output_tokens, 8), 2)
        results = []
        for rate in rates:
            progress(f"measuring {engine.key} at {rate:g} requests per second")
            results.append(process.call(first_tokens, arrivals, rate))
        return results

    run_engines(setup, engines, arrivals.max_model_len, measure, done, progress)


def first_tokens(stepper: EngineStepper, arrivals: Arrivals, rate: float) -> FirstTokens:
    """Run in the engine's process, in real time, until every request has its first token."""
    random = Random(0)
    due = arrivals.times(rate)
    queue = [
        Due(seconds, str(number), random_prompt(random, arrivals.prompt_tokens), arrivals.output_tokens)
        for number, seconds in enumerate(due)
    ]
    first: dict[str, float] = {}
    most = 0
    for now, step in replay(stepper, queue):
        most = max(most, step.running)
        for name in step.new_tokens:
            first.setdefault(name, now)
        if len(first) == len(due):
            break
    preemptions = stepper.preemptions
    stepper.abort_all()
    seconds = tuple(first[str(number)] - arrived for number, arrived in enumerate(due))
    return FirstTokens(rate, seconds, most, preemptions)


@dataclass(frozen=True, order=True)
class Due:
    """A request and when it is sent.

    Attributes:
        seconds: from the start.
        name: different for every request.
        prompt: its tokens.
        output_tokens: exactly so many are generated.

    """

    seconds: float
    name: str
    prompt: Sequence[int] = field(compare=False)
    output_tokens: int = field(compare=False)


def replay(stepper: EngineStepper, queue: list[Due]) -> Iterator[tuple[float, Advance]]:
    """Send requests when they are due, in real time, and step while there are any.

    Args:
        stepper: the engine; nothing runs in it.
        queue: the requests; made a heap, emptied, and more may be pushed between steps.

    Yields:
        Every step, and the seconds from the start to its end.

    """
    heapify(queue)
    active = 0
    start = time.perf_counter()
    while queue or active:
        now = time.perf_counter() - start
        while queue and queue[0].seconds <= now:
            request = heappop(queue)
            stepper.add_counted(request.name, request.prompt, request.output_tokens)
            active += 1
        if not active:
            time.sleep(min(queue[0].seconds - now, _LONGEST_SLEEP))
            continue
        step = stepper.advance()
        active -= len(step.finished)
        yield time.perf_counter() - start, step
