# SPDX-License-Identifier: Apache-2.0
"""The gate against loops in float64 written from its formula, and what its files refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_tangram import TangramError
from vllm_tangram.compression.gate import Gate, GateWeights

LAYERS, HEADS, GROUP, SINKS, INNER, HIDDEN = 2, 2, 3, 5, 4, 12
MODEL: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "hidden_size": HIDDEN,
    "weights": "abc",
}


def random_weights(seed: int = 0, factor: float = 1.0) -> GateWeights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return factor * torch.randn(LAYERS, *shape, generator=generator)

    return GateWeights(
        q_weight=draw(HEADS * GROUP * INNER, HIDDEN),
        q_bias=draw(HEADS * GROUP * INNER),
        k_weight=draw(HEADS * INNER, HIDDEN),
        q_norm=draw(INNER),
        k_norm=draw(INNER),
        k_base=draw(HEADS, SINKS, INNER),
        bias=draw(HEADS, GROUP),
    )


def random_gate(seed: int = 0, factor: float = 1.0) -> Gate:
    recipe = {"steps": 3, "data": "none"}
    return Gate(random_weights(seed, factor), MODEL, recipe, {"gate": 0.75}, {"date": "2026-11-30"})


def normed(x: list[float], weight: list[float]) -> list[float]:
    root = math.sqrt(sum(a * a for a in x) / len(x) + 1e-6)
    return [a / root * w for a, w in zip(x, weight, strict=True)]


def reference(weights: GateWeights, layer: int, hidden: Tensor) -> Tensor:
    """[H, T] float64, one product at a time; the bias b is added once."""
    w = {name: tensor[layer].double().tolist() for name, tensor in weights.tensors().items()}
    out = torch.zeros(HEADS, len(hidden), dtype=torch.float64)
    for t, h in enumerate(hidden.double().tolist()):
        for head in range(HEADS):
            rows = range(head * INNER, (head + 1) * INNER)
            key = normed([sum(a * b for a, b in zip(w["k_weight"][row], h, strict=True)) for row in rows], w["k_norm"])
            for member in range(GROUP):
                first = (head * GROUP + member) * INNER
                query = normed(
                    [
                        sum(a * b for a, b in zip(w["q_weight"][row], h, strict=True)) + w["q_bias"][row]
                        for row in range(first, first + INNER)
                    ],
                    w["q_norm"],
                )
                logit = sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(INNER)
                logit += w["bias"][head][member]
                total = 1.0
                for sink in w["k_base"][head]:
                    total += math.exp(sum(a * b for a, b in zip(query, sink, strict=True)) / math.sqrt(INNER) - logit)
                out[head, t] += 1 / total / GROUP
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_scores_equal_the_reference(layer: int, num_tokens: int) -> None:
    gate = random_gate()
    hidden = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    scores = gate.scores(layer, hidden)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), reference(gate.weights, layer, hidden), rtol=1e-5, atol=1e-7)
    low = hidden.bfloat16()
    assert torch.equal(gate.scores(layer, low), gate.scores(layer, low.float()))


def test_extreme_weights_give_finite_scores() -> None:
    scores = random_gate(factor=1e4).scores(0, 1e3 * torch.randn(9, HIDDEN))
    assert scores.isfinite().all()
    assert ((scores >= 0) & (scores <= 1)).all()


def test_a_file_brings_everything_back(tmp_path: Path) -> None:
    gate, path = random_gate(), tmp_path / "gate.safetensors"
    gate.save(path)
    again = Gate.load(path)
    for name, tensor in gate.weights.tensors().items():
        assert torch.equal(again.weights.tensors()[name], tensor), name
    assert (again.model, again.recipe, again.agreement, again.info) == (MODEL, gate.recipe, gate.agreement, gate.info)
    assert again.digest() == gate.digest()
    assert again.digest() != random_gate(seed=1).digest()
    assert [file.name for file in tmp_path.iterdir()] == ["gate.safetensors"]
    gate.save(path, torch.float16)
    rounded = Gate.load(path)
    assert rounded.weights.q_weight.dtype == torch.float32
    assert torch.equal(rounded.weights.q_weight, gate.weights.q_weight.half().float())
    assert rounded.digest() != gate.digest()


def test_check_names_what_differs() -> None:
    random_gate().check(model=MODEL)
    random_gate().check(model=MODEL | {"weights": None})
    with pytest.raises(TangramError, match=r"does not fit \(weights: recorded abc, served xyz\).*tangram gate train"):
        random_gate().check(model=MODEL | {"weights": "xyz"})
    with pytest.raises(TangramError, match="num_key_value_heads: the gate's weights are for 2, served 3"):
        random_gate().check(model=MODEL | {"num_key_value_heads": 3})


@pytest.mark.parametrize("name", GateWeights.__dataclass_fields__)
def test_weights_must_fit_together(name: str) -> None:
    tensor = random_weights().tensors()[name]
    with pytest.raises(TangramError, match="damaged"):
        Gate(replace(random_weights(), **{name: tensor[:, :-1]}), MODEL)
    with pytest.raises(TangramError, match="not finite"):
        Gate(replace(random_weights(), **{name: torch.full_like(tensor, float("nan"))}), MODEL)


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gate.safetensors"
    with pytest.raises(TangramError, match="there is no gate"):
        Gate.load(path)
    random_gate().save(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:7], whole[:500], whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(TangramError, match="cannot be read"):
            Gate.load(path)
    path.write_bytes(whole.replace(b'\\"format_version\\": 1', b'\\"format_version\\": 2'))
    with pytest.raises(TangramError, match="format version 2"):
        Gate.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(TangramError, match="is not a gate"):
        Gate.load(path)
    tensors = random_weights().tensors()
    del tensors["bias"]
    save_file(tensors, path, metadata={"tangram_gate": '{"format_version": 1}'})
    with pytest.raises(TangramError, match="lacks 'bias'"):
        Gate.load(path)
    save_file(random_weights().tensors(), path, metadata={"tangram_gate": '{"format_version": 1}'})
    with pytest.raises(TangramError, match="lacks 'model'"):
        Gate.load(path)
    pickle = tmp_path / "published.pt"
    torch.save({"module": []}, pickle)
    with pytest.raises(TangramError, match="tangram gate convert"):
        Gate.load(pickle)


def test_nothing_is_written_where_nothing_can_be(tmp_path: Path) -> None:
    with pytest.raises(TangramError, match="not a regular file"):
        random_gate().save(tmp_path)
    with pytest.raises(TangramError, match="cannot be written"):
        random_gate().save(tmp_path / "no" / "gate.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_part_scores_as_the_whole_does() -> None:
    gate, hidden = random_gate(), torch.randn(7, HIDDEN)
    for layers in (slice(0, 2), slice(1, 2)):
        for heads in (slice(0, 1), slice(1, 2), slice(0, 2)):
            part = gate.part(layers, heads)
            assert (part.num_layers, part.num_kv_heads) == (len(range(2)[layers]), len(range(2)[heads]))
            for index, layer in enumerate(range(2)[layers]):
                torch.testing.assert_close(part.scores(index, hidden), gate.scores(layer, hidden)[heads])
