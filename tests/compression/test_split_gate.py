# SPDX-License-Identifier: Apache-2.0
"""Weights split in two, and the kernel, against the gate in float32; without a GPU in Triton's interpreter.

There a product of 16-bit numbers that is added up in float32 does not exist; float64 stands in for it.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compression.gates import MODEL, untrained_gate
from torch import Tensor

from vllm_tangram.compression.gate import Gate, GateWeights
from vllm_tangram.compression.split_gate import SplitGate, SplitWeights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALVES = [torch.bfloat16, torch.float16]
#: What two parts leave out of a weight, at most.
LOST = {torch.bfloat16: 2**-17, torch.float16: 2**-23}


@pytest.fixture(autouse=True)
def products_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def project(self: SplitWeights, hidden: Tensor) -> Tensor:
        return (hidden.double() @ self.parts.T.double()).float()

    if DEVICE.type == "cpu":
        monkeypatch.setattr(SplitWeights, "project", project)


def random_weights(num_heads: int, group: int, inner: int, num_sinks: int, width: int = 24) -> GateWeights:
    """Of one layer."""
    return GateWeights(
        q_weight=torch.randn(num_heads * group * inner, width),
        q_bias=torch.randn(num_heads * group * inner),
        k_weight=torch.randn(num_heads * inner, width),
        q_norm=1 + 0.3 * torch.randn(inner),
        k_norm=1 + 0.3 * torch.randn(inner),
        k_base=torch.randn(num_heads, num_sinks, inner),
        bias=torch.randn(num_heads, group),
    ).map(lambda tensor: tensor.to(DEVICE))


@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "group", "inner", "num_sinks"),
    [
        (1, 1, 1, 8, 8),
        (1, 8, 4, 16, 16),
        (17, 3, 3, 8, 16),
        (17, 8, 1, 16, 5),
        (64, 2, 2, 12, 10),
        (300, 3, 7, 16, 16),
        (300, 1, 4, 5, 1),
        (65, 1, 2, 64, 33),
    ],
)
def test_scores_equal_the_float32_gate(
    num_tokens: int, num_heads: int, group: int, inner: int, num_sinks: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights = random_weights(num_heads, group, inner, num_sinks)
    step = torch.randn(3 + num_tokens, 24, device=DEVICE).to(dtype)
    hidden = step[3:]  # of a step's buffer
    scores = SplitWeights.of(weights, dtype).scores(hidden)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, weights.scores(hidden), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's; wanted here
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
def test_extreme_weights_score_as_in_float32(dtype: torch.dtype) -> None:
    """Logits of some thousands, whose exponentials float32 cannot hold."""
    torch.manual_seed(0)
    weights = random_weights(2, 3, 8, 5).map(lambda tensor: 30 * tensor)
    hidden = torch.randn(40, 24, device=DEVICE).to(dtype)
    scores, expected = SplitWeights.of(weights, dtype).scores(hidden), weights.scores(hidden)
    assert (expected == 0).any()
    assert (expected > 0.3).any()
    # A logit's error grows with it.
    torch.testing.assert_close(scores, expected, rtol=0, atol=5e-2)
    assert ((scores - expected).abs() < 1e-4).float().mean() > 0.9


@given(exponent=st.integers(-90, 100), seed=st.integers(0, 2**31), dtype=st.sampled_from(HALVES))
def test_parts_add_up_to_the_weights(exponent: int, seed: int, dtype: torch.dtype) -> None:
    """Of whatever size: float16 itself can hold neither 2**100 nor what rounding leaves over of 2**-15."""
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights(2, 3, 4, 2, width=9)
    draw = torch.randn(2, 4 * 4, 9, generator=generator).to(DEVICE) * 2.0**exponent
    query, key = draw[:, : 3 * 4].reshape(-1, 9), draw[:, 3 * 4 :].reshape(-1, 9)
    split = SplitWeights.of(GateWeights(**{**weights.tensors(), "q_weight": query, "k_weight": key}), dtype)
    assert split.parts.isfinite().all()
    total = split.unscale * split.parts.double().view(2, 2 * 16, 9).sum(0)
    rows = draw.flatten(0, 1).double()
    error, most = (total - rows).abs(), rows.abs().max()
    assert (error <= rows.abs() * LOST[dtype] + most * 2.0**-38).all()


@pytest.mark.parametrize(("rounded", "parts"), [(torch.float16, (2, 1)), (torch.bfloat16, (1, 1))])
def test_weights_of_16_bits_are_exact_and_take_no_more_parts_than_needed(
    rounded: torch.dtype, parts: tuple[int, int]
) -> None:
    weights = random_weights(2, 3, 4, 2).map(lambda tensor: tensor.to(rounded).float())
    rows = torch.cat([weights.q_weight.view(2, 12, -1), weights.k_weight.view(2, 4, -1)], 1).flatten(0, 1)
    for dtype, wanted in zip(HALVES, parts, strict=True):
        split = SplitWeights.of(weights, dtype)
        found = split.parts.float().view(-1, 2 * 16, 24)
        assert len(found) == wanted
        assert torch.equal(split.unscale * found.sum(0), rows)


def test_weights_that_are_zero_leave_the_bias() -> None:
    weights = random_weights(1, 2, 4, 3)
    weights = GateWeights(**{**weights.tensors(), "q_weight": 0 * weights.q_weight, "k_weight": 0 * weights.k_weight})
    hidden = torch.randn(5, 24, device=DEVICE).bfloat16()
    scores = SplitWeights.of(weights, torch.bfloat16).scores(hidden)
    torch.testing.assert_close(scores, weights.scores(hidden), rtol=0, atol=1e-6)


def test_every_layer_of_a_part_of_a_gate() -> None:
    gate = untrained_gate(MODEL)
    part = gate.part(slice(1, 2), slice(1, 2))
    hidden = torch.randn(9, 12).half()
    for whole, layers in ((gate, (0, 1)), (part, (1,))):
        split = SplitGate(whole, DEVICE, torch.float16)
        for index, layer in enumerate(layers):
            expected = gate.scores(layer, hidden)[2 - whole.num_kv_heads :]
            torch.testing.assert_close(split.scores(index, hidden.to(DEVICE)).cpu(), expected, rtol=0, atol=1e-5)


def test_where_a_gate_is_not_split() -> None:
    gate, hidden = untrained_gate(MODEL), torch.randn(9, 12).bfloat16()
    placed = gate.placed("cpu", torch.bfloat16)
    assert isinstance(placed, Gate)
    assert torch.equal(placed.scores(1, hidden), gate.scores(1, hidden))
