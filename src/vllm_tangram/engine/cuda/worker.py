# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with our runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_tangram.engine.compat import check_supported, check_vllm
from vllm_tangram.engine.cuda.runner import TangramGPUModelRunner
from vllm_tangram.engine.host import SpillingWorker
from vllm_tangram.engine.profiling import ProfilingWorker
from vllm_tangram.errors import TangramError


class TangramGPUWorker(ProfilingWorker, SpillingWorker, Worker):
    """Builds our runner, keeps memory for what finds pages, and answers the profiler's calls."""

    model_runner: TangramGPUModelRunner

    def init_device(self) -> None:
        check_vllm()
        check_supported(self.vllm_config)
        if not self.use_v2_model_runner:
            raise TangramError(
                "vllm-tangram serves CUDA through vLLM's V2 model runner, which this configuration does not use: unset "
                "VLLM_USE_V2_MODEL_RUNNER, or see vLLM's warning above for the option that forbids it"
            )
        super().init_device()

    def _make_model_runner(self) -> TangramGPUModelRunner:
        return TangramGPUModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        with torch.inference_mode():
            self.model_runner.warm_up_prefill()
        return super().compile_or_warm_up_model()

    def determine_available_memory(self) -> int:
        """What vLLM would give the KV cache, less our tables; memory that the user states goes to pages alone.

        Scores of documents are on the device already, so vLLM has seen them.
        """
        available = int(super().determine_available_memory())
        if self.cache_config.kv_cache_memory_bytes:
            return available
        return available - self.model_runner.table_bytes()
