# SPDX-License-Identifier: Apache-2.0
"""Compressed prefixes are found again, shared and evicted, and never change an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Any

import pytest
from tests.engine.drive import SMALL, Answer, Engine, PageAuditor

from vllm_tangram.errors import TangramError

pytestmark = pytest.mark.engine

CHUNK = SMALL["chunk_size"]
_salts = count()

Start = Callable[..., Engine]


@pytest.fixture
def start(make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str]) -> Start:
    def engine(scorer: str = "snapkv", **options: object) -> Engine:
        started = make_engine(**{**SMALL, "scorer": scorer, "profile": skewed_profile(scorer), **options})
        started.llm.reset_prefix_cache()  # other tests ask the same engine about the same text
        return started

    return engine


def hits(engine: Engine) -> int:
    return int(engine.scheduler.pages.sessions.reused)


def without_reuse(engine: Engine, prompt: Sequence[int], max_tokens: int, **params: Any) -> Answer:
    """A salt of its own hides the prompt from all that ran before."""
    before = hits(engine)
    prompts = {"prompt_token_ids": list(prompt), "cache_salt": f"nobody else's {next(_salts)}"}
    engine.llm.llm_engine.add_request("alone", prompts, engine.sampling(max_tokens, **params))
    answer = engine.run()["alone"]
    assert hits(engine) == before
    return answer


def assert_same(answer: Answer, expected: Answer) -> None:
    assert answer.tokens == expected.tokens
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)  # a batch rounds differently


@pytest.mark.parametrize("scorer", ["snapkv", "keydiff", "knorm", "streaming"])
def test_a_conversation_of_six_turns_is_the_same_as_without_reuse(
    scorer: str, start: Start, token_ids: list[int]
) -> None:
    """Answers become part of the next prompt; a turn computes only what whole chunks of the turns before leave over."""
    engine = start(scorer)
    history = token_ids[:300]
    before, known = hits(engine), 0
    for turn in range(6):
        prompt = history + token_ids[1000 + 90 * turn : 1090 + 90 * turn]
        [ours] = engine.ask([prompt], 20)
        assert hits(engine) == before + turn
        assert ours.cached == known // CHUNK * CHUNK
        assert ours.created == len(prompt) // CHUNK * CHUNK - ours.cached
        assert_same(ours, without_reuse(engine, prompt, 20))
        history, known = prompt + ours.tokens, len(prompt)


def test_thirty_turns_hold_what_was_promised_of_all_their_tokens(start: Start, token_ids: list[int]) -> None:
    """docs/design.md, "The promise", with the engine's own figures, when a turn's prompt has been compressed.

    Every turn adds a block, 24 tokens of text and 8 of answer; every fourth prompt ends with a chunk. At a retention of
    0.5, for at 0.25 the windows of such small chunks alone are what is held.
    """
    engine = start("keydiff")
    retention, members, block, group_size = 0.5, 30 * 3, 32, 4
    slack = engine.scheduler.plan.num_groups * group_size * 2 * block  # a window and a partial block of every head
    prompt = token_ids[50_000 : 50_000 + block]
    shares = []
    for turn in range(1, 31):
        assert len(prompt) == turn * block
        engine.add("turn", prompt, 8, retention=retention)
        computed = 0
        while computed < len(prompt):
            engine.step()
            [request] = engine.scheduler.requests.values()
            computed = request.num_computed_tokens
        held = engine.llm.tangram_stats()["pages_held"] * group_size * block
        full = members * len(prompt)
        assert held <= retention * full + slack
        if len(prompt) % CHUNK == 0:
            shares.append(held / full)
        answer = engine.run()["turn"]
        assert answer.cached == (len(prompt) - block) // CHUNK * CHUNK
        if turn % 10 == 0:
            assert_same(answer, without_reuse(engine, prompt, 8, extra_args={"retention": retention}))
        first = 60_000 + 100 * turn
        prompt = prompt + answer.tokens + token_ids[first : first + block - 8]
    assert len(shares) == 7
    assert max(shares) <= retention
    assert shares[-1] > 0.95 * retention, "and what may be held is held"


def test_forks_share_what_they_have_in_common(start: Start, token_ids: list[int]) -> None:
    """Two questions about one document, asked together after a third: the document is held once."""
    engine = start()
    document = token_ids[5000 : 5000 + 4 * CHUNK]
    first, *forks = [document + token_ids[7000 + 50 * i : 7040 + 50 * i] for i in range(3)]
    engine.ask([first], 8)
    auditor = PageAuditor(engine)
    before = hits(engine)
    for name, prompt in zip("ab", forks, strict=True):
        engine.add(name, prompt, 8)
    most = 0

    def look(_: int) -> None:
        nonlocal most
        auditor.check()
        most = max(most, sum(block.ref_cnt == 2 for block in engine.scheduler.kv_cache_manager.block_pool.blocks))

    answers = engine.run(look)
    assert hits(engine) == before + 2
    assert most == engine.scheduler.plan.schedule(0.25).num_pages(4 * CHUNK, len(first))
    for name, prompt in zip("ab", forks, strict=True):
        assert_same(answers[name], without_reuse(engine, prompt, 8))


def test_a_running_request_shares_what_it_has_computed(start: Start, token_ids: list[int]) -> None:
    engine = start()
    prompt = token_ids[9000 : 9000 + 3 * CHUNK + 5]
    before = hits(engine)
    engine.add("first", prompt, 100)
    for _ in range(5):
        engine.step()
    engine.add("second", prompt, 10)
    answers = engine.run()
    assert hits(engine) == before + 1
    assert answers["second"].tokens == answers["first"].tokens[:10]


def test_another_salt_or_retention_or_prefix_is_no_hit(start: Start, token_ids: list[int]) -> None:
    engine = start()
    prompt = token_ids[20000 : 20000 + 3 * CHUNK + 10]
    engine.ask([prompt], 2)
    before = hits(engine)
    engine.ask([prompt], 2, retention=0.5)
    engine.ask([[*prompt[:5], prompt[5] + 1, *prompt[6:]]], 2)
    without_reuse(engine, prompt, 2)
    assert hits(engine) == before
    engine.ask([prompt], 2)
    engine.ask([prompt], 2, retention=0.5)
    assert hits(engine) == before + 2
    engine.ask([prompt[: 2 * CHUNK]], 2)  # one token must be left to compute: only the first chunk is taken over
    assert hits(engine) == before + 3


def test_sessions_are_listed_counted_and_dropped(start: Start, token_ids: list[int]) -> None:
    engine = start()
    assert engine.llm.llm_engine.reset_prefix_cache()
    assert engine.llm.tangram_sessions() == []
    document = token_ids[30000 : 30000 + 2 * CHUNK]
    first, second = [document + token_ids[7000 + 500 * i : 7000 + 500 * i + CHUNK + 40] for i in range(2)]
    before = engine.llm.tangram_stats()
    engine.ask([first], 2)
    engine.ask([second], 2)
    stats = engine.llm.tangram_stats()
    assert stats["sessions"] == 4
    assert stats["sessions_reused"] == before["sessions_reused"] + 1
    assert stats["sessions_evicted"] == before["sessions_evicted"]
    last, other = engine.llm.tangram_sessions()
    pages = engine.scheduler.plan.schedule(0.25).num_pages(3 * CHUNK, len(first))
    for session in (last, other):
        assert (session["tokens"], session["retention"], session["hits"]) == (3 * CHUNK, 0.25, 1)
        assert (session["pages"], session["bytes"]) == (pages, pages * stats["page_bytes"])
    assert 0 <= last["idle_seconds"] < other["idle_seconds"]

    with pytest.raises(TangramError, match="there is no session 0123456789abcdef"):
        engine.llm.tangram_drop_sessions([last["id"], "0123456789abcdef"])
    with pytest.raises(TangramError, match="takes a list of ids"):
        engine.llm.tangram_drop_sessions(last["id"])
    assert len(engine.llm.tangram_sessions()) == 2
    assert engine.llm.tangram_drop_sessions([last["id"]]) == 1
    assert engine.ask([second], 2)[0].cached == 2 * CHUNK, "the other document begins with it, too"
    assert engine.ask([first], 2)[0].cached == 3 * CHUNK
    engine.add("running", first, 5)
    engine.step()
    assert engine.llm.tangram_drop_sessions() == 2
    assert engine.llm.tangram_sessions() == []
    running = engine.run()["running"]
    assert running.cached == 3 * CHUNK
    again = engine.ask([first], 5)[0]
    assert again.cached == 0
    assert_same(again, running)
    assert len(engine.llm.tangram_sessions()) == 1
    assert engine.llm.llm_engine.reset_prefix_cache()
    assert engine.llm.tangram_sessions() == []


def test_an_engine_without_prefix_caching_has_no_sessions(start: Start) -> None:
    engine = start(enable_prefix_caching=False)
    for call in (engine.llm.tangram_sessions, engine.llm.tangram_drop_sessions):
        with pytest.raises(TangramError, match="enable_prefix_caching=False"):
            call()


@pytest.mark.parametrize("spill", [{}, {"session_spill_gib": 0.02}], ids=["", "host"])
def test_turns_forks_and_aborts_in_a_pool_that_is_too_small(
    spill: dict[str, float], start: Start, token_ids: list[int]
) -> None:
    """Random traffic with preemptions and evictions: page counts are exact after every step and answers are right."""
    engine = start("keydiff", kv_cache_memory_bytes=14 << 20, max_num_seqs=6, **spill)
    random = Random(4)
    auditor = PageAuditor(engine)
    prompts: dict[str, list[int]] = {}
    histories = [token_ids[3000 * i : 3000 * i + random.randrange(100, 500)] for i in range(5)]

    def before_step(step: int) -> None:
        if len(prompts) < 50 and random.random() < 0.4:
            number = random.randrange(len(histories))
            name, start = f"{number}.{step}", random.randrange(len(token_ids) - 100)
            prompts[name] = (histories[number] + token_ids[start : start + random.randrange(1, 100)])[:900]
            if random.random() < 0.5:
                histories[number] = prompts[name]
            engine.add(name, prompts[name], random.randrange(1, 40))
        if random.random() < 0.03 and prompts:
            engine.llm.llm_engine.abort_request([random.choice(list(prompts))])
        auditor.check()

    answers = engine.run(before_step, more_to_come=lambda: len(prompts) < 50)
    auditor.check()
    assert engine.free_pages == engine.total_pages
    sessions = engine.scheduler.pages.sessions
    assert engine.scheduler.num_preemptions > 0
    assert sessions.evicted > 0
    assert hits(engine) > 10
    assert sessions.restored > 3 if spill else sessions.restored == 0
    for name in random.sample(sorted(answers), 6):
        assert_same(answers[name], without_reuse(engine, prompts[name], len(answers[name].tokens)))
    assert engine.llm.llm_engine.reset_prefix_cache()
    assert len(sessions) == 0
    assert engine.ask([prompts[name]], 1)[0].tokens == answers[name].tokens[:1]
