# SPDX-License-Identifier: Apache-2.0
"""Engines on a GPU, in this process. Everything here is skipped without one; CONTRIBUTING.md says how it is run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import pytest
import torch
from tests.engine.drive import Engine

COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.05,  # what vLLM wants to see free; the pools below are stated in bytes
    "kv_cache_memory_bytes": 512 << 20,
    "max_model_len": 8192,
    "max_num_seqs": 32,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def make_engine(embedded: Path) -> Iterator[Callable[..., Engine]]:
    """Start (or reuse) an engine on the embedded model; ``stock=True`` gives vLLM's own ``LLM``."""
    engines: dict[str, Engine] = {}

    def make(*, stock: bool = False, **options: Any) -> Engine:
        key = repr((stock, sorted(options.items())))
        if key not in engines:
            merged = {**COMMON, **options}
            if stock:
                import vllm

                engines[key] = Engine(vllm.LLM(str(embedded), enable_prefix_caching=False, **merged))
            else:
                import vllm_tangram

                engines[key] = Engine(vllm_tangram.LLM(str(embedded), **merged))
        return engines[key]

    yield make
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="session")
def token_ids(embedded: Path) -> list[int]:
    """A long real text, tokenised."""
    import pydoc_data.topics

    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(str(embedded)).encode("\n".join(pydoc_data.topics.topics.values()))
    return list(ids)
