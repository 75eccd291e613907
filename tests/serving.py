# SPDX-License-Identifier: Apache-2.0
"""Real servers for the tests: a process of their own each, seen by its clients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

START_SECONDS = 400
OURS = ("-m", "vllm_tangram.cli", "serve")
STOCK = ("-m", "vllm.entrypoints.openai.api_server")  # the `vllm` command wants a distribution of that very name


@dataclass(frozen=True)
class Server:
    """A server process: its address, clients and what it logged."""

    url: str
    http: httpx.Client
    client: openai.OpenAI
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    def metric(self, name: str, label: str = "") -> float:
        """Sum over the series of a metric; there must be one."""
        series = re.findall(rf"^{name}\{{.*{label}.*\}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert series, name
        return sum(map(float, series))

    def pages(self, state: str) -> float:
        return self.metric("tangram:pages", f'state="{state}"')

    def chat(self, text: str, *, max_tokens: int = 4, **options: Any) -> Any:
        return self.chat_on([{"role": "user", "content": text}], max_tokens=max_tokens, **options)

    def chat_on(self, messages: list[Any], *, max_tokens: int = 4, **options: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=max_tokens, temperature=0, **options
        )

    def wait_until_idle(self) -> None:
        """Until no page is held; metrics are renewed by engine steps alone, so small requests make some."""
        deadline = time.monotonic() + 30
        while self.chat("hi") and self.pages("in_use"):
            assert time.monotonic() < deadline, "pages are still held"
            time.sleep(0.2)

    def tail(self) -> str:
        """The end of what it logged."""
        return self.log.read_text()[-3000:]


@contextmanager
def serving(
    folder: Path,
    options: Sequence[str],
    *,
    model: str,
    command: Sequence[str] = OURS,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server, wait until it answers, and kill what is left of it in the end.

    Args:
        folder: for its log.
        options: of its command line, the model's path among them.
        model: name to serve the model under.
        command: of the Python module.
        environment: variables beside those of this process.

    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the other tests' engines run in one process, this one not
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command, *options, "--host=127.0.0.1", f"--port={port}", "--served-model-name", model],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**variables, **(environment or {})},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
            server = Server(url, http, client, model, process, log)
            _wait_for(server)
            yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def stop(server: Server) -> None:
    """Ask it to end; no process may outlive it for long."""
    assert server.process.poll() is None, f"the server died: {server.tail()}"
    server.process.terminate()
    server.process.wait(timeout=60)
    wait_until_gone(server.process.pid)


def wait_until_gone(group: int, seconds: float = 20) -> None:
    """Until no process of the group is left."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.2)
        pytest.fail("processes of the server are still running")


def _wait_for(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"the server did not start: {server.tail()}"
        try:
            if server.http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start in {START_SECONDS} s: {server.tail()}")
