# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of one node without GPUs, and vLLM made to take it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

os.environ.setdefault("RAY_CGRAPH_get_timeout", "300")  # seconds for a step of a compiled graph; read at Ray's import


def allow_ray() -> None:
    """Name a device of Ray for vLLM's CPU platform, which has none and so refuses Ray; all else is vLLM's own.

    Every process of the cluster calls it.
    """
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


@contextmanager
def ray_cluster(num_ranks: int, *, compiled_graph: bool) -> Iterator[None]:
    """Start a cluster that believes to have a GPU for each rank; skips where Ray is not installed.

    Args:
        num_ranks: that an engine will have.
        compiled_graph: whether vLLM is to use its older executor, which runs steps as a compiled graph of Ray.

    """
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.platforms.cpu.CpuPlatform.ray_device_key", "")  # so that it is set back in the end
        patch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0" if compiled_graph else "1")
        allow_ray()
        ray.init(
            num_cpus=num_ranks,
            num_gpus=num_ranks,
            include_dashboard=False,
            runtime_env={
                "env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)},  # workers import the tests' functions
                "worker_process_setup_hook": f"{__name__}.{allow_ray.__name__}",
            },
        )
        try:
            yield
        finally:
            ray.shutdown()
