# SPDX-License-Identifier: Apache-2.0
"""Pages are exact at every step, whatever arrives, leaves, is aborted or preempted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.drive import SMALL, Engine, PageAuditor

pytestmark = pytest.mark.engine


def ours(make_engine: Callable[..., Engine], profile: str, **options: Any) -> Engine:
    return make_engine(**{**SMALL, "scorer": "snapkv", "profile": profile, **options})


def test_mixed_run(
    make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str], token_ids: list[int]
) -> None:
    """Requests of many lengths and retentions arrive at random, some are aborted; pages are checked at every step."""
    engine = ours(make_engine, skewed_profile("snapkv"))
    auditor = PageAuditor(engine)
    rng = random.Random(3)
    arrivals = sorted(rng.randrange(60) for _ in range(24))
    aborted = 0
    live: list[str] = []

    def before_step(step: int) -> None:
        nonlocal aborted
        auditor.check()
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            length = rng.choice([1, 2, 17, 32, 100, 128, 129, 300, 512, 700, 900])
            start = rng.randrange(1000)
            name = f"r{step}x{len(arrivals)}"
            live.append(name)
            engine.add(
                name,
                token_ids[start : start + length],
                rng.choice([1, 5, 40, 90]),
                retention=rng.choice([None, 0.05, 0.1, 0.5, 0.75, 1.0]),
            )
        if step % 7 == 6 and live:
            name = live.pop(rng.randrange(len(live)))
            if name not in engine.answers:
                internal = [r for r in engine.scheduler.requests if r.startswith(name)]
                engine.llm.llm_engine.abort_request([name])
                aborted += bool(internal)

    engine.run(before_step, more_to_come=lambda: bool(arrivals))
    auditor.check()
    assert auditor.checked > 200
    assert aborted >= 2
    assert engine.free_pages == engine.total_pages
    assert not engine.scheduler.pages.budgets


def test_no_reinflation(
    make_engine: Callable[..., Engine],
    skewed_profile: Callable[[str], str],
    token_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After N decoded tokens a request holds the pages of its compressed prompt and of N tokens, no more.

    And vLLM's way to new pages is only gone where a block begins.
    """
    engine = ours(make_engine, skewed_profile("snapkv"))
    prompt, new = 640, 200
    allocate, allocated = engine.scheduler._allocate_pages, list[int]()

    def allocate_pages(request: Any, *args: Any, **kwargs: Any) -> Any:
        allocated.append(request.num_computed_tokens)
        return allocate(request, *args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "_allocate_pages", allocate_pages)
    engine.add("long", token_ids[:prompt], new)
    seen = []

    def before_step(step: int) -> None:
        (request,) = engine.scheduler.requests.values() if engine.scheduler.requests else (None,)
        if request is not None and request.num_computed_tokens >= prompt:
            seen.append((request.num_computed_tokens, engine.total_pages - engine.free_pages))

    engine.run(before_step)
    plan = engine.scheduler.plan
    at_prompt = plan.schedule(0.25).num_pages(prompt, prompt)
    assert seen[0] == (prompt, at_prompt)
    for tokens, pages in seen:
        assert pages == at_prompt + plan.num_groups * (-(-tokens // 32) - prompt // 32)
    assert [tokens for tokens in allocated if tokens >= prompt] == list(range(prompt, prompt + new - 1, 32))
    assert len(seen) == new - 1  # the last token is sampled, not stored
    assert seen[-1][1] < 0.6 * plan.full_pages(prompt + new)


def test_preempted_requests_answer_the_same(
    make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str], token_ids: list[int]
) -> None:
    prompts = [token_ids[400 * i : 400 * i + 90 + 6 * i] for i in range(12)]
    roomy = ours(make_engine, skewed_profile("snapkv"))
    expected = roomy.ask(prompts, 100)
    assert roomy.scheduler.num_preemptions == 0

    tight = ours(make_engine, skewed_profile("snapkv"), num_gpu_blocks_override=330)
    auditor = PageAuditor(tight)
    for number, prompt in enumerate(prompts):
        tight.add(str(number), prompt, 100)
    answers = tight.run(lambda step: auditor.check())
    assert tight.scheduler.num_preemptions >= 5
    for number, theirs in enumerate(expected):
        mine = answers[str(number)]
        assert mine.tokens == theirs.tokens
        assert len(mine.tokens) == 100
        assert mine.finish_reason == "length"
    assert tight.free_pages == tight.total_pages
    assert tight.llm.tangram_stats()["preemptions"] == tight.scheduler.num_preemptions


def test_a_request_that_outgrows_the_pool_alone_ends_with_what_fits(
    make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str], token_ids: list[int]
) -> None:
    tight = ours(make_engine, skewed_profile("snapkv"), num_gpu_blocks_override=330)
    (answer,) = tight.ask([token_ids[:500]], 500)
    plan = tight.scheduler.plan
    longest = plan.schedule(0.25).max_tokens_within(500, tight.total_pages)
    assert answer.finish_reason == "length"
    assert len(answer.tokens) == longest - 500 + 1 < 500


@pytest.mark.parametrize("retention", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("length", [1, 2])
def test_tiny_prompts(
    retention: float,
    length: int,
    make_engine: Callable[..., Engine],
    skewed_profile: Callable[[str], str],
    token_ids: list[int],
) -> None:
    engine = ours(make_engine, skewed_profile("snapkv"))
    (answer,) = engine.ask([token_ids[:length]], 3, retention=retention)
    (full,) = engine.ask([token_ids[:length]], 3, retention=1.0)
    assert answer.tokens == full.tokens


def test_stats_are_those_of_the_pool(
    make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str], token_ids: list[int]
) -> None:
    engine = ours(make_engine, skewed_profile("snapkv"))
    engine.add("a", token_ids[:600], 30)
    for _ in range(8):
        engine.step()
    stats = engine.llm.tangram_stats()
    assert stats["pages_in_use"] == engine.total_pages - engine.free_pages == stats["pages_held"] == stats["pages_kept"]
    assert stats["pages_free"] == engine.free_pages
    plan = engine.scheduler.plan
    assert stats["kv_retained_fraction"] == pytest.approx(stats["pages_held"] / plan.full_pages(604), abs=0.02)
    assert 0.2 < stats["kv_retained_fraction"] < 0.45
    engine.run()
    assert engine.llm.tangram_stats()["pages_in_use"] == 0


def test_no_kernel_is_compiled_while_serving(
    make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str], token_ids: list[int]
) -> None:
    """The engine's start compiled every variant that serving calls."""
    from vllm_tangram.pages import kernels

    names = ("ingest_pages", "group_lengths", "member_blocks", "member_slots", "decode_slots")
    engine = ours(make_engine, skewed_profile("snapkv"))
    compiled = {name: list(getattr(kernels, name).signatures) for name in names}
    engine.ask([token_ids[:300], token_ids[:20]], 3)
    assert {name: list(getattr(kernels, name).signatures) for name in names} == compiled


def test_seeded_sampling_does_not_depend_on_chunks_or_preemptions(
    make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str], token_ids: list[int]
) -> None:
    """vLLM takes the draw of a half-computed prompt back; its own way of doing so ends the process on the CPU."""

    def ask(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, 40, temperature=1.0, seed=number)
        answers = engine.run()
        return [answers[str(number)].tokens for number in range(len(prompts))]

    prompts = [token_ids[300 * i : 300 * i + length] for i, length in enumerate((100, 300, 260, 390, 150, 210))]
    roomy = ours(make_engine, skewed_profile("snapkv"))
    together = ask(roomy, prompts)
    assert ask(roomy, prompts) == together
    assert len({tuple(tokens) for tokens in together}) == len(prompts)

    tight = ours(make_engine, skewed_profile("snapkv"), num_gpu_blocks_override=330)
    before = tight.scheduler.num_preemptions
    assert ask(tight, prompts) == together
    assert tight.scheduler.num_preemptions > before
