# SPDX-License-Identifier: Apache-2.0
"""Copies between pool and host memory that fail: sessions are forgotten, no answer changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.engine.drive import SMALL, Engine, PageAuditor, external_id
from tests.engine.test_sessions import CHUNK, assert_same, without_reuse
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_tangram.engine import scheduler as scheduler_module
from vllm_tangram.engine.check import PageCheck
from vllm_tangram.engine.host import HostBuffer, SpillingRunner
from vllm_tangram.engine.spill import COPIES, COPIES_FAILED, Copies, HostSpace

pytestmark = pytest.mark.engine


@pytest.fixture
def engine(
    make_engine: Callable[..., Engine],
    skewed_profile: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Engine:
    engine = make_engine(
        **{**SMALL, "kv_cache_memory_bytes": 20 << 20, "max_num_seqs": 6},
        scorer="keydiff",
        profile=skewed_profile("keydiff"),
        session_spill_gib=0.02,
    )
    assert engine.llm.llm_engine.reset_prefix_cache()
    sessions = engine.scheduler.pages.sessions
    monkeypatch.setattr(sessions, "host", HostSpace(engine.runner.host.pages.shape[0]))  # a test before gave it up
    monkeypatch.setattr(engine.scheduler, "check", PageCheck(engine.scheduler.pages))
    return engine


class Fault:
    """Copies in one direction fail, from now on; pages that they should fill get garbage."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, to_host: bool) -> None:
        self.failed, self.logged, self.running = 0, "", set[str]()
        run = HostBuffer.run

        def faulty(buffer: HostBuffer, copies: Copies) -> None:
            if all(direction != to_host for direction, _ in copies.runs):
                return run(buffer, copies)
            for direction, pairs in copies.runs:
                (buffer.pages if direction else buffer.pool)[list(pairs)] = 0x3F  # 0.747 as float32
            self.failed += 1
            self.running = {external_id(request.request_id) for request in engine.scheduler.running}
            raise RuntimeError("the bus is gone")

        def error(message: str, *args: object) -> None:
            assert not self.logged, "once is enough"
            self.logged = message % args

        monkeypatch.setattr(HostBuffer, "run", faulty)
        monkeypatch.setattr(scheduler_module.logger, "error", error)


def check_given_up(engine: Engine, fault: Fault) -> None:
    """Nothing is on the host, nothing is lost in the pool."""
    assert fault.failed
    assert "Restart the server" in fault.logged
    stats = engine.llm.tangram_stats()
    assert (stats["sessions_spilled"], stats["host_pages_in_use"], stats["pages_reclaimed"]) == (0, 0, 0)
    assert stats["pages_free"] == engine.free_pages == engine.total_pages
    assert not any(session["spilled_pages"] for session in engine.llm.tangram_sessions())


def test_pages_that_do_not_come_back(engine: Engine, token_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions share a document from the host, beside a request that decodes and one that samples; one has its only
    token in the step that fails, and one is aborted there.
    """
    document = token_ids[40_000 : 40_000 + 4 * CHUNK]
    prompts = {
        "decodes": token_ids[:8],
        "samples": token_ids[100:108],
        "asks": document + token_ids[60_000:60_020],
        "ends": document + token_ids[61_000:61_010],
        "goes": document + token_ids[62_000:62_015],
    }
    new = {name: 1 if name == "ends" else 24 for name in prompts}
    params = {"samples": {"temperature": 1.0, "seed": 5}}
    expected = {
        name: without_reuse(engine, prompt, new[name], **params.get(name, {})) for name, prompt in prompts.items()
    }
    fillers = [token_ids[start : start + 950] for start in (45_000, 47_000)]
    assert engine.llm.llm_engine.reset_prefix_cache()
    engine.ask([document + token_ids[:1]], 1)
    engine.ask(fillers, 2)
    [session] = [each for each in engine.llm.tangram_sessions() if each["tokens"] == 4 * CHUNK]
    assert session["spilled_pages"] > 0
    scheduler = engine.scheduler
    fault = Fault(engine, monkeypatch, to_host=False)
    auditor = PageAuditor(engine)
    for name in ("decodes", "samples"):
        engine.add(name, prompts[name], new[name], **params.get(name, {}))
    for _ in range(5):
        engine.step()
    before = engine.llm.tangram_stats()

    def arrive(step: int) -> None:
        if step == 0:
            for name in ("ends", "asks", "goes"):
                engine.add(name, prompts[name], new[name])
        if fault.failed and "goes" in prompts:
            del prompts["goes"]
            [gone] = [each for each in scheduler.requests if external_id(each) == "goes"]
            engine.llm.llm_engine.abort_request([gone], internal=True)

    answers = engine.run(arrive)
    assert fault.running == {"decodes", "samples", "asks", "ends", "goes"}
    assert answers.keys() == prompts.keys()
    for name in prompts:
        assert_same(answers[name], expected[name])
    assert (answers["asks"].cached, answers["ends"].cached) == (0, 0)
    check_given_up(engine, fault)
    stats = engine.llm.tangram_stats()
    assert stats["preemptions"] > before["preemptions"]

    copies = fault.failed
    [again] = engine.ask([prompts["asks"]], 24)
    assert again.cached == 4 * CHUNK, "the pool still has sessions"
    assert_same(again, expected["asks"])
    engine.ask(fillers, 2)
    auditor.check()
    [forgotten] = engine.ask([prompts["asks"]], 24)
    assert forgotten.cached < 4 * CHUNK, "and nothing but the pool"
    assert_same(forgotten, expected["asks"])
    assert fault.failed == copies
    assert engine.llm.tangram_stats()["sessions_restored"] == stats["sessions_restored"]
    check_given_up(engine, fault)


def test_pages_that_do_not_get_there(engine: Engine, token_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests run while sessions are copied out."""
    document = token_ids[40_000 : 40_000 + 4 * CHUNK]
    prompts = {
        "asks": document + token_ids[60_000:60_020],
        "long": token_ids[45_000 : 45_000 + 900],
        "longer": token_ids[47_000 : 47_000 + 950],
    }
    expected = {name: without_reuse(engine, prompt, 12) for name, prompt in prompts.items()}
    assert engine.llm.llm_engine.reset_prefix_cache()
    engine.ask([document + token_ids[:1], token_ids[70_000 : 70_000 + 900]], 1)
    fault = Fault(engine, monkeypatch, to_host=True)
    for name in ("long", "longer"):
        engine.add(name, prompts[name], 12)
    answers = engine.run()
    for name in ("long", "longer"):
        assert_same(answers[name], expected[name])
    check_given_up(engine, fault)
    [answer] = engine.ask([prompts["asks"]], 12)
    assert answer.cached == 0
    assert_same(answer, expected["asks"])


def test_results_that_come_later_are_marked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a CUDA runner; the empty output, which vLLM uses for all steps that have none, stays as it is."""

    class Later(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return EMPTY_MODEL_RUNNER_OUTPUT

    class Stock:
        def execute_model(self, scheduler_output: SchedulerOutput) -> None:
            return None

        def sample_tokens(self, grammar_output: None) -> Later:
            return Later()

    class Runner(SpillingRunner, Stock):
        host = engine.runner.host

    Fault(engine, monkeypatch, to_host=True)
    runner = Runner()
    for to_host, marked in ((False, False), (True, True), (None, False)):
        output, copies = SchedulerOutput.make_empty(), Copies()
        if to_host is not None:
            copies.add(to_host=to_host, pool_pages=[1], host_pages=[0])
            setattr(output, COPIES, copies)
        assert runner.execute_model(output) is None
        assert hasattr(runner.sample_tokens(None).get_output(), COPIES_FAILED) == marked
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, COPIES_FAILED)


def tokens_of(output: SchedulerOutput, prompt_lens: dict[str, int]) -> dict[str, list[int]]:
    """What a model says whose tokens are their own places in the answer."""
    cached = output.scheduled_cached_reqs
    starts = {new.req_id: (new.num_computed_tokens, 0) for new in output.scheduled_new_reqs}
    starts |= zip(cached.req_ids, zip(cached.num_computed_tokens, cached.num_output_tokens, strict=True), strict=True)
    tokens = {}
    for request_id, (computed, generated) in starts.items():
        done = computed + output.num_scheduled_tokens[request_id] >= prompt_lens[request_id] + generated
        tokens[request_id] = [generated] if done else []
    return tokens


@pytest.mark.parametrize("depth", [2, 3], ids=["two steps", "three steps"])
def test_nothing_of_steps_in_flight_counts(engine: Engine, depth: int) -> None:
    """Asynchronous scheduling, which no CPU worker does: the fault is known when later steps are planned or done.

    The pool is too small for the requests, so some are preempted between a step and its report.
    """
    core = engine.llm.llm_engine.engine_core.engine_core
    preempted = 0
    for fault_at in range(1, 60):
        scheduler: Any = scheduler_module.TangramAsyncScheduler(
            vllm_config=engine.llm.llm_engine.vllm_config,
            kv_cache_config=replace(engine.scheduler.kv_cache_config, num_blocks=180),
            structured_output_manager=core.structured_output_manager,
            block_size=engine.scheduler.block_size,
            hash_block_size=engine.scheduler.block_size,
            log_stats=True,
        )
        scheduler.check = PageCheck(scheduler.pages)
        prompt_lens = {str(number): 40 + 60 * number for number in range(5)}
        for request_id, length in prompt_lens.items():
            params = engine.sampling(40)
            prompt = [int(request_id)] * length
            scheduler.add_request(Request(request_id, prompt, params, None, block_hasher=core.request_block_hasher))
        answers: dict[str, list[int]] = {request_id: [] for request_id in prompt_lens}
        in_flight: deque[tuple[int, SchedulerOutput]] = deque()
        known = False
        for step in count():
            assert step < 1000
            if scheduler.has_requests():
                in_flight.append((-1 if known or step < fault_at else step, scheduler.schedule()))
            if len(in_flight) < depth and scheduler.has_requests():
                continue
            if not in_flight:
                break
            bad, output = in_flight.popleft()
            tokens = tokens_of(output, prompt_lens)
            if bad >= 0:  # planned after the fault, before it was known
                tokens = {request_id: [500] * len(some) for request_id, some in tokens.items()}
            names = list(tokens)
            report = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, list(tokens.values()))
            if bad == fault_at:
                known = True
                setattr(report, COPIES_FAILED, True)
                preempted += any(request.num_stale_output_tokens for request in scheduler.waiting)
            for each in scheduler.update_from_output(output, report).values():
                for delivered in each.outputs:
                    answers[delivered.request_id] += delivered.new_token_ids
        assert known
        assert all(tokens == list(range(40)) for tokens in answers.values()), answers
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 179
        assert scheduler.pages.sessions.host.capacity == 0
    assert preempted, "no request was preempted between a step and its report"
