# SPDX-License-Identifier: Apache-2.0
"""Prompts that repeat what came before: stock vLLM with its prefix cache, ours with sessions, in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappush
from typing import TYPE_CHECKING

import numpy as np

from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.bench.serving import Engine, Setup, Started, run_alone, run_engines
from vllm_tangram.bench.traffic import Traffic
from vllm_tangram.bench.ttft import replay
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.engine.stepper import EngineStepper

_WARM_UP = (2, 8)  # requests, their new tokens


@dataclass(frozen=True)
class Replayed:
    """What one engine did with the traffic.

    Attributes:
        seconds: from the start to the last token, or to the time limit.
        finished: requests completed.
        requests_per_second: finished / seconds.
        ttft_mean: seconds from when a request was due to its first token, mean. A request that was due and had none
            when the time was up counts with the time that it had waited.
        ttft_p50: their median.
        ttft_p99: 99th percentile, interpolated linearly.
        prompt_tokens: of all requests that got a token.
        prefilled_tokens: those of them that were computed; what a preempted request computes again is not counted.
        hit_rate: share of the prompt tokens that was not computed.
        most_running: most requests at once.
        preemptions: requests thrown back into the queue.
        sessions: compressed prefixes at the end, longest ones only; None for stock.
        restored: requests that began with pages from host memory; None for stock.

    """

    seconds: float
    finished: int
    requests_per_second: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    prompt_tokens: int
    prefilled_tokens: int
    hit_rate: float
    most_running: int
    preemptions: int
    sessions: int | None
    restored: int | None


def measure_multiturn(
    setup: Setup,
    engines: Sequence[Engine],
    traffic: Traffic,
    max_seconds: float | None,
    done: Callable[[Engine, Started, Replayed], None],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Replay the traffic on one engine after the other.

    Args:
        setup: what the engines have in common.
        engines: in their order.
        traffic: the requests.
        max_seconds: an engine is stopped after so long; what it did until then counts. None: never.
        done: called with every engine's result.
        progress: told what is going on.

    Raises:
        TangramError: an engine failed, or a request does not fit.

    """

    def measure(process: EngineProcess, _: Engine) -> Replayed:
        return process.call(replayed, traffic, max_seconds)

    run_engines(setup, engines, traffic.max_model_len, measure, done, progress)


def replayed(stepper: EngineStepper, traffic: Traffic, max_seconds: float | None = None) -> Replayed:
    """Run in the engine's process: warm up, forget that, and replay in real time until all is answered.

    Raises:
        TangramError: no request got a token in ``max_seconds``.

    """
    count, output_tokens = _WARM_UP
    run_alone(stepper, traffic.max_model_len - output_tokens, output_tokens, count)
    stepper.forget_prefixes()
    queue = traffic.first()
    sent = {request.name: request for request in queue}
    answers: dict[str, list[int]] = {}
    first: dict[str, float] = {}
    finished = most = cached = 0
    now = 0.0
    for now, step in replay(stepper, queue):
        most = max(most, step.running)
        for name, tokens in step.token_ids.items():
            if name not in first:
                first[name] = now
                cached += step.cached[name]
            answers.setdefault(name, []).extend(tokens)
        for name in step.finished:
            finished += 1
            following = traffic.following(sent[name], answers.pop(name), now)
            if following is not None:
                sent[following.name] = following
                heappush(queue, following)
        if max_seconds is not None and now >= max_seconds:
            break
    preemptions = stepper.preemptions
    stepper.abort_all()
    if not first:
        raise TangramError(f"no request got a token in {now:.0f} s: give more time or shorter prompts")
    waits = [first.get(name, now) - request.seconds for name, request in sent.items() if request.seconds < now]
    prompt = sum(len(sent[name].prompt) for name in first)
    return Replayed(
        seconds=now,
        finished=finished,
        requests_per_second=finished / now,
        ttft_mean=float(np.mean(waits)),
        ttft_p50=float(np.percentile(waits, 50)),
        ttft_p99=float(np.percentile(waits, 99)),
        prompt_tokens=prompt,
        prefilled_tokens=prompt - cached,
        hit_rate=cached / prompt,
        most_running=most,
        preemptions=preemptions,
        sessions=stepper.resident_sessions(),
        restored=stepper.restored_sessions(),
    )
