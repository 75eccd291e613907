# SPDX-License-Identifier: Apache-2.0
"""What a request keeps and answers does not depend on who shares its steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.engine.drive import SMALL, Engine, external_id

from vllm_tangram.compression import scorer_names
from vllm_tangram.engine.cpu import attention

pytestmark = pytest.mark.engine

Kept = dict[tuple[int, int], tuple[list[int], list[int]]]  # (layer, chunk position) -> (indices, counts per head)


@contextmanager
def recorded(engine: Engine, name: str) -> Iterator[Kept]:
    """Record which tokens one request keeps."""
    kept: Kept = {}
    original_prefill = attention.HeadGroupCPUAttention._prefill
    original_select = attention.select_tokens
    current: list[Any] = []

    def prefill(self: Any, row: Any, *args: Any) -> None:
        runner = engine.runner
        request_id = next(r for r, slot in runner._slot_of.items() if slot == row.slot)
        current[:] = [(self.index, row.position)] if external_id(request_id) == name else []
        original_prefill(self, row, *args)

    def select(scores: torch.Tensor, keep: list[int], **protect: int) -> torch.Tensor:
        indices = original_select(scores, keep, **protect)
        if current:
            kept[current[0]] = (indices.tolist(), list(keep))
        return indices

    attention.HeadGroupCPUAttention._prefill = prefill  # type: ignore[method-assign]
    attention.select_tokens = select
    try:
        yield kept
    finally:
        attention.HeadGroupCPUAttention._prefill = original_prefill  # type: ignore[method-assign]
        attention.select_tokens = original_select


@pytest.mark.parametrize("scorer", scorer_names())
def test_alone_and_among_others(
    scorer: str, make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str], token_ids: list[int]
) -> None:
    engine = make_engine(scorer=scorer, profile=skewed_profile(scorer), **SMALL)
    prompt = token_ids[5000:5450]
    assert engine.llm.llm_engine.reset_prefix_cache()  # what is taken over from earlier requests is not chosen again
    with recorded(engine, "probe") as alone:
        engine.add("probe", prompt, 24)
        expected = engine.run()["probe"]
    assert len(alone) == 30 * 4  # every layer, every chunk of the prompt

    rng = random.Random(11)
    arrivals = sorted(rng.randrange(25) for _ in range(16))

    def before_step(step: int) -> None:
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            start = rng.randrange(4000)
            engine.add(
                f"other{len(arrivals)}",
                token_ids[start : start + rng.randrange(1, 300)],
                rng.randrange(1, 30),
                retention=rng.choice([None, 0.1, 1.0]),
            )
        if step == 6:
            engine.add("probe", prompt, 24)

    assert engine.llm.llm_engine.reset_prefix_cache()
    with recorded(engine, "probe") as crowded:
        answers = engine.run(before_step, more_to_come=lambda: bool(arrivals))
    assert len(answers) == 17
    assert crowded == alone
    assert answers["probe"].tokens == expected.tokens


def test_several_chunks_in_a_step(
    make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str], token_ids: list[int]
) -> None:
    """How many chunks of a prompt a step takes changes nothing but the number of steps."""
    prompt, start = token_ids[5000:5450], token_ids[100:700]
    seen = []
    for step_tokens in (128 + 16, 4 * 128 + 16):
        options = SMALL | {
            "scorer": "snapkv",
            "profile": skewed_profile("snapkv"),
            "max_num_batched_tokens": step_tokens,
        }
        engine = make_engine(**options)
        assert engine.llm.llm_engine.reset_prefix_cache()
        steps = 0

        def before_step(step: int) -> None:
            nonlocal steps
            steps = step

        with recorded(engine, "probe") as kept:
            engine.add("other", start, 40)  # takes part of the first steps
            engine.add("probe", prompt, 8)
            answers = engine.run(before_step)
        (again,) = engine.ask([prompt], 8)
        assert again.cached == 3 * 128  # every whole chunk of a step is a checkpoint
        assert again.tokens == answers["probe"].tokens
        seen.append((kept, answers["probe"].tokens, answers["other"].tokens, steps))
    (one, tokens, others, many_steps), (several, *same, few_steps) = seen
    assert several == one
    assert len(one) == 30 * 4
    assert same == [tokens, others]
    assert few_steps == many_steps - 3  # the five chunks of the other prompt in two steps
