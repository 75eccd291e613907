# SPDX-License-Identifier: Apache-2.0
"""One real `tangram serve`, seen by its clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import Result
from tests.serving import Server, serving, stop
from typer.testing import CliRunner

from vllm_tangram.cli.app import app

pytestmark = pytest.mark.engine

MODEL = "SmolLM2-135M-Instruct"
LONG = " ".join(f"Entry {i}: the harbour of port {7 * i} has {i % 13} cranes." for i in range(120))  # 2 k tokens
TOO_LONG = "word " * 3000  # fits at 0.25, not at 1


def retention(value: object) -> dict[str, Any]:
    return {"extra_body": {"vllm_xargs": {"retention": value}}}


@pytest.fixture(scope="module")
def server(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ours = "--retention 0.25 --budgets=uniform --chunk-size 512 --session-spill-gib 0.1"
    vllms = "--kv-cache-memory-bytes 60000000 --max-model-len=4096 --max-num-seqs 8"
    more = "--enforce-eager --enable-prompt-tokens-details"
    options = [*ours.split(), str(embedded), *vllms.split(), *more.split()]
    with serving(tmp_path_factory.mktemp("server"), options, model=MODEL) as server:
        assert "Tangram: retention 0.25" in server.log.read_text(), "the server does not say what fits"
        yield server
        stop(server)


def test_chat_completion(server: Server) -> None:
    assert [model.id for model in server.client.models.list().data] == [MODEL]
    answer = server.chat("Who are you?", max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


def test_streaming_gives_the_same_text(server: Server) -> None:
    whole = server.chat(LONG, max_tokens=12).choices[0].message.content
    chunks = [chunk for chunk in server.chat(LONG, max_tokens=12, stream=True) if chunk.choices]
    assert len(chunks) > 3
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("asked", "least", "most"), [(None, 0.24, 0.35), (0.1, 0.09, 0.15), (0.7, 0.65, 0.8), (1, 1, 1.03)]
)
def test_retention_of_a_request(server: Server, asked: float | None, least: float, most: float) -> None:
    server.wait_until_idle()
    with server.chat(LONG, max_tokens=256, stream=True, **(retention(asked) if asked else {})) as stream:
        next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
        kept = server.metric("tangram:kv_retained_fraction")
    assert least <= kept <= most


@pytest.mark.parametrize(
    ("asked", "message"),
    [(2, r"in \[0.05, 1\] on this server, got 2"), (0.01, "--retention-floor"), ("abc", "a number .* got 'abc'")],
)
def test_a_bad_retention_is_the_clients_mistake(server: Server, asked: object, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"retention must be .*{message}"):
        server.chat("hi", **retention(asked))
    with pytest.raises(openai.APIError, match=f"retention must be .*{message}"):
        list(server.chat("hi", stream=True, **retention(asked)))
    assert server.chat("hi").choices


def test_a_prompt_that_never_fits(server: Server) -> None:
    server.wait_until_idle()
    pool = int(server.pages("free"))
    with pytest.raises(
        openai.BadRequestError, match=rf"needs \d+ pages at retention 1, but the KV pool has {pool}:"
    ) as error:
        server.chat(TOO_LONG, **retention(1))
    need = int(re.search(r"needs (\d+) pages", str(error.value))[1])  # type: ignore[index]
    assert need > pool
    assert server.chat(TOO_LONG).choices


def test_metrics(server: Server) -> None:
    server.wait_until_idle()
    idle = server.pages("free")
    assert server.pages("in_use") == 0
    assert server.pages("staging") > 0
    assert server.metric("tangram:page_bytes") * (idle + 1 + server.pages("staging")) <= 60_000_000
    assert server.metric("tangram:waiting_pages") == 0
    assert server.metric("tangram:preemptions") == 0
    assert server.metric("tangram:pages_reclaimed") == 0


def test_an_aborted_request_frees_its_pages(server: Server) -> None:
    server.wait_until_idle()
    idle = server.pages("free")
    with server.chat(LONG, max_tokens=1500, stream=True) as stream:
        for _, _ in zip(range(5), stream, strict=False):
            pass
        held = server.pages("in_use")
        assert held > 0
        assert server.pages("free") < idle
    server.wait_until_idle()
    assert server.pages("free") == idle


def test_chat_command(server: Server, tmp_path: Path) -> None:
    document = tmp_path / "harbours.txt"
    document.write_text(LONG)
    lines = [
        "How many cranes has port 7?",
        "/retention 0.01",
        "This is refused.",
        "/retention 0.5",
        "/nonsense",
        "And port 14?",
        "/reset",
        "Hello again.",
        "/quit",
        "Never asked.",
    ]
    options = ["--url", f"{server.url}/v1", "--max-tokens", "24", "--temperature", "0", "--file", str(document)]
    result = CliRunner().invoke(app, ["chat", *options], input="\n".join(lines))
    assert result.exit_code == 0, result.output
    errors = result.stderr.splitlines()
    assert errors[0].startswith("error: retention must be in [0.05, 1] on this server, got 0.01")
    assert errors[1].startswith("error: /nonsense is no command")
    assert len(errors) == 2
    figures = re.findall(
        r"^(\d+) prompt tokens, \d+ generated; .* at full KV, ([\d.]+) %$", result.stdout, re.MULTILINE
    )
    prompts = [int(tokens) for tokens, _ in figures]
    assert len(prompts) == 3
    assert prompts[0] < prompts[1] < prompts[0] + 100  # the second asks with the first turn before it
    assert prompts[2] == pytest.approx(prompts[0], abs=20)  # /reset: the document alone
    assert float(figures[0][1]) < 40 < float(figures[1][1])


def test_memory_is_foretold(server: Server) -> None:
    def ask(**asked: object) -> httpx.Response:
        return server.http.get("/v1/tangram/memory", params=asked)  # type: ignore[arg-type]

    usual, more = ask(prompt_tokens=2000).json(), ask(prompt_tokens=2000, generated_tokens=100, retention=1).json()
    assert (usual["retention"], more["retention"]) == (0.25, 1)
    assert usual["bytes"] == usual["pages"] * server.metric("tangram:page_bytes")
    assert usual["bytes"] < 0.3 * usual["full_kv_bytes"] < 0.3 * more["full_kv_bytes"] <= 0.3 * more["bytes"]
    for wrong, reason in (
        ({"prompt_tokens": 0}, "at least 1 prompt token"),
        ({"prompt_tokens": 5000}, "at most 4096 tokens"),
        ({"prompt_tokens": 10, "retention": 0.01}, "--retention-floor"),
        ({"prompt_tokens": "ten"}, "prompt_tokens"),
        ({}, "prompt_tokens"),
    ):
        refused = ask(**wrong)
        assert refused.status_code == 400, refused.text
        assert reason in refused.text


def test_sessions(server: Server) -> None:
    """A second turn begins with what the first one left; that is listed and dropped, over HTTP and by the command."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["sessions", *arguments])

    url = f"{server.url}/v1"
    assert server.http.delete("/v1/tangram/sessions").status_code == 200
    messages = [{"role": "user", "content": LONG}]
    reused = server.metric("tangram:sessions_reused")
    first = server.chat_on(messages, max_tokens=20)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert first.usage.prompt_tokens_details.created_cache_tokens == first.usage.prompt_tokens // 512 * 512
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    second = server.chat_on(messages)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens // 512 * 512 > 0
    assert server.metric("tangram:sessions_reused") == reused + 1
    assert server.metric("tangram:sessions") == first.usage.prompt_tokens // 512
    assert server.metric("tangram:sessions_evicted") >= 0
    assert server.metric("tangram:sessions_restored") >= 0
    assert (server.metric("tangram:host_bytes") > 0) == (server.metric("tangram:sessions_spilled") > 0)

    [session] = server.http.get("/v1/tangram/sessions").json()["data"]
    assert session["tokens"] == second.usage.prompt_tokens // 512 * 512
    assert session["spilled_pages"] == 0
    assert session["bytes"] == session["pages"] * server.metric("tangram:page_bytes")
    assert json.loads(run("--url", url, "--json").stdout)["sessions"][0]["id"] == session["id"]
    listed = run("--url", url).stdout
    assert session["id"] in listed
    assert f"{session['tokens']:,}" in listed
    unknown = run("drop", "f" * 16, session["id"], "--url", url)
    assert unknown.exit_code == 2
    assert unknown.stderr.startswith(f"error: there is no session {'f' * 16} at {url}; nothing was dropped")
    assert server.http.delete(f"/v1/tangram/sessions/{'f' * 16}").status_code == 404
    assert run("--url", url, "drop", session["id"]).stdout == "1 dropped\n"
    assert run("--url", url).stdout == f"no sessions at {url}\n"
    assert server.chat_on(messages).usage.prompt_tokens_details.cached_tokens == 0
    assert run("drop", "--all", "--url", url).stdout == "1 dropped\n"
    assert server.http.get("/v1/tangram/sessions").json()["data"] == []
