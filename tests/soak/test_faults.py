# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed, disks that are full, files that change: what users see of it."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from tests.engine.drive import Engine
from tests.serving import OURS, STOCK, Server, serving, wait_until_gone
from tests.soak.traffic import SERVER_OPTIONS, STOCK_OPTIONS

import vllm_tangram
from vllm_tangram import RetentionProfile, TangramConfig, TangramError
from vllm_tangram.budget import RetentionPlan
from vllm_tangram.engine import resolve
from vllm_tangram.engine.resolve import model_identity, resolve_profile

PROMPT = list(range(33, 120)) * 4


async def ask(url: str, count: int) -> list[tuple[int, str]]:
    """Answers to long requests that run at the same time: status and text."""

    async def one(client: httpx.AsyncClient) -> tuple[int, str]:
        body = {"model": "small", "prompt": PROMPT, "max_tokens": 600, "ignore_eos": True}
        try:
            answer = await client.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            return 0, type(error).__name__
        return answer.status_code, answer.text

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await asyncio.gather(*(one(client) for _ in range(count)))


async def ask_and_kill(server: Server, victim: psutil.Process) -> list[tuple[int, str]]:
    asked = asyncio.create_task(ask(server.url, 100))
    async with httpx.AsyncClient(base_url=server.url) as client:
        while not re.search(r"num_requests_running\{.*\} [1-9]", (await client.get("/metrics")).text):
            await asyncio.sleep(0.05)
    victim.kill()
    return await asked


def after_a_kill(name: str, folder: Path, *options: str, command: tuple[str, ...]) -> tuple[set[tuple[int, str]], int]:
    """Errors of the requests that ran when a process was killed, and the exit status; no process is left."""
    folder.mkdir()
    with serving(folder, options, model="small", command=command) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        (victim,) = (process for process in family if name in process.cmdline()[0])
        started = time.monotonic()
        answers = asyncio.run(ask_and_kill(server, victim))
        assert time.monotonic() - started < 60
        status = server.process.wait(timeout=60)
        wait_until_gone(server.process.pid, 60)
    return {answer for answer in answers if answer[0] != 200}, status


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["VLLM::EngineCore", "VLLM::Worker"])
def test_a_killed_process_ends_the_server(name: str, small_model: Path, tmp_path: Path) -> None:
    """As it does with stock vLLM: requests fail, the server ends by itself, and can be started again."""
    model = f"--model={small_model}"
    ours = after_a_kill(name, tmp_path / "ours", model, *SERVER_OPTIONS, command=OURS)
    print(ours)
    assert ours == after_a_kill(name, tmp_path / "stock", model, *STOCK_OPTIONS, command=STOCK)
    ((status, message),) = ours[0]
    assert status == 500
    assert "EngineCore encountered an issue" in message
    with serving(tmp_path, [model, *SERVER_OPTIONS], model="small") as server:
        assert server.chat("hello", max_tokens=3).usage.completion_tokens == 3


def made_up_profile(model: Path, seed: int) -> RetentionProfile:
    rng = np.random.default_rng(seed)
    return RetentionProfile(
        retentions=np.array([0.1, 0.25, 0.5]),
        kept=np.sort(rng.uniform(size=(4, 3, 3, 2)).astype(np.float32), axis=1),
        scorer="keydiff",
        model=model_identity(str(model), {}),
        sinks=4,
        window=16,
        chunk_size=64,
        info={},
    )


@pytest.mark.engine
def test_a_profile_that_changes_while_serving_changes_nothing(small_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.safetensors"
    profile, other = made_up_profile(small_model, 1), made_up_profile(small_model, 2)
    profile.save(path)
    options = {"retention": 0.25, "profile": str(path), "chunk_size": 64, "window": 16, "page_group_size": 2}
    options["margin"] = "on_top"  # so that what is held depends much on the profile
    engine = Engine(
        vllm_tangram.LLM(
            str(small_model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=8,
            kv_cache_memory_bytes=32 << 20,
            enable_prefix_caching=False,
            **options,
        )
    )

    def pages(of: RetentionProfile, retention: float) -> int:
        config = TangramConfig(**{**options, "scorer": "keydiff"})  # type: ignore[arg-type]
        plan = RetentionPlan(config, of, num_layers=3, num_kv_heads=2, block_size=32, max_tokens=1024)
        return plan.schedule(retention).num_pages(800, 800)

    prompts = [PROMPT, PROMPT[5:90]]
    answers = engine.ask(prompts, 8)
    other.save(path)
    for retention in (0.25, 0.4):  # of the second one a schedule is made only now
        assert (
            engine.llm.tangram_memory(800, 1, retention)["pages"]
            == pages(profile, retention)
            != pages(other, retention)
        )
        assert engine.ask([PROMPT], 8, retention=retention)[0].finish_reason == "length"
    assert engine.ask(prompts, 8) == answers
    path.unlink()
    assert engine.llm.tangram_memory(800, 1, 0.3)["pages"] == pages(profile, 0.3) != pages(other, 0.3)
    assert engine.ask([PROMPT], 8, retention=0.3)[0].finish_reason == "length"
    assert engine.ask(prompts, 8) == answers
    engine.close()


def test_a_full_disk_loses_no_file_and_leaves_none(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of profiles: what is there stays, nothing half-written is found later, and the reason is said."""
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path))
    made: list[int] = []

    def make_profile(*_: object, **__: object) -> RetentionProfile:
        made.append(1)
        return made_up_profile(small_model, len(made))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def resolved(retention: float) -> Path:
        config = TangramConfig(retention=retention, chunk_size=64, window=16)
        return Path(str(resolve_profile(config, str(small_model), {}).profile))

    monkeypatch.setattr(resolve, "make_profile", make_profile)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(TangramError, match=r"cannot write profile .*safetensors: No space left on device"):
            resolved(0.25)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    path = resolved(0.25)
    assert made == [1, 1]
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        assert resolved(0.5) == path, "what is cached needs no room"
    assert made == [1, 1]
