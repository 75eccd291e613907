# SPDX-License-Identifier: Apache-2.0
"""What the GPU does, by kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable


def gpu_kernels(run: Callable[[], object]) -> dict[str, float]:
    """GPU seconds by kernel while ``run`` runs, under the profiler; empty without CUDA."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return {
        event.key: 1e-6 * event.self_device_time_total
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    }


def own_kernels() -> set[str]:
    """Names of the Triton kernels in this package's loaded modules."""
    modules = [module for name, module in sys.modules.items() if name.startswith("vllm_tangram.")]
    values = [value for module in modules for value in vars(module).values()]
    return {value.__name__ for value in values if type(value).__name__ == "JITFunction"}
