# SPDX-License-Identifier: Apache-2.0
"""The scenario: one long request alone, a conversation over a long document, and a burst of long requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.demo.prompts import QUESTIONS, chat, document, long_prompts

if TYPE_CHECKING:
    from vllm_tangram.engine.stepper import EngineStepper

MODEL = "embedded"
RETENTION = 0.25
_ANSWER_TOKENS = 48
_BURST_TOKENS = 32
_STOCK_BLOCK = 128  # stock vLLM's block size on the CPU
_STOCK_FITS = 2.2  # long requests that stock vLLM has the memory for
_TALK = 256  # tokens of the conversation besides its document: together they are a long request
_ROOM = 1024  # tokens beyond ``prompt_tokens`` that any request may reach


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        prompt_tokens: tokens of a long request; the conversation comes to about as many.
        requests: long requests of the burst.
        turns: of the conversation.

    """

    prompt_tokens: int
    requests: int
    turns: int

    @property
    def kv_tokens(self) -> int:
        """KV memory in tokens of full KV: 2.2 long requests of stock vLLM."""
        blocks = -(-(self.prompt_tokens + _BURST_TOKENS) // _STOCK_BLOCK)
        return int(_STOCK_FITS * blocks * _STOCK_BLOCK)


FULL = Size(prompt_tokens=4096, requests=9, turns=len(QUESTIONS))
QUICK = Size(prompt_tokens=2048, requests=8, turns=2)


@dataclass(frozen=True)
class Turn:
    """One turn of the conversation.

    Attributes:
        question: of the user.
        answer: of the model.
        seconds: until the answer was complete.

    """

    question: str
    answer: str
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What one engine did.

    Attributes:
        kv_bytes_per_request: most KV bytes that a long request held, alone in the engine.
        kept_fraction: those bytes over its full KV.
        turns: the conversation.
        requests_at_once: most requests of the burst that held KV at the same time.
        requests_per_second: of the burst, completed.
        pages_reclaimed: pages taken from a request while it ran.
        kv_cache_bytes: the engine's KV memory.
        profile: path of the retention profile; None for stock.

    """

    kv_bytes_per_request: int
    kept_fraction: float
    turns: tuple[Turn, ...]
    requests_at_once: int
    requests_per_second: float
    pages_reclaimed: int
    kv_cache_bytes: int
    profile: str | None


def run_demo(size: Size, progress: Callable[[str], None] = lambda _: None) -> tuple[Measured, Measured]:
    """Run the scenario on stock vLLM, then on ours, with the same KV memory and else with each one's defaults.

    Both run without compilation (``enforce_eager``), so that they start fast. Stock vLLM's prefix cache and our
    sessions are on, as they are by default: that helps the conversation; the prompts of the burst have nothing in
    common.

    Returns:
        (stock, ours).

    Raises:
        TangramError: an engine failed.

    """
    progress("stock vLLM")
    stock = _run("stock", size, ours=False, options={})
    progress("vllm-tangram (a missing retention profile takes some minutes to make, once)")
    return stock, _run("tangram", size, ours=True, options={"retention": RETENTION})


def _run(name: str, size: Size, *, ours: bool, options: dict[str, Any]) -> Measured:
    options |= {"enforce_eager": True, "max_model_len": size.prompt_tokens + _ROOM}
    with EngineProcess(name, MODEL, ours=ours, kv_tokens=size.kv_tokens, options=options) as engine:
        return engine.call(run_scenario, size)


def run_scenario(stepper: EngineStepper, size: Size) -> Measured:
    """Run in the engine's process."""
    first, *burst = long_prompts(stepper.tokenizer, 1 + size.requests, size.prompt_tokens)
    held, kept = _alone(stepper, first)
    turns = _converse(stepper, size)
    at_once, per_second = _burst(stepper, burst)
    return Measured(
        kv_bytes_per_request=held,
        kept_fraction=kept,
        turns=turns,
        requests_at_once=at_once,
        requests_per_second=per_second,
        pages_reclaimed=stepper.pages_reclaimed,
        kv_cache_bytes=stepper.kv_cache_bytes,
        profile=stepper.profile,
    )


def _alone(stepper: EngineStepper, prompt: Sequence[int]) -> tuple[int, float]:
    """Most bytes held by the request, and what share of full KV that is."""
    most, kept = 0, 1.0
    stepper.add("alone", prompt, _BURST_TOKENS, ignore_eos=True)
    while "alone" not in (step := stepper.step()).finished:
        if step.kept_fraction is not None:
            most, kept = max(most, *step.held_bytes), step.kept_fraction
    return most, kept


def _converse(stepper: EngineStepper, size: Size) -> tuple[Turn, ...]:
    """Every turn is a request of its own, whose prompt repeats what was said before."""
    text = document(stepper.tokenizer, size.prompt_tokens - _TALK)
    messages: list[dict[str, str]] = []
    turns: list[Turn] = []
    for question in QUESTIONS[: size.turns]:
        content = question if messages else f"{text}\n\n{question}"
        messages.append({"role": "user", "content": content})
        name = f"turn {len(turns) + 1}"
        start = time.perf_counter()
        stepper.add(name, chat(stepper.tokenizer, messages), _ANSWER_TOKENS)
        while name not in (step := stepper.step()).finished:
            pass
        answer = step.finished[name].strip()
        turns.append(Turn(question, answer, time.perf_counter() - start))
        messages.append({"role": "assistant", "content": answer})
    return tuple(turns)


def _burst(stepper: EngineStepper, prompts: Sequence[Sequence[int]]) -> tuple[int, float]:
    """Most requests at once, and completed requests per second."""
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        stepper.add(f"burst {number}", prompt, _BURST_TOKENS, ignore_eos=True)
    at_once = completed = 0
    while completed < len(prompts):
        step = stepper.step()
        at_once = max(at_once, len(step.held_bytes))
        completed += len(step.finished)
    return at_once, completed / (time.perf_counter() - start)
