# SPDX-License-Identifier: Apache-2.0
"""Sessions of a running engine, listed and dropped: the way from the front end to the scheduler.

The engine core may be another process. What vLLM calls there by name must be a method of its ``EngineCore``, and routes
of its server come from endpoint plugins: both are added in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import vllm.plugins
from vllm.v1.engine.core import EngineCore

if TYPE_CHECKING:
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

#: Methods that engine cores have from ``install_session_calls`` on; those of other engines than ours fail.
LIST, DROP = "tangram_sessions", "tangram_drop_sessions"

_MARK = "_adds_tangram_endpoints"


def install_session_calls() -> None:
    """Let a front end call ``LIST`` and ``DROP`` (``SessionCache.listing`` and ``drop``). Safe to call again."""

    def list_sessions(self: EngineCore) -> list[dict[str, Any]]:
        return self.scheduler.list_sessions()

    def drop_sessions(self: EngineCore, session_ids: list[str] | None) -> tuple[int, list[str]]:
        return self.scheduler.drop_sessions(session_ids)

    setattr(EngineCore, LIST, list_sessions)
    setattr(EngineCore, DROP, drop_sessions)


def install_endpoints() -> None:
    """Give servers of our engines the routes of ``engine.endpoints``. Safe to call again.

    vLLM loads endpoint plugins only where ``VLLM_PLUGINS`` names them, which would switch other plugins off; whoever
    starts our server has asked for ours.
    """
    original = vllm.plugins.load_endpoint_plugins
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def load_endpoint_plugins(*args: Any, **kwargs: Any) -> list[EndpointPlugin]:
        from vllm_tangram.engine.endpoints import TangramEndpoints

        return [*original(*args, **kwargs), TangramEndpoints()]

    setattr(load_endpoint_plugins, _MARK, True)
    vllm.plugins.load_endpoint_plugins = load_endpoint_plugins


def unknown_sessions(session_ids: Sequence[str]) -> str:
    """What to tell who named them."""
    return (
        f"there is no session {', '.join(session_ids)}: it ended, or went on under another id; list them to see which "
        "there are"
    )
