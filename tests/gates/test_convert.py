# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints, written here as the published training code writes them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.compression.test_gate import GROUP, HEADS, HIDDEN, INNER, LAYERS, MODEL, SINKS, reference
from torch import Tensor

from vllm_tangram import TangramError
from vllm_tangram.gates.convert import convert

MODEL_OF_GATE = MODEL | {"num_attention_heads": HEADS * GROUP}


def published(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    modules = [
        {
            "q_proj.weight": draw(HEADS * GROUP * INNER, HIDDEN),
            "q_proj.bias": draw(HEADS * GROUP * INNER),
            "k_proj.weight": draw(HEADS * INNER, HIDDEN),
            "q_norm.weight": draw(INNER).float(),
            "k_norm.weight": draw(INNER).float(),
            "k_base": draw(HEADS, 1, SINKS, INNER).float(),
            "b": draw(HEADS, 1, GROUP),
        }
        for _ in range(LAYERS)
    ]
    return {"module": modules, "loss": np.zeros((3, LAYERS)), "acc": np.ones((3, LAYERS), np.float32)}


def published_scores(state: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """The published inference in float64, in its own shapes: heads x tokens x sinks x group."""
    w = {name: tensor.double() for name, tensor in state.items()}
    root = torch.nn.functional.rms_norm

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        out = hidden.double() @ weight.T + (0 if bias is None else bias)
        return out.view(len(hidden), HEADS, -1, INNER)

    q = root(project(w["q_proj.weight"], w["q_proj.bias"]), (INNER,), w["q_norm.weight"], 1e-6).permute(1, 0, 3, 2)
    k = root(project(w["k_proj.weight"], None), (INNER,), w["k_norm.weight"], 1e-6).transpose(0, 1)
    logit = k @ q / INNER**0.5 + w["b"].unsqueeze(2)
    base = w["k_base"] @ q / INNER**0.5
    return (1 / (1 + (base - logit).exp().sum(2, keepdim=True))).mean(-1).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_are_those_of_the_published_code(tmp_path: Path, dtype: torch.dtype) -> None:
    content = published(dtype)
    torch.save(content, tmp_path / "gate.pt")
    gate = convert(tmp_path / "gate.pt", MODEL_OF_GATE)
    gate.save(tmp_path / "gate.safetensors")
    hidden = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(1))
    for layer in range(LAYERS):
        scores = gate.scores(layer, hidden).double()
        torch.testing.assert_close(scores, published_scores(content["module"][layer], hidden), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(scores, reference(gate.weights, layer, hidden), rtol=1e-5, atol=1e-7)
    assert gate.info["converted_from"] == "gate.pt"


class _Runs:
    """A pickle that would run a command."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch ran",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("gate.pt")
    content = published() | {"extra": _Runs()}
    if zipped:
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(TangramError, match=r"gate.pt is no checkpoint .* runs no code, refuses it"):
        convert(path, MODEL_OF_GATE)
    assert not Path("ran").exists()
    if zipped:  # it would have run
        torch.load(path, weights_only=False)
        assert Path("ran").exists()


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    content = published()
    change(content)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weights": []}, 'has no list "module"'),
        ([1, 2], 'has no list "module"'),
        (changed(lambda c: c["module"].append(3)), "layer 2: expected a state of named tensors, got int"),
        (changed(lambda c: c["module"][1].pop("b")), r"layer 1: lacks \['b'\]"),
        (changed(lambda c: c["module"][0].update(extra=torch.zeros(1))), r"layer 0: .* unknown \['extra'\]"),
        (changed(lambda c: c["module"][0].update(b=torch.zeros(HEADS, GROUP))), "second dimension is not 1"),
        (changed(lambda c: c["module"][0].update({"q_norm.weight": torch.zeros(INNER + 1)})), "different shapes"),
        (changed(lambda c: [m.update({"q_norm.weight": torch.zeros(9)}) for m in c["module"]]), "q_norm is"),
        (changed(lambda c: c["module"].pop()), "num_hidden_layers: the gate's weights are for 1, served 2"),
    ],
)
def test_what_is_no_published_gate(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "gate.pt")
    with pytest.raises(TangramError, match=message):
        convert(tmp_path / "gate.pt", MODEL_OF_GATE)


def test_damaged_missing_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "gate.pt"
    with pytest.raises(TangramError, match="there is no file"):
        convert(path, MODEL_OF_GATE)
    torch.save(published(), path)
    whole = path.read_bytes()
    for damaged in (b"", b"PK", whole[:100], whole[:-50], b"something else"):
        path.write_bytes(damaged)
        with pytest.raises(TangramError, match="refuses it"):
            convert(path, MODEL_OF_GATE)
    path.write_bytes(whole)
    with pytest.raises(TangramError, match="is for 3 query heads per KV head, the model has 2"):
        convert(path, MODEL_OF_GATE | {"num_attention_heads": 2 * HEADS})
