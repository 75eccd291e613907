# SPDX-License-Identifier: Apache-2.0
"""``tangram sessions``: the conversations and documents that a running server holds compressed."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from vllm_tangram.cli.rendering import console, human_bytes, print_json, table
from vllm_tangram.errors import TangramError

app = typer.Typer(help="List the conversations that a server holds compressed, or drop some.")

_Url = Annotated[str, typer.Option(help="The server's OpenAI API; OPENAI_API_KEY is its key.")]
_URL = "http://127.0.0.1:8000/v1"
_SECONDS = 30
_NO_VLLM = "{} is no server of vLLM: give --url, with /v1 at its end"


@app.callback(invoke_without_command=True)
def sessions(
    ctx: typer.Context,
    url: _Url = _URL,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the conversations and documents that a server holds compressed, or drop some.

    A session is what the next turn of a conversation, or another question about a document, begins with. Sessions with
    a common beginning share its pages, and each counts them. Where: in the KV pool, in host memory (--session-spill-gib
    of the server), or how much of it in host memory. Hits are requests that began with it or a part of it.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = url
        return
    listed = _list(url)
    if json:
        print_json({"sessions": listed})
        return
    rows = [
        [
            session["id"],
            f"{session['tokens']:,}",
            f"{session['retention']:g}",
            f"{session['pages']:,}",
            human_bytes(session["bytes"]),
            _place(session["spilled_pages"], session["pages"]),
            _duration(session["idle_seconds"]),
            str(session["hits"]),
        ]
        for session in listed
    ]
    columns = ["id", "tokens", "retention", "pages", "bytes", "where", "idle", "hits"]
    console().print(table(f"Sessions at {url}", columns, rows) if rows else f"no sessions at {url}")


@app.command()
def drop(
    ctx: typer.Context,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Which.", show_default=False)] = None,
    all_: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    url: Annotated[str | None, typer.Option(help="The server's OpenAI API.", show_default=_URL)] = None,
) -> None:
    """Forget sessions: their next turns are computed from the beginning."""
    if bool(ids) == all_:
        raise TangramError("say which sessions to drop: their ids, or --all")
    url = url or ctx.obj
    listed = {session["id"] for session in _list(url)}
    if all_:
        dropped = _request("DELETE", url)["dropped"]
    else:
        wanted = dict.fromkeys(ids or ())
        if unknown := [session_id for session_id in wanted if session_id not in listed]:
            raise TangramError(f"there is no session {', '.join(unknown)} at {url}; nothing was dropped")
        dropped = sum(_request("DELETE", url, f"/{session_id}")["dropped"] for session_id in wanted)
    console().print(f"{dropped} dropped")


def _list(url: str) -> list[dict[str, Any]]:
    answer = _request("GET", url)
    if not isinstance(answer, dict) or "data" not in answer:
        raise TangramError(_NO_VLLM.format(url))
    return list(answer["data"])


def _request(method: str, url: str, path: str = "") -> Any:
    """What the server answers.

    Raises:
        TangramError: nobody answers, the server refuses, or it has no sessions.

    """
    import httpx

    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'EMPTY')}"}
    try:
        response = httpx.request(method, f"{url.rstrip('/')}/tangram/sessions{path}", headers=headers, timeout=_SECONDS)
        answer = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TangramError(
            f"no server answers at {url} ({error}): start one with `tangram serve MODEL`, or give its --url"
        ) from error
    except ValueError as error:
        raise TangramError(_NO_VLLM.format(url)) from error
    if response.is_success:
        return answer
    if response.status_code == 401:
        raise TangramError(f"the server at {url} wants its API key: set OPENAI_API_KEY")
    if response.status_code == 404 and not path:
        raise TangramError(
            f"the server at {url} keeps no sessions: it is no `tangram serve`, or was started with "
            "--no-enable-prefix-caching, or --url lacks the /v1 at its end"
        )
    raise TangramError(f"the server at {url} refused: {_reason(answer) or response.reason_phrase}")


def _reason(answer: Any) -> str | None:
    error = answer.get("error") if isinstance(answer, dict) else None
    return error.get("message") if isinstance(error, dict) else None


def _place(spilled_pages: int, pages: int) -> str:
    """``(3, 4)`` -> ``"host 75 %"``."""
    if not spilled_pages:
        return "pool"
    return "host" if spilled_pages == pages else f"host {100 * spilled_pages / pages:.0f} %"


def _duration(seconds: float) -> str:
    """``75`` -> ``"1 min"``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
