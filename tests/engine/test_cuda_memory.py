# SPDX-License-Identifier: Apache-2.0
"""What of a GPU's memory is left for pages."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compression.documents import random_scores
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from tests.engine.test_cuda_attention import CHUNK, DIM, HEADS, RATIO, Engine, Request
from vllm.v1.attention.backends import fa_utils
from vllm.v1.worker.gpu_worker import Worker

from vllm_tangram.engine.cuda.attention import HeadGroupCUDAAttention
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


def flash_attention(q: torch.Tensor, *_: Any, out: torch.Tensor | None = None, **__: Any) -> tuple[torch.Tensor, ...]:
    """What FlashAttention allocates, and no more."""
    return torch.zeros_like(q) if out is None else out, torch.zeros(q.shape[1], len(q))


def peak(run: Callable[[], object]) -> int:
    """Most bytes that were allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), default=0)


@pytest.mark.parametrize("scorer", ["keydiff", "snapkv"])
def test_the_profiled_step_takes_the_memory_of_a_full_one(scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole chunks of a prompt that goes on, as many as a step takes, but for the list of the pages before them."""
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    monkeypatch.setattr(Engine, "_check", lambda *_: None)
    peaks: list[int] = []
    forward = HeadGroupCUDAAttention.forward

    def measured(self: HeadGroupCUDAAttention, *args: Any) -> torch.Tensor:
        peaks.append(peak(lambda: forward(self, *args)))
        return args[-1]

    monkeypatch.setattr(HeadGroupCUDAAttention, "forward", measured)
    engine = Engine(4, scorer)
    request = Request(1, 4 * CHUNK, 0.5, torch.Generator().manual_seed(1))
    engine.admit(request)
    engine.step([request])
    request.chunks_per_step = 3
    engine.step([request])
    assert request.computed == 4 * CHUNK
    query, key, value = (torch.randn(3 * CHUNK, heads, DIM) for heads in (HEADS * RATIO, HEADS, HEADS))
    layer = engine.layers[0]
    layer.forward(None, query, key, value, engine.pool, None, torch.empty_like(query))
    *_, full, _, profiled = peaks
    assert 0.95 * full <= profiled <= 1.05 * full
