# SPDX-License-Identifier: Apache-2.0
"""Sessions over vLLM's own page pool, without an engine: random traffic, every page labelled with what it holds.

A page's label says which tokens it was computed from. A hit must return pages whose labels are those of the new
request's own prefix, whatever was finished, evicted, aborted, preempted or shared in between.
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
from vllm_tangram.engine.manager import HeadGroupManager, RequestBudget

BLOCK, CHUNK, PAGES = 16, 32, 90
Label = tuple[tuple[int, ...], float, int]


def schedule(retention: float) -> EvictionSchedule:
    curve = skewed_curve(6)
    groups = group_members(curve.at(0.4), (3, 2), 2, "global")
    return Case(curve, groups, retention, BLOCK, CHUNK // BLOCK, sinks=2, window=5, n_max=16).build()


SCHEDULES = {retention: schedule(retention) for retention in (0.3, 0.6)}


class Traffic(RuleBasedStateMachine):
    """The scheduler's part: admission, steps of whole chunks, decode, preemption, end."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(PAGES, enable_caching=True, hash_block_size=BLOCK)
        spec = SimpleNamespace(block_size=BLOCK, dcp_sharded=False)
        self.manager = HeadGroupManager(spec, self.pool, True, 0, BLOCK)
        self.label: dict[int, Label] = {}
        self.running: dict[str, Any] = {}
        self.prompts: list[tuple[int, ...]] = [()]
        self.number = 0
        self.hits = 0

    @precondition(lambda self: len(self.running) < 3)
    @rule(
        seed=st.integers(0, 2**32 - 1),
        retention=st.sampled_from(sorted(SCHEDULES)),
        new=st.integers(1, 90),
        out=st.integers(0, 20),
        fork=st.booleans(),
    )
    def admit(self, seed: int, retention: float, new: int, out: int, fork: bool) -> None:
        """A prompt that extends, or forks from, one that was there before."""
        random = Random(seed)
        base = random.choice(self.prompts[-5:])
        base = base[: random.randrange(len(base) + 1)] if fork else base
        prompt = (*base, *(random.randrange(3) for _ in range(new)))[:250]
        self.number += 1
        request = SimpleNamespace(
            request_id=str(self.number),
            prompt=prompt,
            num_tokens=len(prompt),
            num_computed_tokens=0,
            length=len(prompt) + out,
            block_hashes=[repr(prompt[: end + BLOCK]).encode() for end in range(0, len(prompt) - BLOCK + 1, BLOCK)],
        )
        self.manager.announce(request.request_id, RequestBudget(len(prompt), SCHEDULES[retention], retention, CHUNK))
        self.start(request)

    def start(self, request: Any) -> None:
        request_id, budget = request.request_id, self.manager.budgets[request.request_id]
        found = self.manager.find(request)
        pages = list(found.pages[: found.num_pages]) if found else []
        need = self.need(request_id, request.num_tokens, pages, admission=True)
        if need > self.pool.get_num_free_blocks():
            self.manager.withdraw(request_id)
            return
        if found:
            self.hits += 1
            assert 0 < found.tokens < request.num_tokens
            for index, page in enumerate(pages):
                assert self.label[page.block_id] == self.labelled(request, index)
            self.manager.add_local_computed_blocks(request_id, pages, found.tokens, 0)
            request.num_computed_tokens = found.tokens
            assert len(pages) == budget.pages(found.tokens)
        self.running[request_id] = request
        self.prompts.append(request.prompt)

    def need(self, request_id: str, tokens: int, pages: list[Any], *, admission: bool = False) -> int:
        return self.manager.get_num_blocks_to_allocate(
            request_id, tokens, pages, 0, 0, tokens, apply_admission_cap=admission
        )

    def labelled(self, request: Any, index: int) -> Label:
        """What page ``index`` of a request holds: it was born in the first chunk that has that many pages."""
        budget = self.manager.budgets[request.request_id]
        end = CHUNK
        while budget.pages(end) <= index:
            end += CHUNK
        return request.prompt[:end], budget.retention, index

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 8))
    def steps(self, seed: int, count: int) -> None:
        random = Random(seed)
        for _ in range(count):
            if self.running:
                self.step(random)

    def step(self, random: Random) -> None:
        request = self.running[random.choice(sorted(self.running))]
        request_id, t, prompt_len = request.request_id, request.num_computed_tokens, len(request.prompt)
        end = min((t // CHUNK + 1) * CHUNK, prompt_len) if t < prompt_len else t + 1
        need = self.need(request_id, end, [])
        if need > self.pool.get_num_free_blocks():
            victim = self.running.pop(random.choice(sorted(self.running)))
            self.manager.remember(victim)
            self.manager.free(victim.request_id)
            victim.num_computed_tokens = 0
            self.start(victim)  # preempted, and first in the queue again
            return
        first = len(self.manager.req_to_blocks[request_id])
        new = self.manager.allocate_new_blocks(request_id, end, end)
        assert len(new) == need
        self.manager.cache_blocks(request, end)
        for index, page in enumerate(new, start=first):
            tokens = request.prompt[:end] if end <= prompt_len else (*request.prompt, -1)
            self.label[page.block_id] = tokens, self.manager.budgets[request_id].retention, index
        request.num_computed_tokens = end
        request.num_tokens = max(request.num_tokens, end)
        if end >= request.length or random.random() < 0.03:  # done, or aborted
            self.manager.remember(request)
            self.manager.free(request_id)
            self.manager.withdraw(request_id)
            del self.running[request_id]

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()
        self.manager.sessions.clear()

    @invariant()
    def pages_are_counted(self) -> None:
        held = [block.block_id for blocks in self.manager.req_to_blocks.values() for block in blocks]
        counts = np.bincount(held, minlength=PAGES)
        assert [block.ref_cnt for block in self.pool.blocks[1:]] == counts[1:].tolist()
        assert self.pool.get_num_free_blocks() == PAGES - 1 - len(set(held))
        for request_id in self.running:
            t = self.running[request_id].num_computed_tokens
            assert len(self.manager.req_to_blocks[request_id]) == self.manager.budgets[request_id].pages(t)

    @invariant()
    def checkpoints_are_whole(self) -> None:
        """The order of vLLM's free queue hands out a checkpoint's last page first."""
        free = {block.block_id: place for place, block in enumerate(self.pool.free_block_queue.get_all_free_blocks())}
        for checkpoint in self.manager.sessions.checkpoints():
            places = [free.get(page.block_id, PAGES) for page in checkpoint.pages[: checkpoint.num_pages]]
            assert min(places) == places[-1]


Traffic.TestCase.settings = settings(max_examples=50, stateful_step_count=80, deadline=None)
TestTraffic = Traffic.TestCase
