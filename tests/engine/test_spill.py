# SPDX-License-Identifier: Apache-2.0
"""Host memory for sessions: buffer and copies, what travels to workers, and conversations that come back from it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from random import Random

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.engine.drive import SMALL, Engine
from tests.engine.test_sessions import CHUNK, assert_same, without_reuse
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_tangram.engine import host as host_module
from vllm_tangram.engine.host import HostBuffer
from vllm_tangram.engine.spill import COPIES, Copies, HostSpace
from vllm_tangram.errors import TangramError

PAGE_BYTES = 24
GIB = 0.02  # about three conversations of 900 tokens at 0.25


@pytest.mark.parametrize("seed", range(20))
def test_copies_are_done_as_if_one_after_the_other(seed: int) -> None:
    check_copies(seed, torch.device("cpu"))


def check_copies(seed: int, device: torch.device) -> None:
    """Pages are read, written and read again, in both directions."""
    random = Random(seed)
    pool = torch.randint(0, 255, (8, PAGE_BYTES), dtype=torch.uint8, device=device)
    buffer, copies = HostBuffer(pool, 5), Copies()
    buffer.pages.random_(0, 255)
    expected = {False: pool.clone(), True: buffer.pages.clone()}
    for _ in range(30):
        to_host, count = random.random() < 0.5, random.randrange(1, 4)
        pool_pages, host_pages = random.sample(range(8), count), random.sample(range(5), count)
        copies.add(to_host=to_host, pool_pages=pool_pages, host_pages=host_pages)
        for page, host_page in zip(pool_pages, host_pages, strict=True):
            if to_host:
                expected[True][host_page] = expected[False][page].cpu()
            else:
                expected[False][page] = expected[True][host_page].to(device)
    buffer.run(copies)
    assert torch.equal(pool, expected[False])  # on CUDA it waits for the copies
    assert torch.equal(buffer.pages, expected[True])


def test_copies_reach_workers_in_other_processes() -> None:
    output, copies = SchedulerOutput.make_empty(), Copies()
    copies.add(to_host=True, pool_pages=[3, 4], host_pages=[0, 1])
    setattr(output, COPIES, copies)
    assert getattr(pickle.loads(pickle.dumps(output)), COPIES) == copies
    assert not Copies()


def test_room_on_the_host() -> None:
    space = HostSpace(10)
    keys = [(bytes([number]), 0.25) for number in range(4)]
    first, second, third, fourth = keys
    assert len({*space.put(first, 4), *space.put(second, 3), *space.put(third, 2)}) == space.num_used == 9
    assert space.next_victim(1, ()) is None
    assert space.next_victim(2, ()) == first
    assert space.next_victim(2, [first]) == second
    space.renew(first)
    assert space.next_victim(2, ()) == second
    assert space.fits(6, [first])
    assert not space.fits(7, [first, fourth])
    space.discard(second)
    assert (space.num_used, len(space), second in space) == (6, 2, False)
    space.clear()
    assert (space.num_used, len(space)) == (0, 0)
    assert sorted(space.put(fourth, 10)) == list(range(10))


def test_memory_that_cannot_be_had() -> None:
    with pytest.raises(TangramError, match=r"--session-spill-gib: 3221225472\.00 GiB .* cannot be allocated"):
        HostBuffer(torch.empty(1, 3 << 20, dtype=torch.uint8), 1 << 40)


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "get_cgroup_memory_limit", lambda: 5000)
    monkeypatch.setattr(host_module, "get_cgroup_memory_usage", lambda: 3000)
    assert host_module._available_bytes() == 2000
    monkeypatch.setattr(host_module, "get_cgroup_memory_limit", lambda: None)
    assert host_module._available_bytes() > 1 << 20


@pytest.fixture
def engine(make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str]) -> Engine:
    engine = make_engine(
        **{**SMALL, "kv_cache_memory_bytes": 14 << 20, "max_num_seqs": 6},
        scorer="keydiff",
        profile=skewed_profile("keydiff"),
        session_spill_gib=GIB,
    )
    assert engine.llm.llm_engine.reset_prefix_cache()
    return engine


@pytest.mark.engine
def test_a_conversation_comes_back_from_the_host(engine: Engine, token_ids: list[int]) -> None:
    """Its pages were handed out to others; its next turn begins with them all the same, and answers the same."""
    first = token_ids[40_000 : 40_000 + 5 * CHUNK + 30]
    [answer] = engine.ask([first], 8)
    before = engine.llm.tangram_stats()
    assert (before["sessions_spilled"], before["host_pages_in_use"]) == (0, 0)
    [session] = engine.llm.tangram_sessions()
    assert (session["tokens"], session["spilled_pages"]) == (5 * CHUNK, 0)
    engine.ask([token_ids[45_000 : 45_000 + 900], token_ids[47_000 : 47_000 + 900]], 2)
    spilled = engine.llm.tangram_stats()
    assert spilled["sessions_spilled"] >= 5
    assert spilled["sessions_evicted"] == before["sessions_evicted"]
    [session] = [each for each in engine.llm.tangram_sessions() if each["tokens"] == 5 * CHUNK]
    assert session["spilled_pages"] == session["pages"] <= spilled["host_pages_in_use"]

    prompt = first + answer.tokens + token_ids[50_000:50_020]
    [again] = engine.ask([prompt], 8)
    assert again.cached == 5 * CHUNK
    assert_same(again, without_reuse(engine, prompt, 8))
    assert engine.llm.tangram_stats()["sessions_restored"] == before["sessions_restored"] + 1

    engine.ask([token_ids[45_000 : 45_000 + 900]], 2)
    assert engine.llm.tangram_drop_sessions() > 0
    [forgotten] = engine.ask([prompt], 8)
    assert forgotten.cached == 0
    assert_same(forgotten, again)
    assert engine.scheduler.pages.sessions.host.num_used == 0


@pytest.mark.engine
def test_two_questions_about_a_document_on_the_host_share_its_pages(engine: Engine, token_ids: list[int]) -> None:
    """Asked in one step: it is copied back once."""
    document = token_ids[52_000 : 52_000 + 4 * CHUNK]
    engine.ask([document + token_ids[:1]], 1)
    engine.ask([token_ids[45_000 : 45_000 + 900], token_ids[47_000 : 47_000 + 900]], 2)
    sessions = engine.scheduler.pages.sessions
    restored, reused = sessions.restored, sessions.reused
    questions = [document + token_ids[60_000 + 50 * i : 60_040 + 50 * i] for i in range(2)]
    for name, question in zip("ab", questions, strict=True):
        engine.add(name, question, 8)
    engine.step()
    assert (sessions.restored, sessions.reused) == (restored + 1, reused + 2)
    first, second = (
        [block.block_id for block in blocks] for blocks in engine.scheduler.pages.req_to_blocks.values() if blocks
    )
    shared = engine.scheduler.plan.schedule(0.25).num_pages(len(document), len(questions[0]))
    assert first[:shared] == second[:shared]
    answers = engine.run()
    for name, question in zip("ab", questions, strict=True):
        assert_same(answers[name], without_reuse(engine, question, 8))
