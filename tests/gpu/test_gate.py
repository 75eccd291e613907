# SPDX-License-Identifier: Apache-2.0
"""Scores of a gate on a GPU, from products of 16 bits, against float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.compression.gates import untrained_gate
from torch import Tensor

import vllm_tangram
from vllm_tangram.compression.gate import Gate
from vllm_tangram.compression.split_gate import SplitGate

SHIPPED = Path(vllm_tangram.__file__).parent / "gates_data" / "smollm2-135m-instruct.safetensors"
#: Qwen3-4B's shapes, but for the number of layers.
QWEN3 = {"num_hidden_layers": 2, "num_key_value_heads": 8, "num_attention_heads": 32, "hidden_size": 2560}


def best(scores: Tensor, count: int) -> Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(count).indices, True)


@pytest.mark.parametrize("num_tokens", [1, 100, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen3-4b", "shipped"])
def test_scores_are_those_of_float32(name: str, dtype: torch.dtype, num_tokens: int) -> None:
    gate = Gate.load(SHIPPED) if name == "shipped" else untrained_gate(QWEN3)
    split = gate.placed("cuda", dtype)
    assert isinstance(split, SplitGate)
    for layer in {0, gate.num_layers - 1}:
        sizes = 0.1 + 2 * torch.rand(num_tokens, 1)
        hidden = (sizes * torch.randn(num_tokens, gate.hidden_size)).to(dtype)
        scores, expected = split.scores(layer, hidden.cuda()).cpu(), gate.scores(layer, hidden)
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
        count = -(-num_tokens // 4)
        same = (best(scores, count) & best(expected, count)).sum(1)
        assert (same >= count - max(1, count // 1000)).all()


def test_scoring_does_not_wait_for_the_gpu() -> None:
    gate = untrained_gate(QWEN3).placed("cuda", torch.bfloat16)
    hidden = torch.randn(500, QWEN3["hidden_size"], device="cuda", dtype=torch.bfloat16)
    expected = gate.scores(0, hidden)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores = gate.scores(0, hidden)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(scores, expected)


def test_float32_models_have_the_plain_gate() -> None:
    gate = untrained_gate(QWEN3)
    placed, hidden = gate.placed("cuda", torch.float32), torch.randn(100, QWEN3["hidden_size"])
    assert isinstance(placed, Gate)
    torch.testing.assert_close(placed.scores(1, hidden.cuda()).cpu(), gate.scores(1, hidden), rtol=0, atol=1e-5)
