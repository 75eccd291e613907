# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with our runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_tangram.engine.compat import check_supported, check_vllm
from vllm_tangram.engine.cpu.runner import TangramCPUModelRunner
from vllm_tangram.engine.profiling import ScoreObserver
from vllm_tangram.engine.setup import layout_of, staging_pages
from vllm_tangram.errors import TangramError


class TangramCPUWorker(CPUWorker):
    """Builds our runner, keeps memory for the staging pages and answers the profiler's calls."""

    model_runner: TangramCPUModelRunner

    def init_device(self) -> None:
        check_vllm()
        check_supported(self.vllm_config)
        if self.use_v2_model_runner:
            raise TangramError("vllm-tangram serves the CPU through vLLM's V1 runner: set VLLM_USE_V2_MODEL_RUNNER=0")
        super().init_device()
        self.model_runner = TangramCPUModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """What vLLM would give the KV cache, less the staging pages: both together never exceed what was asked for."""
        staging = staging_pages(self.vllm_config) * layout_of(self.vllm_config).page_bytes
        available = int(super().determine_available_memory())
        if available <= staging:
            raise TangramError(
                f"--kv-cache-memory-bytes gives {available} bytes, but the scratch pages of a step take {staging}: "
                "raise it, or lower --chunk-size, --max-num-batched-tokens or --max-num-seqs"
            )
        return available - staging

    def tangram_start_profile(self, retentions: list[float]) -> None:
        """Score every prompt from now on and let its tokens compete for each of ``retentions``."""
        self.model_runner.observer = ScoreObserver(self.vllm_config, retentions)

    def tangram_take_profile(self) -> list[Any]:
        """End the profile: kept fractions per sample, ``[S][R][L][H]`` nested lists."""
        observer, self.model_runner.observer = self.model_runner.observer, None
        assert observer is not None, "no profile was started"
        return observer.kept_fractions()
