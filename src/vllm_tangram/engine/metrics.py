# SPDX-License-Identifier: Apache-2.0
"""Our figures beside vLLM's: from the scheduler's process to Prometheus and to ``LLM.tangram_stats()``.

They travel in vLLM's own per-step ``SchedulerStats``, in its one open dictionary of integers, and are taken out again
before vLLM's loggers look at it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_tangram.engine.setup import OPTIONS_KEY, staging_pages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

_PREFIX = "tangram:"


@dataclass(frozen=True)
class PageStats:
    """The page pool at one moment; all values are counts of pages unless said otherwise.

    Attributes:
        pages_in_use: taken from the pool.
        pages_free: can be taken now.
        pages_held: by requests that are running, a shared page once for each; without sharing, ``pages_in_use``.
        pages_kept: what the eviction schedules say those requests must hold at their present lengths.
        pages_full_kv: what the same requests would hold at full KV.
        pages_waiting: need of the requests that wait.
        pages_reclaimed: pages that became unnecessary before their request ended, since start; the design keeps it 0.
        preemptions: since start.
        page_bytes: bytes of one page, on all ranks together.
        sessions: compressed prefixes (checkpoints) that can be found; a session is a chain of them.
        sessions_reused: how often a request began with one, also again after a preemption, since start.
        sessions_evicted: checkpoints that were lost because their pages were handed out again, since start.
        sessions_spilled: checkpoints that host memory has a copy of; some may be in the pool, too.
        sessions_restored: how often a request began with pages from host memory, since start; also where that failed.
        host_pages_in_use: pages in host memory.

    """

    pages_in_use: int
    pages_free: int
    pages_held: int
    pages_kept: int
    pages_full_kv: int
    pages_waiting: int
    pages_reclaimed: int
    preemptions: int
    page_bytes: int
    sessions: int
    sessions_reused: int
    sessions_evicted: int
    sessions_spilled: int
    sessions_restored: int
    host_pages_in_use: int

    def attach(self, stats: SchedulerStats) -> None:
        """Put the figures into vLLM's per-step statistics."""
        stats.num_kv_fetch_reqs_by_stage.update({_PREFIX + name: value for name, value in vars(self).items()})

    @classmethod
    def detach(cls, stats: SchedulerStats) -> PageStats | None:
        """Take them out again; None if the engine is not ours."""
        carrier = stats.num_kv_fetch_reqs_by_stage
        names = [name for name in carrier if name.startswith(_PREFIX)]
        return cls(**{name.removeprefix(_PREFIX): carrier.pop(name) for name in names}) if names else None

    @property
    def kept_fraction(self) -> float | None:
        """Pages held over full KV of the requests that run now; None when none does."""
        return self.pages_held / self.pages_full_kv if self.pages_full_kv else None


#: Series with one value for the pool: name, what it says, value. Totals are gauges too: with several API servers each
#: sees some of the steps, and increments would be lost.
_SERIES: tuple[tuple[str, str, Callable[[PageStats], float]], ...] = (
    ("page_bytes", "Bytes of a page, on all ranks together.", lambda stats: stats.page_bytes),
    (
        "kv_retained_fraction",
        "Pages held by running requests over what full KV would hold.",
        lambda stats: stats.kept_fraction or 0.0,
    ),
    ("waiting_pages", "Page need of waiting requests.", lambda stats: stats.pages_waiting),
    ("preemptions", "Requests preempted since start.", lambda stats: stats.preemptions),
    (
        "pages_reclaimed",
        "Pages returned before their request ended since start; the design keeps it 0.",
        lambda stats: stats.pages_reclaimed,
    ),
    ("sessions", "Compressed prefixes that can be found.", lambda stats: stats.sessions),
    (
        "sessions_reused",
        "Requests that began with a compressed prefix since start.",
        lambda stats: stats.sessions_reused,
    ),
    ("sessions_evicted", "Compressed prefixes lost to page reuse since start.", lambda stats: stats.sessions_evicted),
    ("sessions_spilled", "Compressed prefixes that host memory has a copy of.", lambda stats: stats.sessions_spilled),
    (
        "sessions_restored",
        "Requests that began with pages from host memory since start.",
        lambda stats: stats.sessions_restored,
    ),
    (
        "host_bytes",
        "Host memory that compressed prefixes take.",
        lambda stats: stats.host_pages_in_use * stats.page_bytes,
    ),
)


class _Gauges:
    """Prometheus series, made once per process (the registry refuses a second definition)."""

    _instance: _Gauges | None = None

    def __init__(self) -> None:
        def gauge(name: str, says: str, *labels: str) -> Gauge:
            return Gauge(_PREFIX + name, says, ["model_name", "engine", *labels], multiprocess_mode="mostrecent")

        self.pages = gauge("pages", "KV pages by state.", "state")
        self.series = [(gauge(name, says), value) for name, says, value in _SERIES]

    @classmethod
    def get(cls) -> _Gauges:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance


class TangramStatLogger(StatLoggerBase):
    """vLLM loads it in every front end (entry point ``vllm.stat_logger_plugins``); idle unless the engine is ours."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.last: PageStats | None = None
        self.enabled = OPTIONS_KEY in (vllm_config.additional_config or {})
        if self.enabled:
            self.labels = (vllm_config.model_config.served_model_name, engine_index)
            self.staging = staging_pages(vllm_config)
            self.gauges = _Gauges.get()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        stats = PageStats.detach(scheduler_stats) if scheduler_stats is not None else None
        if stats is None or not self.enabled:
            return
        self.last = stats
        gauges, labels = self.gauges, self.labels
        for state, value in (("in_use", stats.pages_in_use), ("free", stats.pages_free), ("staging", self.staging)):
            gauges.pages.labels(*labels, state).set(value)
        for gauge, value_of in gauges.series:
            gauge.labels(*labels).set(value_of(stats))

    def log_engine_initialized(self) -> None:
        """Nothing to say beyond the scheduler's own line."""
