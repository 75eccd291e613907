# SPDX-License-Identifier: Apache-2.0
"""Requests with anything in their fields: answered, or refused with a message; the server goes on serving."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.fuzz.mutations import VALUES
from tests.serving import STOCK, Server, serving
from tests.soak.traffic import POOL, STOCK_OPTIONS

pytestmark = pytest.mark.engine

# Failures are not shrunk: a request may depend on what the server did before.
SOME = settings(
    max_examples=60,
    derandomize=True,  # what vLLM itself makes of odd values is not to fail a build by chance
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(SOME, max_examples=1500, derandomize=False)

PATHS = {"CompletionRequest": "/v1/completions", "ChatCompletionRequest": "/v1/chat/completions"}
VALID = {
    "CompletionRequest": {"model": "small", "prompt": "abc", "max_tokens": 2},
    "ChatCompletionRequest": {"model": "small", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2},
}


@pytest.fixture(scope="module")
def fields(small_server: Server) -> dict[str, dict[str, Any]]:
    """Fields of a request and their JSON schemas, as the server itself tells them."""
    schemas = small_server.http.get("/openapi.json").json()["components"]["schemas"]
    found = {name: schemas[name]["properties"] for name in PATHS}
    assert all("vllm_xargs" in properties and len(properties) > 30 for properties in found.values())
    return found


def of_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of about the right type, at and beyond its limits; deeper parts are anything."""
    options: list[st.SearchStrategy[Any]] = [VALUES]
    for each in (schema, *schema.get("anyOf", ())):
        if "enum" in each:
            options.append(st.sampled_from(each["enum"]))
        match each.get("type"):
            case "integer":
                options.append(st.integers(-3, 5))
            case "number":
                options.append(st.floats(-2, 3))
            case "string":
                options.append(st.text(max_size=10))
            case "boolean":
                options.append(st.booleans())
            case "array":
                options.append(st.lists(of_schema(each.get("items", {})), max_size=3))
            case "object":
                options.append(st.dictionaries(st.text(max_size=5) | st.integers(0, 300).map(str), VALUES, max_size=3))
    return st.one_of(options)


def well(server: Server, answer: httpx.Response, what: object) -> str:
    """It is answered, or refused with a message."""
    assert answer.status_code < 500, f"{what}: {answer.text}; {server.tail()}"
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"], what
    return str(answer.status_code)


def ask(server: Server, name: str, body: dict[str, Any]) -> httpx.Response:
    # As Python writes it: with NaN and infinities, which JSON has not and Python's parsers take.
    # A connection each: after a fault uvicorn drops it without saying so.
    headers = {"Content-Type": "application/json", "Connection": "close"}
    try:
        return server.http.post(PATHS[name], content=json.dumps(body), headers=headers)
    except httpx.TransportError as error:
        pytest.fail(f"{body}: {error!r}; {server.process.poll()}; {server.tail()}")


@dataclass
class Seen:
    """What came of the requests.

    Attributes:
        fields: of those with any fields, how often each status.
        retention: of those with any ``vllm_xargs``.
        routes: of those to our routes.
        faults: (schema, body) of those with any fields that failed inside the server.

    """

    fields: Counter[str] = field(default_factory=Counter)
    retention: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def check_fields(server: Server, fields: dict[str, dict[str, Any]], data: st.DataObject, seen: Seen) -> None:
    name = data.draw(st.sampled_from(sorted(PATHS)))
    names = data.draw(st.lists(st.sampled_from(sorted(fields[name])) | st.text(max_size=6), min_size=1, max_size=3))
    body = VALID[name] | {each: data.draw(of_schema(fields[name].get(each, {}))) for each in names}
    answer = ask(server, name, body)
    if answer.status_code == 500:  # some values are too odd for vLLM itself
        seen.faults.append((name, body))
    else:
        well(server, answer, body)
    seen.fields[str(answer.status_code)] += 1


def check_retention(server: Server, data: st.DataObject, seen: Seen) -> None:
    """Ours: ``vllm_xargs``, with retentions that are right, wrong, and beside others."""
    name = data.draw(st.sampled_from(sorted(PATHS)))
    extra = data.draw(
        st.fixed_dictionaries({}, optional={"retention": VALUES | st.floats(-0.5, 1.5), "retentoin": VALUES}) | VALUES
    )
    answer = ask(server, name, VALID[name] | {"vllm_xargs": extra})
    seen.retention[well(server, answer, extra)] += 1
    retention = extra.get("retention") if isinstance(extra, dict) else None
    # True is 1: vLLM makes it that when it reads the request.
    right = isinstance(retention, int | float) and 0.1 <= retention <= 1
    if answer.status_code == 200 and retention is not None:
        assert right, f"retention {retention!r} was taken"
    if right and len(extra) == 1:
        assert answer.status_code == 200, answer.text


def check_routes(server: Server, data: st.DataObject, seen: Seen) -> None:
    """Ours: the memory of a request, and sessions."""
    texts = st.text(max_size=12) | st.integers(-5, 5000).map(str) | st.floats(-1, 2).map(str)
    if data.draw(st.booleans()):
        names = st.sampled_from(["prompt_tokens", "generated_tokens", "retention", "x"])
        asked = data.draw(st.dictionaries(names, texts, max_size=4))
        answer = server.http.get("/v1/tangram/memory", params=asked)
        if answer.status_code == 200:
            assert 0 < answer.json()["pages"] <= 2 * 32
    else:
        any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
        asked = data.draw(any_text.filter(lambda text: text != "."))  # httpx leaves that out, and the slash before it
        answer = server.http.delete(f"/v1/tangram/sessions/{quote(asked, safe='')}")
        assert answer.status_code in (404, 405), "no text is the id of a session"
    seen.routes[str(answer.status_code)] += 1
    assert answer.status_code < 500, f"{asked}: {answer.text}; {server.tail()}"


def run(server: Server, fields: dict[str, dict[str, Any]], much: settings, model: Path, folder: Path) -> None:
    seen = Seen()

    @much
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_fields(server, fields, data, seen)
        check_retention(server, data, seen)
        check_routes(server, data, seen)

    check()
    print(f"\n{seen}")
    assert min(map(len, (seen.fields, seen.retention, seen.routes))) > 1, "everything was taken, or nothing"
    server.wait_until_idle()
    assert server.pages("free") == POOL
    assert not re.search("BrokenInvariant|EngineDeadError|AssertionError", server.log.read_text())
    if seen.faults:
        with serving(folder, [f"--model={model}", *STOCK_OPTIONS], model="small", command=STOCK) as stock:
            for name, body in seen.faults:
                assert ask(stock, name, body).status_code == 500, f"stock vLLM takes or refuses {body}"


def test_anything_in_a_request(
    small_server: Server, fields: dict[str, dict[str, Any]], small_model: Path, tmp_path: Path
) -> None:
    run(small_server, fields, SOME, small_model, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_very_many_requests(
    small_server: Server, fields: dict[str, dict[str, Any]], small_model: Path, tmp_path: Path
) -> None:
    run(small_server, fields, MANY, small_model, tmp_path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/tangram/sessions"),
        ("DELETE", "/v1/tangram/sessions"),
        ("DELETE", "/v1/tangram/sessions/abc"),
        ("GET", "/v1/tangram/memory?prompt_tokens=5"),
    ],
)
def test_our_routes_want_the_servers_key(method: str, path: str, small_server: Server) -> None:
    """As vLLM's own do; it says no more to who has none."""
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
        answer = small_server.http.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
        own = small_server.http.post("/v1/completions", json=VALID["CompletionRequest"], headers=headers)
        assert (own.status_code, own.json()) == (401, {"error": "Unauthorized"})
    assert small_server.http.request(method, path).status_code in (200, 404)
