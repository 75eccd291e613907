# SPDX-License-Identifier: Apache-2.0
"""Sessions over vLLM's own page pool, without an engine: random traffic, every page labelled with what it holds.

A page's label says which tokens it was computed from. In every step each request must find, when its forward begins,
pages whose labels are those of its own prefix, whatever was finished, evicted, copied to the host and back, aborted,
preempted or shared in between.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.budget.strategies import Case, skewed_curve
from vllm.v1.core.block_pool import BlockPool

from vllm_tangram.budget import EvictionSchedule, group_members
from vllm_tangram.engine.check import PageCheck
from vllm_tangram.engine.manager import HeadGroupManager, RequestBudget
from vllm_tangram.engine.sessions import SessionCache

BLOCK, CHUNK, PAGES = 16, 32, 90
Label = tuple[tuple[int, ...], float, int]


def schedule(retention: float) -> EvictionSchedule:
    curve = skewed_curve(6)
    groups = group_members(curve.at(0.4), (3, 2), 2, "global")
    return Case(curve, groups, retention, BLOCK, CHUNK // BLOCK, sinks=2, window=5, n_max=16).build()


SCHEDULES = {retention: schedule(retention) for retention in (0.3, 0.6)}


class Traffic(RuleBasedStateMachine):
    """The scheduler's part: admission, steps of whole chunks, decode, preemption, end; and the worker's: what is where.

    A step is planned for all requests and then executed: copies in their order, the forward's reads, its writes.
    """

    host_pages = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(PAGES, enable_caching=True, hash_block_size=BLOCK)
        spec = SimpleNamespace(block_size=BLOCK, dcp_sharded=False)
        self.manager = HeadGroupManager(spec, self.pool, True, 0, BLOCK)
        self.manager.sessions = self.new_sessions()
        self.check = PageCheck(self.manager)
        self.memory: dict[int, Label] = {}
        self.host_memory: dict[int, Label] = {}
        self.running: dict[str, Any] = {}
        self.waiting: list[Any] = []
        self.prompts: list[tuple[int, ...]] = [()]
        self.number = 0
        self.spared = 0

    def new_sessions(self) -> SessionCache:
        return SessionCache(host_pages=self.host_pages)

    @precondition(lambda self: len(self.waiting) < 4)
    @rule(
        seed=st.integers(0, 2**32 - 1),
        retention=st.sampled_from(sorted(SCHEDULES)),
        new=st.integers(1, 90),
        out=st.integers(0, 20),
        fork=st.booleans(),
    )
    def submit(self, seed: int, retention: float, new: int, out: int, fork: bool) -> None:
        """A prompt that extends, or forks from, one that was there before."""
        random = Random(seed)
        base = random.choice(self.prompts[-12:])
        base = base[: random.randrange(len(base) + 1)] if fork or len(base) > 200 else base
        prompt = (*base, *(random.randrange(3) for _ in range(new)))[:250]
        self.number += 1
        request = SimpleNamespace(
            request_id=str(self.number),
            prompt=prompt,
            num_tokens=len(prompt),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            num_preemptions=0,
            length=len(prompt) + out,
            block_hashes=[repr(prompt[: end + BLOCK]).encode() for end in range(0, len(prompt) - BLOCK + 1, BLOCK)],
        )
        self.manager.announce(request.request_id, RequestBudget(len(prompt), SCHEDULES[retention], retention, CHUNK))
        self.waiting.append(request)
        self.prompts.append(prompt)

    @precondition(lambda self: self.running or self.waiting)
    @rule(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 8))
    def steps(self, seed: int, count: int) -> None:
        random = Random(seed)
        for _ in range(count):
            self.step(random)

    @precondition(lambda self: self.running or self.waiting)
    @rule(seed=st.integers(0, 2**32 - 1))
    def abort(self, seed: int) -> None:
        requests = [*self.running.values(), *self.waiting]
        self.end(requests[seed % len(requests)])

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()
        self.manager.sessions.clear()

    def step(self, random: Random) -> None:
        planned: dict[str, tuple[Any, int]] = {}
        preempted = False
        for request in list(self.running.values()):
            if request.request_id not in self.running or random.random() < 0.2:  # preempted, or no tokens left for it
                continue
            t, prompt_len = request.num_computed_tokens, len(request.prompt)
            end = self.chunk_end(request, t, random.randint(1, 3)) if t < prompt_len else t + 1
            while self.need(request, end, []) > self.pool.get_num_free_blocks():
                preempted = True
                victim = self.running[random.choice(sorted(self.running))]  # perhaps one that is planned already
                planned.pop(victim.request_id, None)
                self.preempt(victim)
                if victim is request:
                    break
            else:
                planned[request.request_id] = request, self.allocate(request, end)
        while not preempted and self.waiting and len(self.running) < 4:
            request = self.waiting[0]
            first = self.admit(request, random.randint(1, 3))
            if first is None:
                break
            self.running[request.request_id] = self.waiting.pop(0)
            planned[request.request_id] = request, first
        self.execute(planned)
        for request, _ in planned.values():
            if request.num_computed_tokens >= request.length:
                self.end(request)

    def admit(self, request: Any, chunks: int) -> int | None:
        """How many pages it begins with; None: it does not fit."""
        found = self.manager.find(request)
        pages = found.pages if found else []
        taken = self.manager.budgets[request.request_id].pages(request.num_tokens) - sum(p.ref_cnt > 0 for p in pages)
        assert self.need(request, request.num_tokens, pages) == taken, "held by nobody, the hit's own included"
        if self.need(request, request.num_tokens, pages, admission=True) > self.pool.get_num_free_blocks():
            return None
        request.admitted = request.num_tokens
        begun = 0
        if found:
            assert 0 < found.tokens < request.num_tokens
            self.manager.add_local_computed_blocks(request.request_id, pages, found.tokens, 0)
            begun = found.tokens
        if begun < len(request.prompt):
            self.allocate(request, self.chunk_end(request, begun, chunks))
        else:  # it was preempted
            self.allocate(request, begun + 1)
        request.num_computed_tokens = begun
        return self.manager.budgets[request.request_id].pages(begun)

    def chunk_end(self, request: Any, t: int, chunks: int) -> int:
        return int(min((t // CHUNK + chunks) * CHUNK, len(request.prompt)))

    def need(self, request: Any, tokens: int, pages: list[Any], *, admission: bool = False) -> int:
        return self.manager.get_num_blocks_to_allocate(
            request.request_id, tokens, pages, 0, 0, tokens, apply_admission_cap=admission
        )

    def allocate(self, request: Any, end: int) -> int:
        """Give it the pages of its next tokens; how many it had."""
        before = len(self.manager.req_to_blocks[request.request_id])
        need = self.need(request, end, [])
        if self.manager.stays_in_block(request, end - request.num_computed_tokens):  # then nobody calls what follows
            known = self.manager.sessions.checkpoints()
            self.manager.remember(request)
            assert (need, known) == (0, self.manager.sessions.checkpoints())
            self.spared += 1
            request.end = end
            return before
        assert len(self.manager.allocate_new_blocks(request.request_id, end, end)) == need
        self.manager.cache_blocks(request, end)
        request.end = end
        return before

    def preempt(self, request: Any) -> None:
        del self.running[request.request_id]
        self.manager.leave(request)
        self.manager.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def end(self, request: Any) -> None:
        """Done, or aborted."""
        if self.running.pop(request.request_id, None):
            self.manager.leave(request)
            self.manager.free(request.request_id)
        else:
            self.waiting.remove(request)
        self.manager.withdraw(request.request_id)

    def execute(self, planned: dict[str, tuple[Any, int]]) -> None:
        for to_host, pairs in self.manager.sessions.take_copies().runs:
            target, source = (self.host_memory, self.memory) if to_host else (self.memory, self.host_memory)
            target.update({to: source[of] for to, of in pairs.items()})
        for request, _ in planned.values():
            pages, budget = self.manager.req_to_blocks[request.request_id], self.manager.budgets[request.request_id]
            for tokens in budget.boundaries(request.num_computed_tokens):
                first = budget.pages(tokens - CHUNK)
                for index in range(first, budget.pages(tokens)):
                    assert self.memory[pages[index].block_id] == (request.prompt[:tokens], budget.retention, index)
        for request, before in planned.values():
            pages, budget = self.manager.req_to_blocks[request.request_id], self.manager.budgets[request.request_id]
            assert before == budget.pages(request.num_computed_tokens)
            t = request.num_computed_tokens
            while t < request.end:
                end = self.chunk_end(request, t, 1) if t < len(request.prompt) else request.end
                tokens = request.prompt[:end] if end <= len(request.prompt) else (*request.prompt, -1)
                for index in range(budget.pages(t), budget.pages(end)):
                    self.memory[pages[index].block_id] = tokens, budget.retention, index
                t = end
            request.num_computed_tokens = request.end
            request.num_tokens = max(request.num_tokens, request.end)

    @invariant()
    def pages_are_counted(self) -> None:
        held = [block.block_id for blocks in self.manager.req_to_blocks.values() for block in blocks]
        counts = np.bincount(held, minlength=PAGES)
        assert [block.ref_cnt for block in self.pool.blocks[1:]] == counts[1:].tolist()
        assert self.pool.get_num_free_blocks() == PAGES - 1 - len(set(held))
        committed = 0
        for request_id, request in self.running.items():
            pages = self.manager.budgets[request_id].pages
            assert len(self.manager.req_to_blocks[request_id]) == pages(request.num_computed_tokens)
            committed += max(pages(request.admitted) - pages(request.num_computed_tokens), 0)
        assert self.manager.committed_pages() == committed

    def requests(self) -> dict[str, Any]:
        return {request.request_id: request for request in [*self.running.values(), *self.waiting]}

    @invariant()
    def nothing_is_found_wrong(self) -> None:
        """What servers check with TANGRAM_CHECK=1 is true, whatever happens."""
        self.check.run(self.requests())

    @invariant()
    def checkpoints_are_whole(self) -> None:
        """The order of vLLM's free queue hands out a checkpoint's last page first."""
        free = {block.block_id: place for place, block in enumerate(self.pool.free_block_queue.get_all_free_blocks())}
        for checkpoint in self.manager.sessions.checkpoints():
            if checkpoint.in_pool:
                places = [free.get(page.block_id, PAGES) for page in checkpoint.pages[: checkpoint.num_pages]]
                assert min(places) == places[-1]

    @invariant()
    def copies_are_right(self) -> None:
        """What is on the host alone can be used; a host page is one state's; it holds what its state computed."""
        sessions = self.manager.sessions
        known = {checkpoint.key: checkpoint for checkpoint in sessions.checkpoints()}
        copies = [checkpoint for checkpoint in known.values() if checkpoint.key in sessions.host]
        assert len(copies) == len(sessions.host)
        used = [page for checkpoint in copies for page in sessions.host.pages_of(checkpoint.key)]
        assert len(used) == len(set(used)) == sessions.host.num_used <= self.host_pages
        for (prefix, retention), checkpoint in known.items():
            if not checkpoint.in_pool:
                assert checkpoint in copies
                assert checkpoint.parent is None or checkpoint.parent in known
            if checkpoint in copies:
                own = range(checkpoint.inherited, checkpoint.num_pages)
                for index, page in zip(own, sessions.host.pages_of(checkpoint.key), strict=True):
                    assert repr(self.host_memory[page][0]).encode() == prefix
                    assert self.host_memory[page][1:] == (retention, index)


Traffic.TestCase.settings = settings(max_examples=50, stateful_step_count=80, deadline=None)
TestTraffic = Traffic.TestCase


class TrafficWithHost(Traffic):
    """The same with host memory that holds more than the pool."""

    host_pages = 160


class TrafficWithLittleHost(Traffic):
    """So little that in one step states leave the host for others, and some never fit."""

    host_pages = 9


TestTrafficWithHost = TrafficWithHost.TestCase
TestTrafficWithLittleHost = TrafficWithLittleHost.TestCase
TestTrafficWithHost.settings = TestTrafficWithLittleHost.settings = settings(Traffic.TestCase.settings, max_examples=40)


@pytest.mark.parametrize(("kind", "restored"), [(Traffic, 0), (TrafficWithHost, 300), (TrafficWithLittleHost, 100)])
def test_much_traffic(kind: type[Traffic], restored: int) -> None:
    """Longer than hypothesis makes it, and busy."""
    reused = evicted = back = spared = 0
    for seed in range(16):
        random, traffic = Random(seed), kind()
        for _ in range(250):
            if len(traffic.waiting) < 4 and random.random() < 0.6:
                retention = random.choice(sorted(SCHEDULES))
                traffic.submit(
                    random.randrange(2**32),
                    retention,
                    random.randrange(1, 60),
                    random.randrange(20),
                    random.random() < 0.2,
                )
            if random.random() < 0.05 and (traffic.running or traffic.waiting):
                traffic.abort(random.randrange(2**32))
            traffic.steps(random.randrange(2**32), random.randrange(1, 5))
            traffic.pages_are_counted()
            traffic.nothing_is_found_wrong()
            traffic.checkpoints_are_whole()
            traffic.copies_are_right()
        sessions = traffic.manager.sessions
        spared += traffic.spared
        reused, evicted, back = reused + sessions.reused, evicted + sessions.evicted, back + sessions.restored
    print(f"{reused} reused, {back} of them restored, {evicted} evicted; {spared} steps stayed in their block")
    assert spared > 1000
    assert reused > 500
    assert evicted > 500
    assert back >= restored
