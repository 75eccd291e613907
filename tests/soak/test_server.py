# SPDX-License-Identifier: Apache-2.0
"""A server under mixed load: everything is answered or refused for a reason, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest
from tests.serving import Server, serving, stop
from tests.soak.traffic import POOL, SERVER_OPTIONS, SLOWLY, VANISH, Ask, Traffic

pytestmark = pytest.mark.engine


@dataclass
class Record:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    answers: dict[object, str] = field(default_factory=dict)  # the first one of each question
    memory: list[int] = field(default_factory=list)  # resident bytes of the server's processes
    used: list[float] = field(default_factory=list)  # pages in use


async def lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines as servers end them; ``aiter_lines`` ends them at other characters, too, which a random model generates."""
    rest = b""
    async for piece in response.aiter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode()
    yield rest.decode()


async def send(client: httpx.AsyncClient, ask: Ask, record: Record) -> None:
    """Play one client."""
    body = {"model": "small", "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": True}
    if ask.retention is not None:
        body["vllm_xargs"] = {"retention": ask.retention}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    text, usage, pieces = "", None, 0
    async with client.stream("POST", "/v1/completions", json=body | stream) as response:
        if ask.refusal is None:
            assert response.status_code == 200, await response.aread()
        async for line in lines(response):
            if ask.refusal is not None and ask.refusal in line:
                record.outcomes["refused"] += 1
                return
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
            pieces += 1
            if ask.client == SLOWLY:
                await asyncio.sleep(0.05)
            elif ask.client == VANISH and pieces > 2:
                record.outcomes["vanished"] += 1
                return
    assert ask.refusal is None, f"{ask} was answered"
    assert usage is not None, f"{ask} got no end"
    assert usage["completion_tokens"] == ask.max_tokens, ask
    assert record.answers.setdefault(ask.key, text) == text, f"{ask} was answered in two ways"
    record.outcomes["answered"] += 1


async def watch(server: Server, client: httpx.AsyncClient, record: Record) -> None:
    """Memory and pages, five times a second."""
    process = psutil.Process(server.process.pid)
    while True:
        family = [process, *process.children(recursive=True)]
        record.memory.append(sum(each.memory_info().rss for each in family))
        record.used.append(_value((await client.get("/metrics")).text, "tangram:pages{", 'state="in_use"'))
        await asyncio.sleep(0.2)


async def soak(server: Server, traffic: Traffic, total: int) -> Record:
    """Send bursts, each while the ones before it are still being served."""
    record, random = Record(), Random(traffic.seed)
    # None is used twice: to the server one is idle when it has sent its answer, to who reads slowly much later.
    limits = httpx.Limits(max_connections=400, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=server.url, headers=server.http.headers, timeout=600, limits=limits
    ) as client:
        watching = asyncio.create_task(watch(server, client, record))
        async with asyncio.TaskGroup() as group:
            pending: set[asyncio.Task[None]] = set()
            for burst in traffic.bursts(total):
                pending |= {group.create_task(send(client, ask, record)) for ask in burst}
                while len(pending) > 200:
                    _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(random.choice([0, 0.02, 0.2]))
        assert not watching.done(), "the server answered no more"
        watching.cancel()
    return record


def _value(metrics: str, *parts: str) -> float:
    lines = [line for line in metrics.splitlines() if all(part in line for part in parts)]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


def check(server: Server, record: Record, total: int) -> None:
    print(f"\n{dict(record.outcomes)} of {total}; {server.metric('tangram:preemptions'):.0f} preemptions, ", end="")
    print(f"{server.metric('tangram:sessions_reused'):.0f} sessions reused, pool full in ", end="")
    print(f"{sum(used > 0.9 * POOL for used in record.used)} of {len(record.used)} looks")
    assert record.outcomes.total() == total
    assert min(record.outcomes[each] for each in ("answered", "refused", "vanished")) > 0
    server.wait_until_idle()
    assert server.pages("free") == POOL, "pages are missing"
    assert server.metric("tangram:pages_reclaimed") == 0
    assert server.metric("tangram:waiting_pages") == 0
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("tangram:preemptions") > 0, "the pool was never full"  # looks may miss it on a fast machine
    assert server.metric("tangram:sessions_reused") > 0
    assert not re.search("BrokenInvariant|EngineDeadError|AssertionError", server.log.read_text())


def test_mixed_load(small_server: Server) -> None:
    run(small_server, 500)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_requests(small_model: Path, tmp_path: Path) -> None:
    options = [str(small_model), *SERVER_OPTIONS]
    with serving(tmp_path, options, model="small", environment={"TANGRAM_CHECK": "1"}) as server:
        record = run(server, 10_000)
        quarter = len(record.memory) // 4
        parts = record.memory[quarter : 2 * quarter], record.memory[-quarter:]
        early, late = (statistics.median(part) for part in parts)
        print(f"resident: {early / 2**20:.0f} MiB in the second quarter, {late / 2**20:.0f} MiB in the last")
        assert late < 1.02 * early + 2**20 * 16
        stop(server)


def run(server: Server, total: int) -> Record:
    started = time.monotonic()
    record = asyncio.run(soak(server, Traffic(seed=total), total))
    print(f"\n{total} requests in {time.monotonic() - started:.0f} s")
    check(server, record, total)
    return record
