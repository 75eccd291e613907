# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.models import make_checkpoint
from transformers import AutoModelForCausalLM

from vllm_tangram import TangramError
from vllm_tangram.eval.inputs import attention_inputs


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_captures_what_the_norm_hands_to_attention(model_type: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path, model_type))
    tokens = torch.arange(24)[None]
    with torch.inference_mode(), attention_inputs(model) as inputs:
        entered = model(tokens, output_hidden_states=True).hidden_states
        expected = [layer.input_layernorm(x) for layer, x in zip(model.model.layers, entered, strict=False)]
    assert sorted(inputs) == [0, 1, 2]
    for layer in range(3):
        torch.testing.assert_close(inputs[layer], expected[layer])
    inputs.clear()
    model(tokens)
    assert not inputs  # the hooks are gone


def test_refuses_a_model_without_attention_in_every_layer() -> None:
    model = torch.nn.Module()
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=2))
    with (
        pytest.raises(TangramError, match=r"attention blocks were found in layers \[\] of 2"),
        attention_inputs(model),
    ):
        pass
