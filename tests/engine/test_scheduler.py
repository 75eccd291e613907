# SPDX-License-Identifier: Apache-2.0
"""Scheduling decisions that need no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.request import RequestStatus

from vllm_tangram.engine.scheduler import TangramScheduler
from vllm_tangram.engine.setup import MAX_RETENTIONS

CHUNK = 64


def test_a_request_waits_while_every_table_of_the_worker_is_in_use() -> None:
    """The worker keeps one table per retention and could not open a request with one more (``DevicePages.open``)."""

    def request(name: str, schedule: Any) -> Any:
        scheduler.pages.budgets[name] = SimpleNamespace(schedule=schedule)
        return SimpleNamespace(request_id=name, num_prompt_tokens=CHUNK, status=RequestStatus.WAITING)

    scheduler: Any = TangramScheduler.__new__(TangramScheduler)
    scheduler.plan = SimpleNamespace(config=SimpleNamespace(chunk_size=CHUNK))
    scheduler.pages = SimpleNamespace(budgets={})
    schedules = [object() for _ in range(MAX_RETENTIONS + 1)]
    known, another = request("known", schedules[0]), request("another", schedules[-1])

    def tokens(waiting: Any) -> int:
        return int(scheduler._reserve_prefill_lookahead(waiting, 0, CHUNK))

    scheduler.running = [request(str(i), schedule) for i, schedule in enumerate(schedules[:-2])]
    assert (tokens(known), tokens(another)) == (CHUNK, CHUNK)
    scheduler.running += [request("last", schedules[-2]), request("twice", schedules[0])]
    assert (tokens(known), tokens(another)) == (CHUNK, 0)
    assert scheduler._reserve_prefill_lookahead(another, CHUNK // 2, CHUNK) == 0, "nor with a prefix of another"
    another.status = RequestStatus.RUNNING
    started = scheduler._reserve_prefill_lookahead(another, CHUNK, 1)
    assert started == 1, "a request that runs is never held back"
    another.status = RequestStatus.PREEMPTED
    scheduler.running.pop(1)  # the only one of its retention
    assert tokens(another) == CHUNK
