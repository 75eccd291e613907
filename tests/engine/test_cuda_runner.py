# SPDX-License-Identifier: Apache-2.0
"""What the CUDA runner tells the kernels, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_tangram.engine.cuda import runner as module
from vllm_tangram.engine.cuda.runner import TangramGPUModelRunner

ROWS = 8


def test_slots_of_rows_are_copied_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever batches and dummy batches follow each other, the device has the slots of the last one."""
    copied: list[list[int]] = []

    def copy(slots: Any, out: torch.Tensor) -> None:
        copied.append(slots.tolist())
        out.copy_(torch.from_numpy(slots))

    monkeypatch.setattr(module, "async_tensor_h2d", copy)
    monkeypatch.setattr(GPUModelRunner, "prepare_dummy_attn", lambda self, batch: None)
    runner: Any = TangramGPUModelRunner.__new__(TangramGPUModelRunner)
    runner.requests = torch.full((ROWS,), -1, dtype=torch.int32)
    runner._slots = np.full(ROWS, -1, np.int32)
    runner.block_tables = SimpleNamespace(
        block_tables=[SimpleNamespace(gpu=torch.zeros(ROWS, 4))], slot_mappings=torch.zeros(1, 64)
    )
    random = np.random.default_rng(0)
    rows = padded = 0
    for _ in range(500):
        choice = random.integers(4)
        if choice == 0:
            runner.prepare_dummy_attn(None)
            assert runner.requests.tolist() == [-1] * ROWS
            continue
        if choice == 1 or not rows:
            rows = int(random.integers(1, ROWS + 1))
            padded = int(random.integers(rows, ROWS + 1))
            slots = random.permutation(ROWS)[:rows]
        before = len(copied)
        was = runner.requests[:padded].tolist()
        batch = SimpleNamespace(
            num_reqs=rows, num_reqs_after_padding=padded, idx_mapping_np=slots, num_tokens_after_padding=padded
        )
        runner.prepare_attn(batch)
        assert runner.requests[:padded].tolist() == [*slots.tolist(), *[-1] * (padded - rows)]
        assert len(copied) == before + (was != runner.requests[:padded].tolist())
    assert 100 < len(copied) < 350
