# SPDX-License-Identifier: Apache-2.0
"""Two GPUs at retention 1 against stock vLLM on the same two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from tests.engine.drive import Engine
from tests.gpu.conftest import COMMON
from tests.gpu.test_engine import CHUNK, difference, run
from tests.models import make_checkpoint

import vllm_tangram

LENGTHS = (5, 700, 5000)
MODEL: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 512}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_retention_one_is_stock(tmp_path: Path) -> None:
    """Within the noise between stock vLLM's own CUDA graphs and its eager mode."""
    checkpoint = make_checkpoint(tmp_path, initializer_range=0.05, max_position_embeddings=8192, **MODEL)
    options = {**COMMON, "tensor_parallel_size": 2}
    prompts = [[(7 * number + number // 3) % 256 for number in range(length)] for length in LENGTHS]

    def answers(engine: Engine) -> list[Any]:
        try:
            return [run(engine, prompt) for prompt in prompts]
        finally:
            engine.close()

    graphs = answers(Engine(vllm.LLM(str(checkpoint), enable_prefix_caching=False, **options)))
    eager = answers(Engine(vllm.LLM(str(checkpoint), enable_prefix_caching=False, enforce_eager=True, **options)))
    ours = answers(Engine(vllm_tangram.LLM(str(checkpoint), retention=1.0, chunk_size=CHUNK, **options)))
    for stock, noise, mine in zip(graphs, eager, ours, strict=True):
        assert difference(mine, stock) <= 2 * difference(noise, stock) + 0.005
