# SPDX-License-Identifier: Apache-2.0
"""What of a GPU's memory is left for pages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.compression.documents import random_scores

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from vllm.v1.worker.gpu_worker import Worker

from vllm_tangram.engine.cuda.worker import TangramGPUWorker
from vllm_tangram.engine.known import KnownPrompts


@pytest.mark.parametrize(("stated", "left"), [(None, 9_000), (10_000, 10_000)])
def test_tables_alone_are_still_to_be_allocated(stated: int | None, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of documents are not: they came with the weights, and vLLM measured after that."""
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 10_000)
    worker = TangramGPUWorker.__new__(TangramGPUWorker)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=stated)
    document = random_scores(range(64), {"num_hidden_layers": 2, "num_key_value_heads": 3})
    worker.model_runner = SimpleNamespace(table_bytes=lambda: 1_000, known=KnownPrompts([document]))
    assert worker.determine_available_memory() == left
