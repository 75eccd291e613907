# SPDX-License-Identifier: Apache-2.0
"""What ``tangram chat`` does with servers that never change; with a real one: ``tests/engine/test_server.py``."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_tangram.cli.app import app
from vllm_tangram.cli.chat import Conversation

STREAM = """\
data: {"id":"1","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{"content":"Seven."}}]}

data: {"id":"1","object":"chat.completion.chunk","created":0,"model":"m","choices":[],"usage":{"prompt_tokens":100,"completion_tokens":5,"total_tokens":105}}

data: [DONE]

"""  # noqa: E501
MEMORY = '{"retention": 0.5, "pages": 64, "bytes": 2097152, "full_kv_bytes": 8388608}'


class _Server(BaseHTTPRequestHandler):
    """An OpenAI server whose answers are always the same; ``memory`` is what it says of memory, None: nothing."""

    memory: str | None
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.endswith("/models"):
            self._answer("application/json", '{"object": "list", "data": [{"id": "m", "object": "model"}]}')
        elif self.memory is None:
            self.send_error(404)
        else:
            self._answer("application/json", self.memory)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer("text/event-stream", STREAM)

    def _answer(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def serve() -> Iterator[Callable[[str | None], tuple[str, list[str]]]]:
    with ExitStack() as stack:

        def start(memory: str | None) -> tuple[str, list[str]]:
            asked: list[str] = []
            handler = type("Handler", (_Server,), {"memory": memory, "asked": asked})
            server = stack.enter_context(HTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}/v1", asked

        yield start


def test_what_a_turn_held(serve: Callable[[str | None], tuple[str, list[str]]]) -> None:
    url, asked = serve(MEMORY)
    result = CliRunner().invoke(app, ["chat", "--url", url], input="one\n/retention 0.5\ntwo\n")
    line = "100 prompt tokens, 5 generated; held 2.0 MiB of 8.0 MiB at full KV, 25.0 %"
    assert result.stdout.splitlines() == ["Seven.", line, "Seven.", line]
    question = "/v1/tangram/memory?prompt_tokens=100&generated_tokens=5"
    assert [path for path in asked if "memory" in path] == [question, f"{question}&retention=0.5"]


@pytest.mark.parametrize("memory", [None, "[]", "{}"])
def test_a_server_that_does_not_say_what_it_holds(
    memory: str | None, serve: Callable[[str | None], tuple[str, list[str]]]
) -> None:
    url, _ = serve(memory)
    result = CliRunner().invoke(app, ["chat", "--url", url], input="one\n")
    assert (result.exit_code, result.stdout.splitlines()) == (0, ["Seven.", "100 prompt tokens, 5 generated"])


def test_documents_go_with_the_first_message_that_is_answered() -> None:
    conversation = Conversation("Be brief.", ["Document a"])
    refused = conversation.with_question("one")
    sent = conversation.with_question("two")
    assert refused[1:] == [{"role": "user", "content": "Document a\n\none"}]
    conversation.add(sent, "answer")
    assert conversation.with_question("three") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Document a\n\ntwo"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "three"},
    ]
    conversation.reset()
    assert conversation.with_question("two") == sent


def test_no_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        result = CliRunner().invoke(app, ["chat", "--url", url])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: no server answers at {url}")
    assert "tangram serve MODEL" in result.stderr


def test_a_document_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", "binary"):
        result = CliRunner().invoke(app, ["chat", "--file", str(tmp_path / name)])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: cannot read {tmp_path / name} as text")
