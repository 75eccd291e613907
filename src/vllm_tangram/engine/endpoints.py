# SPDX-License-Identifier: Apache-2.0
"""Routes of our server beside vLLM's. They begin with /v1, which vLLM guards with its API key if it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request

from vllm_tangram.engine.admission import request_memory
from vllm_tangram.engine.control import DROP, LIST, unknown_sessions
from vllm_tangram.engine.setup import OPTIONS_KEY
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    import argparse

_MEMORY = "/v1/tangram/memory"
_SESSIONS = "/v1/tangram/sessions"


class TangramEndpoints:
    """vLLM's ``EndpointPlugin`` that foretells a request's memory, and lists and drops sessions.

    ``GET /v1/tangram/memory?prompt_tokens=P&generated_tokens=N&retention=R`` answers ``request_memory``; without the
    last two for no generated token and the server's retention. ``GET /v1/tangram/sessions`` lists sessions
    (``LLM.tangram_sessions``), ``DELETE`` on it drops all, on ``/v1/tangram/sessions/{id}`` one; 404 where there is
    none with this id.
    """

    name = "tangram"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes if the server's engine is ours; those of sessions if it keeps any."""
        args = app.state.args
        if OPTIONS_KEY not in (args.additional_config or {}):
            return
        app.add_api_route(_MEMORY, _memory, methods=["GET"])
        if args.enable_prefix_caching:
            app.add_api_route(_SESSIONS, _list, methods=["GET"])
            app.add_api_route(_SESSIONS, _drop_all, methods=["DELETE"])
            # Any path: a server redirects what ends in a slash, and without an id that would drop all.
            app.add_api_route(_SESSIONS + "/{session_id:path}", _drop, methods=["DELETE"])

    async def init_state(self, engine_client: Any, state: Any, args: argparse.Namespace) -> None:
        """Nothing: routes find the engine in vLLM's own state."""


async def _memory(
    request: Request, prompt_tokens: int, generated_tokens: int = 0, retention: float | None = None
) -> dict[str, float | int]:
    config = request.app.state.engine_client.vllm_config
    try:
        return request_memory(config, prompt_tokens, generated_tokens, retention)
    except TangramError as error:
        raise HTTPException(400, str(error)) from error


async def _list(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": await _call(request, LIST)}


async def _drop(request: Request, session_id: str) -> dict[str, int]:
    dropped, unknown = await _call(request, DROP, [session_id])
    if unknown:
        raise HTTPException(404, unknown_sessions(unknown))
    return {"dropped": dropped}


async def _drop_all(request: Request) -> dict[str, int]:
    dropped, _ = await _call(request, DROP, None)
    return {"dropped": dropped}


async def _call(request: Request, method: str, *args: Any) -> Any:
    return await request.app.state.engine_client.engine_core.call_utility_async(method, *args)
