# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_tangram import TangramError
from vllm_tangram.compression import get_scorer
from vllm_tangram.compression.gate import Gate
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.inputs import attention_inputs
from vllm_tangram.gates import make
from vllm_tangram.gates.agreement import agreement, overlap
from vllm_tangram.gates.dataset import Dataset, Shape, make_contexts
from vllm_tangram.gates.make import Source, train_gate
from vllm_tangram.gates.targets import kvzip_scores
from vllm_tangram.gates.texts import training_texts
from vllm_tangram.gates.train import Recipe, train_layer
from vllm_tangram.pilot import MIN_CHARACTERS

SHAPE = Shape(length=96, sinks=4, held_out=4)
RECIPE = Recipe(steps=60, batch=64, inner=4, sinks=3)


def texts(count: int = 8) -> list[str]:
    return [text[40 * i : 40 * i + 200] for i, text in enumerate(training_texts(count))]


@pytest.mark.parametrize("optimiser", [{}, {"optimiser": "sgd", "learning_rate": 0.2}])
def test_learns_what_another_gate_says(optimiser: dict[str, Any]) -> None:
    """Examples of a gate can be learned by a gate: the loss comes near the least possible one, the target's entropy."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4000, 24, generator=generator)
    direction = torch.randn(2, 24, generator=generator)
    target = (2 * direction @ hidden.T / 24**0.5 - 1).sigmoid()
    recipe = replace(Recipe(steps=300, batch=200), **optimiser)
    weights, losses = train_layer(hidden[:3000], target[:, :3000], 3, recipe)
    held_out, wanted = weights.scores(hidden[3000:]), target[:, 3000:]
    entropy = -(wanted * wanted.log() + (1 - wanted) * (1 - wanted).log()).mean()
    loss = torch.nn.functional.binary_cross_entropy(held_out, wanted)
    constant = torch.nn.functional.binary_cross_entropy(wanted.mean().expand_as(wanted), wanted)
    assert loss - entropy < 0.1 * (constant - entropy)
    assert overlap(held_out, wanted).mean() > 0.85
    assert len(losses) == 300
    assert losses[-1] < losses[0]


def test_the_seed_decides() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, target = torch.randn(100, 8, generator=generator), torch.rand(2, 100, generator=generator)
    one, again, other = (
        train_layer(hidden, target, 2, replace(RECIPE, steps=5), seed=seed)[0].q_weight for seed in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_sinks_become_different() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, target = torch.randn(100, 8, generator=generator), torch.rand(2, 100, generator=generator)
    base = train_layer(hidden, target, 2, RECIPE)[0].k_base  # [H, S, i]
    assert torch.cdist(base, base).flatten(1).topk(6).values.min() > 0.1  # the 3 pairs of each head, twice


def test_overlap_counts_common_tokens() -> None:
    wanted = torch.tensor([8.0, 7, 6, 5, 4, 3, 2, 1])
    assert overlap(wanted, wanted) == 1
    assert overlap(-wanted, wanted) == 0
    assert overlap(torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 9.5]), wanted) == 0.5
    assert overlap(torch.zeros(3), torch.tensor([1.0, 2, 3]), 0.01).shape == ()
    text = {"kvzip": torch.stack([wanted, wanted + 10])[None], "own": torch.stack([wanted + 20, wanted])[None]}
    assert agreement([text]) == {"own": 1.0, "own, all heads": 0.0}


def test_examples_are_what_the_model_computes(dense: DenseModel, tmp_path: Path) -> None:
    contexts = make_contexts(dense.tokenizer, texts(), SHAPE)
    assert {len(ids) for ids in contexts} == {96}
    assert dense.tokenizer.decode(contexts[0]).startswith("<user>")
    assert not dense.tokenizer.decode(contexts[1]).startswith("<user>")
    dataset = Dataset(tmp_path, dense.fingerprint, contexts, SHAPE)
    dataset.make(dense, [get_scorer("keydiff")])
    assert (dataset.indices(held_out=False), dataset.indices(held_out=True)) == ([0, 1, 2, 4, 5, 6], [3, 7])
    hidden, target = dataset.layer(1, [2, 5])
    assert (hidden.shape, target.shape) == ((2 * 92, 32), (2, 2 * 92))
    assert torch.equal(target[:, 92:], kvzip_scores(dense, contexts[5])[1, :, 4:])
    with torch.inference_mode(), attention_inputs(dense.module) as inputs:
        dense.read(contexts[5], sinks=4, window=64, after=dense.empty())
    torch.testing.assert_close(hidden[92:], inputs[1][0, 4:])
    assert dataset.scores("keydiff", 3).shape == (3, 2, 92)


def test_too_little_to_learn_from(dense: DenseModel) -> None:
    with pytest.raises(TangramError, match="3 texts are too few"):
        make_contexts(dense.tokenizer, ["some text"] * 3, SHAPE)
    with pytest.raises(TangramError, match="text 2 has 1 tokens"):
        make_contexts(dense.tokenizer, ["some text", "a", "some text", "some text"], SHAPE)


def test_an_interrupted_run_continues(dense: DenseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(texts(), "texts of a test")
    whole = train_gate(dense, source, tmp_path / "whole", RECIPE, SHAPE)
    trained: list[int] = []

    def train_until_the_power_fails(*args: Any, seed: int, **options: Any) -> Any:
        if seed == 2 and 2 not in trained:
            trained.append(seed)
            raise KeyboardInterrupt
        trained.append(seed)
        return train_layer(*args, seed=seed, **options)

    monkeypatch.setattr(make, "train_layer", train_until_the_power_fails)
    with pytest.raises(KeyboardInterrupt):
        train_gate(dense, source, tmp_path / "work", RECIPE, SHAPE)
    monkeypatch.setattr("vllm_tangram.gates.dataset.kvzip_scores", None)  # all examples are there
    gate = train_gate(dense, source, tmp_path / "work", RECIPE, SHAPE)
    assert trained == [0, 1, 2, 2]
    assert gate.digest() == whole.digest()
    assert gate.agreement == whole.agreement
    other = train_gate(dense, source, tmp_path / "work", replace(RECIPE, seed=1), SHAPE)
    assert other.digest() != gate.digest()
    assert trained[4:] == [0, 1, 2]
    with pytest.raises(TangramError, match="left by a run with another model, other texts or another length"):
        train_gate(dense, source, tmp_path / "work", RECIPE, replace(SHAPE, length=95))


def test_a_gate_knows_its_model_and_how_far_it_agrees(dense: DenseModel, tmp_path: Path) -> None:
    gate = train_gate(dense, Source(texts(), "texts of a test"), tmp_path / "work", replace(RECIPE, steps=100), SHAPE)
    gate.check(model=dense.fingerprint)
    assert (gate.num_layers, gate.num_kv_heads, gate.group_size, gate.hidden_size) == (3, 2, 2, 32)
    assert (gate.recipe["data"], gate.recipe["texts"], gate.recipe["held_out_texts"]) == ("texts of a test", 6, 2)
    assert gate.recipe["tokens"] == 6 * 96
    assert set(gate.agreement) == {
        f"{name}{both}" for name in ("gate", "keydiff", "snapkv") for both in ("", ", all heads")
    }
    contexts = make_contexts(dense.tokenizer, texts(), SHAPE)
    found = []
    for ids in (contexts[3], contexts[7]):
        wanted = kvzip_scores(dense, ids)
        with torch.inference_mode(), attention_inputs(dense.module) as inputs:
            dense.read(ids, sinks=4, window=64, after=dense.empty())
        for layer in range(3):
            scores = gate.scores(layer, inputs[layer][0])[:, 4:]
            for head in range(2):
                best = set(scores[head].topk(23).indices.tolist())
                found.append(len(best & set(wanted[layer, head, 4:].topk(23).indices.tolist())) / 23)
    assert gate.agreement["gate"] == pytest.approx(sum(found) / len(found), abs=0.01)
    path = tmp_path / "gate.safetensors"
    gate.save(path)
    assert Gate.load(path).agreement == gate.agreement


def test_a_damaged_work_folder_is_told(dense: DenseModel, tmp_path: Path) -> None:
    train_gate(dense, Source(texts(), "x"), tmp_path, replace(RECIPE, steps=2), SHAPE)
    for pattern in ("layer-000-*", "text-00000*"):
        (path,) = tmp_path.glob(pattern)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(TangramError, match=rf"{path.name} cannot be read .*delete it"):
            train_gate(dense, Source(texts(), "x"), tmp_path, replace(RECIPE, steps=2), SHAPE)
        path.unlink()


def test_training_texts_are_long_varied_and_the_same_again() -> None:
    some = training_texts(18)
    assert some[:7] == training_texts(7)
    assert some != training_texts(18, seed=1)
    assert all(len(text) >= MIN_CHARACTERS for text in some)
    assert len(set(some)) == 18
