# SPDX-License-Identifier: Apache-2.0
"""``tangram sessions`` without a server of ours; with one: ``tests/engine/test_server.py``."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_tangram.cli.app import app
from vllm_tangram.cli.sessions import _duration

SESSION = {
    "id": "0123456789abcdef",
    "tokens": 16384,
    "retention": 0.25,
    "pages": 1200,
    "bytes": 3 << 20,
    "spilled_pages": 300,
    "idle_seconds": 75.2,
    "hits": 7,
}
KEY = "secret"


class Server(http.server.BaseHTTPRequestHandler):
    """Answers by path: ``/full``, ``/stock``, ``/text`` and ``/other`` stand for servers; all want a key."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self.answer(401, json.dumps({"error": "Unauthorized"}))
        elif self.path == "/full/tangram/sessions":
            self.answer(200, json.dumps({"data": [SESSION]}))
        elif self.path.startswith("/broken"):
            self.answer(500, json.dumps({"error": {"message": "engine is dead"}}))
        elif self.path.startswith("/text"):
            self.answer(200, "<html>")
        elif self.path.startswith("/other"):
            self.answer(200, "[]")
        else:
            self.answer(404, json.dumps({"error": {"message": "Not Found"}}))

    do_DELETE = do_GET

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(*arguments: str, key: str = KEY) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["sessions", *arguments], env={"OPENAI_API_KEY": key})
    return result.exit_code, result.stdout, result.stderr


def test_table_and_json(url: str) -> None:
    code, table, _ = run("--url", f"{url}/full")
    assert code == 0
    row = table.splitlines()[-1]
    assert " ".join(row.split()) == "0123456789abcdef 16,384 0.25 1,200 3.0 MiB host 25 % 1 min 7"
    code, text, _ = run("--url", f"{url}/full/", "--json")
    assert json.loads(text) == {"sessions": [SESSION]}


@pytest.mark.parametrize("command", [[], ["drop", "--all"], ["drop", "0123456789abcdef"]])
@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("stock/v1", "keeps no sessions: it is no `tangram serve`, or was started with --no-enable-prefix-caching"),
        ("text", "is no server of vLLM"),
        ("other", "is no server of vLLM"),
        ("broken", "refused: engine is dead"),
    ],
)
def test_other_servers(url: str, command: list[str], server: str, message: str) -> None:
    code, out, error = run(*command, "--url", f"{url}/{server}")
    assert (code, out) == (2, "")
    assert error.startswith("error: ")
    assert message in error
    assert f"{url}/{server}" in error
    assert error.count("\n") == 1


def test_a_wrong_key(url: str) -> None:
    code, _, error = run("--url", f"{url}/full", key="wrong")
    assert code == 2
    assert error.startswith(f"error: the server at {url}/full wants its API key: set OPENAI_API_KEY")


@pytest.mark.parametrize("command", [[], ["drop", "--all"]])
def test_no_server(command: list[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        code, out, error = run(*command, "--url", address)
    assert (code, out) == (2, "")
    assert error.startswith(f"error: no server answers at {address}")
    assert run("--url", "nonsense")[2].startswith("error: no server answers at nonsense")


@pytest.mark.parametrize("arguments", [["drop"], ["drop", "0123456789abcdef", "--all"]])
def test_what_to_drop_must_be_said(arguments: list[str]) -> None:
    code, _, error = run(*arguments)
    assert code == 2
    assert error.startswith("error: say which sessions to drop: their ids, or --all")


def test_an_id_that_does_not_exist(url: str) -> None:
    code, out, error = run("drop", SESSION["id"], "x", "y", "--url", f"{url}/full")
    assert (code, out) == (2, "")
    assert error.startswith(f"error: there is no session x, y at {url}/full; nothing was dropped")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (75, "1 min"), (7200, "2 h"), (90000, "1 d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
