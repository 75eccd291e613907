# SPDX-License-Identifier: Apache-2.0
"""Gates for tests that need one of a given model and do not ask how good it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_tangram.compression.gate import Gate, GateWeights

#: Fingerprint of a model that there is not.
MODEL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "hidden_size": 12,
    "weights": "abc",
}


def untrained_gate(model: dict[str, Any], seed: int = 0) -> Gate:
    """A gate with random weights.

    Args:
        model: fingerprint of the model.
        seed: of the weights.

    """
    generator = torch.Generator().manual_seed(seed)
    layers, heads, hidden = (model[name] for name in ("num_hidden_layers", "num_key_value_heads", "hidden_size"))
    group, inner, sinks = model["num_attention_heads"] // heads, 16, 16

    def draw(*shape: int, factor: float = 1.0) -> Tensor:
        return factor * torch.randn(layers, *shape, generator=generator)

    weights = GateWeights(
        q_weight=draw(heads * group * inner, hidden, factor=hidden**-0.5),
        q_bias=draw(heads * group * inner),
        k_weight=draw(heads * inner, hidden, factor=hidden**-0.5),
        q_norm=1 + draw(inner, factor=0.1),
        k_norm=1 + draw(inner, factor=0.1),
        k_base=draw(heads, sinks, inner),
        bias=draw(heads, group),
    )
    return Gate(weights, model)
