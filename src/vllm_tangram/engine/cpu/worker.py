# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with our runner."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_tangram.engine.compat import check_supported, check_vllm
from vllm_tangram.engine.cpu.runner import TangramCPUModelRunner
from vllm_tangram.engine.host import SpillingWorker
from vllm_tangram.engine.profiling import ProfilingWorker
from vllm_tangram.engine.setup import layout_of, staging_pages
from vllm_tangram.errors import TangramError


class TangramCPUWorker(ProfilingWorker, SpillingWorker, CPUWorker):
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
