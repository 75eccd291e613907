# SPDX-License-Identifier: Apache-2.0
"""From a model and texts to a gate with its card, in steps that can be interrupted."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from vllm_tangram.compression import get_scorer
from vllm_tangram.compression.gate import Gate, GateWeights
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.files import write_atomically
from vllm_tangram.gates.agreement import agreement
from vllm_tangram.gates.dataset import Dataset, Shape, make_contexts
from vllm_tangram.gates.train import Recipe, train_layer

COMPARED = ("keydiff", "snapkv")
"""Scorers whose agreement with KVzip stands beside the gate's."""

Progress = Callable[[str, int], Callable[[], None]]
"""What is done and how many times -> what to call after each."""


def _silent(what: str, times: int) -> Callable[[], None]:
    return lambda: None


@dataclass(frozen=True)
class Source:
    """Texts and where they come from, for the card."""

    texts: list[str]
    name: str


def train_gate(
    dense: DenseModel,
    source: Source,
    work: Path,
    recipe: Recipe,
    shape: Shape,
    progress: Progress = _silent,
) -> Gate:
    """Train a gate.

    Args:
        dense: the model, on the device to compute on.
        source: texts to learn from.
        work: folder for examples and finished layers. What an interrupted run left there is used again; after the
            gate is saved it may be deleted.
        recipe: how to train.
        shape: how texts become contexts.
        progress: what to tell about it.

    Returns:
        The gate, with its agreement with KVzip on the texts that were held out.

    Raises:
        TangramError: the texts are too few or too short, or the folder belongs to another run.

    """
    contexts = make_contexts(dense.tokenizer, source.texts, shape)
    dataset = Dataset(work, dense.fingerprint, contexts, shape)
    dataset.make(dense, [get_scorer(name) for name in COMPARED], progress("KVzip scores of texts", len(contexts)))

    group = int(dense.fingerprint["num_attention_heads"]) // dense.num_kv_heads
    tick = progress("training layers", dense.num_layers)
    layers, losses = [], []
    for layer in range(dense.num_layers):
        with _finished(work, layer, recipe) as (weights, keep):
            if weights is None:
                hidden, target = dataset.layer(layer, dataset.indices(held_out=False))
                hidden, target = hidden.to(dense.device), target.to(dense.device)
                trained, curve = train_layer(hidden, target, group, recipe, seed=layer)
                weights = trained.map(lambda tensor: tensor.cpu()).tensors()
                weights["loss"] = torch.tensor(fmean(curve[-max(1, len(curve) // 20) :]))
                keep(weights)
        losses.append(float(weights.pop("loss")))
        layers.append(GateWeights(**weights))
        tick()

    gate = Gate(
        weights=GateWeights(
            **{name: torch.stack([layer.tensors()[name] for layer in layers]) for name in layers[0].tensors()}
        ),
        model=dense.fingerprint,
        recipe={
            "target": "KVzip",
            "data": source.name,
            "texts": len(dataset.indices(held_out=False)),
            "held_out_texts": len(dataset.indices(held_out=True)),
            "tokens": sum(len(contexts[index]) for index in dataset.indices(held_out=False)),
            "tokens_per_text": shape.length,
            "loss": round(fmean(losses), 5),
            **asdict(recipe),
        },
        info=versions(),
    )
    return Gate(gate.weights, gate.model, gate.recipe, held_out_agreement(gate, dataset), gate.info)


def remove_work(work: Path) -> None:
    """Delete what ``train_gate`` left in its work folder, and the folder if nothing else is in it."""
    for pattern in ("text-*.safetensors", "layer-*.safetensors", "manifest.json"):
        for path in work.glob(pattern):
            path.unlink()
    if not any(work.iterdir()):
        work.rmdir()


def held_out_agreement(gate: Gate, dataset: Dataset) -> dict[str, float]:
    """How far the gate, and the scorers beside it, agree with KVzip on the texts that were held out."""
    texts = []
    for index in dataset.indices(held_out=True):
        rows = [gate.scores(layer, dataset.layer(layer, [index])[0]) for layer in range(gate.num_layers)]
        scores = {"gate": torch.stack(rows)}
        texts.append(scores | {name: dataset.scores(name, index) for name in (*COMPARED, "kvzip")})
    return {name: round(value, 4) for name, value in agreement(texts).items()}


def versions() -> dict[str, str]:
    """When and with what a gate is made."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "vllm-tangram": version("vllm-tangram"),
        "transformers": version("transformers"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@contextmanager
def _finished(
    work: Path, layer: int, recipe: Recipe
) -> Iterator[tuple[dict[str, Tensor] | None, Callable[[dict[str, Tensor]], None]]]:
    """What an earlier run trained of a layer by the same recipe, if it did, and how to keep it."""
    name = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()[:12]
    path = work / f"layer-{layer:03d}-{name}.safetensors"

    def keep(weights: dict[str, Tensor]) -> None:
        write_atomically(path, to_safetensors(weights), "work folder")

    known: dict[str, Any] | None = None
    if path.exists():
        try:
            known = load_file(path)
        except (SafetensorError, OSError) as error:
            raise TangramError(f"{path} cannot be read ({error}); delete it and try again") from None
    yield known, keep
