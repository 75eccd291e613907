# SPDX-License-Identifier: Apache-2.0
"""What ``tangram chat`` does without a server; with one: ``tests/engine/test_server.py``."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_tangram.cli.app import app
from vllm_tangram.cli.chat import Conversation, ServerPages

METRICS = """\
# HELP tangram:pages KV pages by state.
# TYPE tangram:pages gauge
tangram:pages{engine="0",model_name="m",state="in_use"} 64.0
tangram:pages{engine="1",model_name="m",state="in_use"} 0.0
tangram:pages{engine="0",model_name="m",state="free"} 1000.0
tangram:page_bytes{engine="0",model_name="m"} 32768.0
tangram:kv_retained_fraction{engine="0",model_name="m"} 0.25
vllm:num_requests_running{engine="0",model_name="m"} 1.0
"""


def test_pages_of_the_server() -> None:
    pages = ServerPages.read(METRICS)
    assert pages == ServerPages(held=64 * 32768, kept=0.25, running=1)
    assert str(pages) == "the server held 2.0 MiB of 8.0 MiB at full KV, 25.0 %"
    assert str(ServerPages(1024, 0.5, 3)).endswith("50.0 % (3 requests together)")


@pytest.mark.parametrize("metrics", ["", METRICS.replace(" 64.0", " 0.0"), "vllm:num_requests_running 1.0\n"])
def test_no_figures_when_nothing_is_held(metrics: str) -> None:
    assert ServerPages.read(metrics) is None


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
