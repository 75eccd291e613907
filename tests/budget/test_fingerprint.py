# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from vllm_tangram.budget import check_same_model, model_fingerprint
from vllm_tangram.errors import TangramError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rope_theta": 100000,
    "torch_dtype": "bfloat16",
}


def test_defaults_are_filled_in_and_json_carries_all() -> None:
    fingerprint = model_fingerprint(CONFIG, None)
    assert fingerprint["head_dim"] == 64
    assert fingerprint["weights"] is None
    assert "torch_dtype" not in fingerprint
    assert check_same_model(json.loads(json.dumps(fingerprint)), fingerprint) == []
    assert model_fingerprint({**CONFIG, "num_key_value_heads": None}, None)["num_key_value_heads"] == 9


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": None, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}},
        {"rope_scaling": None, "head_dim": 64},
        {"architectures": ("LlamaForCausalLM",)},
    ],
)
def test_spellings_of_the_same_model(change: dict[str, Any]) -> None:
    assert check_same_model(model_fingerprint(CONFIG, None), model_fingerprint({**CONFIG, **change}, None)) == []


def test_nested_text_config() -> None:
    nested = {"architectures": CONFIG["architectures"], "text_config": {**CONFIG, "architectures": None}}
    assert check_same_model(model_fingerprint(CONFIG, None), model_fingerprint(nested, None)) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"num_hidden_layers": 24}, "num_hidden_layers: recorded 30, served 24"),
        ({"head_dim": 128}, "head_dim: recorded 64, served 128"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures"),
        ({"rope_theta": 10000}, "rope"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope"),
    ],
)
def test_differences_are_named(change: dict[str, Any], line: str) -> None:
    differences = check_same_model(model_fingerprint(CONFIG, None), model_fingerprint({**CONFIG, **change}, None))
    assert len(differences) == 1
    assert differences[0].startswith(line)


def _weights(folder: Path, **tensors: np.ndarray) -> Path:
    folder.mkdir(exist_ok=True)
    for name, values in tensors.items():
        save_file({name: values}, folder / f"{name}.safetensors")
    return folder


def test_weights_are_sampled(tmp_path: Path) -> None:
    values = np.zeros(200_000, dtype=np.float32)
    prints = [model_fingerprint(CONFIG, _weights(tmp_path / "a", x=values, y=values))]
    for position in (0, 100_000, 199_999):
        changed = values.copy()
        changed[position] = 1
        prints.append(model_fingerprint(CONFIG, _weights(tmp_path / "a", x=changed)))
    assert len({fingerprint["weights"] for fingerprint in prints}) == 4
    (difference,) = check_same_model(prints[0], prints[1])
    assert difference.startswith("weights: recorded ")
    assert prints[0] == model_fingerprint(CONFIG, _weights(tmp_path / "b", x=values, y=values))
    assert check_same_model(prints[0], model_fingerprint(CONFIG, None)) == []


def test_small_files_and_no_files(tmp_path: Path) -> None:
    assert model_fingerprint(CONFIG, tmp_path)["weights"] is None
    one = model_fingerprint(CONFIG, _weights(tmp_path, x=np.array([1.0])))["weights"]
    two = model_fingerprint(CONFIG, _weights(tmp_path, x=np.array([2.0])))["weights"]
    assert one != two


@pytest.mark.parametrize("size", [0, 5, 30])
def test_truncated_weights_are_refused(tmp_path: Path, size: int) -> None:
    file = _weights(tmp_path, x=np.zeros(100)) / "x.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(TangramError, match=r"x\.safetensors is truncated"):
        model_fingerprint(CONFIG, tmp_path)
