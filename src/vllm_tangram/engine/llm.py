# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``LLM`` with head-group pages."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter

from vllm_tangram.config import TangramConfig
from vllm_tangram.engine.admission import request_memory
from vllm_tangram.engine.control import DROP, LIST, unknown_sessions
from vllm_tangram.engine.metrics import TangramStatLogger
from vllm_tangram.engine.options import split_options
from vllm_tangram.engine.ready import ready_options
from vllm_tangram.engine.setup import staging_pages
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's LLM takes these also as plain dictionaries or numbers and converts them; none decides what is checked.
_CONVERTED = {"compilation_config", "structured_outputs_config", "profiler_config", "attention_config"}


class LLM(vllm.LLM):
    """vLLM's offline engine; our options are keywords beside vLLM's.

    ::

        llm = LLM(model, retention=0.25, page_group_size=4, alpha=2.0)

    Without a profile one is made at first use and cached (``vllm_tangram.paths``). A request's own retention goes into
    ``SamplingParams(extra_args={"retention": 0.5})``.

    Args:
        model: path or name, as for vLLM.
        options: any option of ``TangramConfig`` and of vLLM's ``LLM``.

    Raises:
        TangramError: names the option or file that is wrong; no process is left behind.

    """

    def __init__(self, model: str, **options: Any) -> None:
        ours, vllms = split_options(options)
        _check_names(vllms)
        vllms.setdefault("disable_log_stats", False)
        name = str(model)
        ready = ready_options(TangramConfig.parse(ours), name, vllms, partial(self._build, name))
        super().__init__(name, **ready)
        self._page_log: TangramStatLogger | None = None
        if (manager := self.llm_engine.logger_manager) is not None:
            # The offline engine loads no logger plugins, and ours must see the statistics before vLLM's do.
            adapter = PerEngineStatLoggerAdapter(self.llm_engine.vllm_config, manager.engine_indexes, TangramStatLogger)
            manager.stat_loggers.insert(0, adapter)
            self._page_log = adapter.per_engine_stat_loggers[manager.engine_indexes[0]]

    @staticmethod
    def _build(model: str, options: dict[str, Any]) -> VllmConfig:
        """vLLM's configuration of an engine that is not started yet; what only ``LLM`` itself takes is left out."""
        known = {field.name for field in fields(EngineArgs)} - _CONVERTED
        arguments = {name: value for name, value in options.items() if name in known}
        return EngineArgs(model=model, **arguments).create_engine_config(UsageContext.LLM_CLASS)

    def tangram_stats(self) -> dict[str, float | int | None]:
        """The page pool after the last step.

        The fields of ``PageStats``, ``pages_staging`` and ``kv_retained_fraction``; empty before the first step.

        Raises:
            TangramError: the engine was started with ``disable_log_stats=True``.

        """
        if self._page_log is None:
            raise TangramError("tangram_stats() needs disable_log_stats=False")
        stats = self._page_log.last
        if stats is None:
            return {}
        return {
            **asdict(stats),
            "pages_staging": staging_pages(self.llm_engine.vllm_config),
            "kv_retained_fraction": stats.kept_fraction,
        }

    def tangram_memory(
        self, prompt_tokens: int, generated_tokens: int = 0, retention: float | None = None
    ) -> dict[str, float | int]:
        """What a request holds at its end, before it runs: see ``engine.admission.request_memory``."""
        return request_memory(self.llm_engine.vllm_config, prompt_tokens, generated_tokens, retention)

    def tangram_sessions(self) -> list[dict[str, Any]]:
        """The conversations and documents whose compressed state can be found, the last used first.

        Each has the fields of ``engine.sessions.Session`` and ``bytes``; sessions with a common beginning share its
        pages, and each counts them.

        Raises:
            TangramError: the engine was started with ``enable_prefix_caching=False``.

        """
        return list(self._call_engine(LIST))

    def tangram_drop_sessions(self, ids: Sequence[str] | None = None) -> int:
        """Forget sessions; what others begin with, too, stays. A request that runs is not disturbed.

        Args:
            ids: as ``tangram_sessions`` gives them; None: all.

        Returns:
            How many were forgotten.

        Raises:
            TangramError: there is no session with one of the ids, and nothing was forgotten; or as
                ``tangram_sessions``.

        """
        if isinstance(ids, str):
            raise TangramError(f"tangram_drop_sessions() takes a list of ids, got the text {ids!r}")
        dropped, unknown = self._call_engine(DROP, None if ids is None else list(ids))
        if unknown:
            raise TangramError(unknown_sessions(unknown))
        return int(dropped)

    def _call_engine(self, method: str, *args: Any) -> Any:
        if not self.llm_engine.vllm_config.cache_config.enable_prefix_caching:
            raise TangramError("there are no sessions: the engine was started with enable_prefix_caching=False")
        core = self.llm_engine.engine_core
        if isinstance(core, InprocClient):
            return getattr(core.engine_core, method)(*args)
        return core.call_utility(method, *args)


def _check_names(options: dict[str, Any]) -> None:
    known = {field.name for field in fields(EngineArgs)} | set(inspect.signature(vllm.LLM.__init__).parameters)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known | set(TangramConfig.model_fields), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TangramError(f"unknown option {name!r}{hint}")
