# SPDX-License-Identifier: Apache-2.0
"""The embedded model's gate comes with the package, belongs to it, and does what its card says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vllm_tangram
from vllm_tangram.compression import get_scorer
from vllm_tangram.compression.gate import Gate
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.inputs import attention_inputs
from vllm_tangram.gates.agreement import agreement
from vllm_tangram.gates.targets import kvzip_scores
from vllm_tangram.gates.texts import training_texts

PATH = Path(vllm_tangram.__file__).parent / "gates_data" / "smollm2-135m-instruct.safetensors"


def test_the_card_is_complete_and_tells_nothing_of_the_machine() -> None:
    gate = Gate.load(PATH)
    assert {"data", "texts", "tokens", "loss", "steps", "inner", "seed"} <= gate.recipe.keys()
    assert {"date", "torch", "transformers", "vllm-tangram"} <= gate.info.keys()
    assert not any("/" in str(value) for value in (*gate.info.values(), *gate.recipe.values()))


def test_it_belongs_to_the_embedded_model_and_is_small(embedded: Path) -> None:
    gate = Gate.load(PATH)
    dense = DenseModel.load(embedded)
    gate.check(model=dense.fingerprint)
    assert gate.group_size == 3
    assert PATH.stat().st_size < 0.02 * (embedded / "model.safetensors").stat().st_size


def test_it_finds_what_kvzip_finds_in_other_texts(embedded: Path) -> None:
    gate, dense = Gate.load(PATH), DenseModel.load(embedded)
    texts = []
    for text in training_texts(8, seed=77)[5:]:  # pairs, objects, tables; other ones than it was trained on
        ids = dense.tokenizer.encode(text)[:384]
        with attention_inputs(dense.module) as inputs:
            chunk = dense.read(ids, [get_scorer("keydiff")], sinks=4, window=64, after=dense.empty())
            scores = [gate.scores(layer, inputs[layer][0]) for layer in range(dense.num_layers)]
        kvzip = kvzip_scores(dense, ids, state=chunk.state)
        named = {"gate": torch.stack(scores), "kvzip": kvzip, "keydiff": chunk.scores["keydiff"]}
        texts.append({name: tensor[..., 4:] for name, tensor in named.items()})
    found = agreement(texts)
    assert found["gate"] > found["keydiff"] + 0.1
    assert found["gate"] == pytest.approx(gate.agreement["gate"], abs=0.12)
    assert found["gate, all heads"] > 0.65
