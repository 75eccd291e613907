# SPDX-License-Identifier: Apache-2.0
"""Driving an in-process engine step by step, and the invariants that must hold after each."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams

#: Options of the small engine that several test files share: many chunks and blocks at little compute.
SMALL: dict[str, Any] = {
    "retention": 0.25,
    "page_group_size": 4,
    "chunk_size": 128,
    "window": 16,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128 + 16,  # a chunk a step
    "kv_cache_memory_bytes": 300 << 20,
}


@dataclass
class Answer:
    """What one request produced."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None
    cached: int = field(default=0, compare=False)  # prompt tokens that were not computed
    created: int = field(default=0, compare=False)  # prompt tokens that others can begin with from now on


@dataclass
class Engine:
    """An in-process vLLM engine (stock or ours)."""

    llm: Any
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    @property
    def free_pages(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def total_pages(self) -> int:
        return int(self.scheduler.kv_cache_config.num_blocks) - 1

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def add(
        self, name: str, ids: Sequence[int], max_tokens: int, *, retention: float | None = None, **params: Any
    ) -> None:
        """Queue a request of exactly ``max_tokens`` tokens, greedy unless ``params`` say otherwise."""
        extra = {} if retention is None else {"extra_args": {"retention": retention}}
        sampling = self.sampling(max_tokens, **extra, **params)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(ids)}, sampling)

    @staticmethod
    def sampling(max_tokens: int, **params: Any) -> SamplingParams:
        """Exactly ``max_tokens`` tokens, greedy unless ``params`` say otherwise."""
        return SamplingParams(max_tokens=max_tokens, **{"temperature": 0, "ignore_eos": True, "logprobs": 1, **params})

    def step(self) -> None:
        """One engine step; finished answers are collected."""
        for output in self.llm.llm_engine.step():
            if output.finished:
                completion = output.outputs[0]
                self.answers[output.request_id] = Answer(
                    list(completion.token_ids),
                    [max(entry.logprob for entry in step.values()) for step in completion.logprobs],
                    completion.finish_reason,
                    output.num_cached_tokens or 0,
                    output.num_cache_creation_tokens or 0,
                )

    def run(
        self,
        before_step: Callable[[int], None] = lambda step: None,
        *,
        more_to_come: Callable[[], bool] = lambda: False,
        max_steps: int = 5000,
    ) -> dict[str, Answer]:
        """Step until nothing is left and nothing is to come.

        Raises:
            AssertionError: ``max_steps`` did not suffice (a livelock).

        """
        self.answers = {}
        for step in range(max_steps):
            before_step(step)
            if self.llm.llm_engine.has_unfinished_requests():
                self.step()
            elif not more_to_come():
                return self.answers
        raise AssertionError(f"not done after {max_steps} steps")

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int, **params: Any) -> list[Answer]:
        """Run prompts together."""
        for number, ids in enumerate(prompts):
            self.add(str(number), ids, max_tokens, **params)
        answers = self.run()
        return [answers[str(number)] for number in range(len(prompts))]


def check_sessions(sessions: Any) -> None:
    """No checkpoint has a page that was handed out after its last page: what it holds is what was computed for it."""
    for checkpoint in sessions.checkpoints():
        if not checkpoint.in_pool:
            assert checkpoint.key in sessions.host
            continue
        pages = checkpoint.pages[: checkpoint.num_pages]
        assert len({page.block_id for page in pages}) == len(pages)
        assert checkpoint.key in sessions._keys_of[pages[-1].block_id]
        free = [page.ref_cnt == 0 for page in pages]
        assert free == sorted(free), "a page is free although a later one is used"


def external_id(request_id: str) -> str:
    """The id that a test gave; vLLM appends a random suffix."""
    return request_id.rsplit("-", 1)[0]


class PageAuditor:
    """Checks after every step that pages are exactly what the design says.

    Holds per request the page list of the step before: pages are only ever appended, unless the request was preempted.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.before: dict[str, tuple[int, list[int]]] = {}
        self.checked = 0

    def check(self) -> None:
        """Compare scheduler, pool and worker with the formula of docs/design.md."""
        scheduler, runner = self.engine.scheduler, self.engine.runner
        manager = scheduler.pages
        held: dict[str, list[int]] = {
            request_id: [block.block_id for block in blocks]
            for request_id, blocks in manager.req_to_blocks.items()
            if blocks
        }
        plan = scheduler.plan

        def need(request: Any, t: int) -> int:
            extra = request.sampling_params.extra_args or {}
            kept = plan.schedule(extra.get("retention", plan.config.retention)).kept
            whole = min(t, request.num_prompt_tokens) // plan.block_size
            return int(kept[whole].sum()) + plan.num_groups * (-(-t // plan.block_size) - whole)

        for request_id, ids in held.items():
            request = scheduler.requests[request_id]
            t, prompt_len = request.num_computed_tokens, request.num_prompt_tokens
            expected = need(request, t)
            assert len(ids) == expected, f"{request_id} after {t} of {prompt_len}: {len(ids)} pages, not {expected}"
            preemptions, previous = self.before.get(request_id, (request.num_preemptions, []))
            if preemptions == request.num_preemptions:
                assert ids[: len(previous)] == previous, f"{request_id} lost or exchanged pages while it ran"
            self.checked += 1
        self.before = {
            request_id: (scheduler.requests[request_id].num_preemptions, ids) for request_id, ids in held.items()
        }
        holders = Counter(page for ids in held.values() for page in ids)
        pool = scheduler.kv_cache_manager.block_pool
        wrong = [block.block_id for block in pool.blocks[1:] if block.ref_cnt != holders[block.block_id]]
        assert not wrong, f"pages {wrong} are not held by as many requests as they count"
        assert self.engine.free_pages == self.engine.total_pages - len(holders)
        check_sessions(manager.sessions)
        assert manager.pages_reclaimed == 0
        stats = scheduler.page_stats()
        waiting = [request for name, request in scheduler.requests.items() if name not in held]
        assert stats.pages_waiting == sum(need(request, request.num_tokens) for request in waiting)
        assert stats.pages_held == stats.pages_kept == sum(map(len, held.values()))
        assert set(manager.budgets) == set(scheduler.requests)
        runner.page_table.check_integrity()
