# SPDX-License-Identifier: Apache-2.0
"""vLLM's ``LLM`` with head-group pages."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import vllm
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter

from vllm_tangram.config import TangramConfig
from vllm_tangram.engine.metrics import TangramStatLogger
from vllm_tangram.engine.options import engine_options, split_options
from vllm_tangram.engine.resolve import resolve_profile
from vllm_tangram.engine.setup import staging_pages
from vllm_tangram.errors import TangramError


class LLM(vllm.LLM):
    """vLLM's offline engine; our options are keywords beside vLLM's.

    ::

        llm = LLM(model, retention=0.25, scorer="snapkv", profile=None, page_group_size=4, alpha=2.0)

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
        config = resolve_profile(TangramConfig.parse(ours), str(model), vllms)
        vllms.setdefault("disable_log_stats", False)
        super().__init__(str(model), **engine_options(config, vllms))
        self._page_log: TangramStatLogger | None = None
        if (manager := self.llm_engine.logger_manager) is not None:
            # The offline engine loads no logger plugins, and ours must see the statistics before vLLM's do.
            adapter = PerEngineStatLoggerAdapter(self.llm_engine.vllm_config, manager.engine_indexes, TangramStatLogger)
            manager.stat_loggers.insert(0, adapter)
            self._page_log = adapter.per_engine_stat_loggers[manager.engine_indexes[0]]

    def tangram_stats(self) -> dict[str, float | int | None]:
        """The page pool after the last step: the fields of ``PageStats``, ``pages_staging`` and "
        "``kv_retained_fraction``.

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
