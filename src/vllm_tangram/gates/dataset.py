# SPDX-License-Identifier: Apache-2.0
"""What a gate is trained on, in a folder: for every text the inputs of all attention blocks and KVzip's scores.

Made once and kept until the gate is written, so that training can be interrupted, or repeated with another recipe.
Disk: ``2 * L * D`` bytes a token (35 KB for SmolLM2-135M).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from vllm_tangram.compression import Scorer
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.chat import chat_frame
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.inputs import attention_inputs
from vllm_tangram.files import write_atomically
from vllm_tangram.gates.targets import kvzip_scores

_FORMAT = 1


@dataclass(frozen=True)
class Shape:
    """How texts become contexts.

    Attributes:
        length: tokens of a context, at most.
        sinks: first tokens, which are always kept and so are no examples.
        held_out: every that-many-th text is kept from training, to measure agreement.

    """

    length: int = 1024
    sinks: int = 4
    held_out: int = 10

    def is_held_out(self, index: int) -> bool:
        """Is the text with that index kept from training?"""
        return index % self.held_out == self.held_out - 1


class Dataset:
    """A folder of examples.

    Args:
        folder: made if needed; what a former run with the same model, texts and shape left there is used.
        model: fingerprint of the model.
        contexts: token ids of all contexts, see ``make_contexts``.
        shape: how they were made.

    Raises:
        TangramError: the folder cannot be used, or belongs to another run.

    """

    def __init__(self, folder: Path, model: dict[str, Any], contexts: Sequence[Sequence[int]], shape: Shape) -> None:
        self.folder, self.contexts, self.shape = folder, contexts, shape
        digest = hashlib.sha256(json.dumps([list(ids) for ids in contexts]).encode()).hexdigest()
        manifest = {"format": _FORMAT, "model": model, "contexts": digest, "sinks": shape.sinks}
        path = folder / "manifest.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = json.loads(path.read_text()) if path.exists() else None
            foreign = known is None and any(folder.iterdir())
        except (OSError, ValueError) as error:
            raise TangramError(f"work folder {folder} cannot be used: {error}; delete it or give another") from None
        if foreign:
            raise TangramError(
                f"work folder {folder} holds something else: give an empty one, or the name of a new one"
            )
        if known is None:
            write_atomically(path, json.dumps(manifest, sort_keys=True).encode(), "work folder")
        elif known != json.loads(json.dumps(manifest)):
            raise TangramError(
                f"work folder {folder} was left by a run with another model, other texts or another length; delete "
                "it, or give another output"
            )

    def make(self, dense: DenseModel, scorers: Sequence[Scorer], advance: Callable[[], None] = lambda: None) -> None:
        """Make what is missing.

        Args:
            dense: the model.
            scorers: what to compare the gate with on held-out texts.
            advance: called after every text (progress).

        """
        for index, ids in enumerate(self.contexts):
            path = self._path(index)
            if not path.exists():
                held_out = self.shape.is_held_out(index)
                tensors = _examples(dense, ids, scorers if held_out else [], self.shape.sinks)
                write_atomically(path, to_safetensors(tensors), "work folder")
            advance()

    def indices(self, *, held_out: bool) -> list[int]:
        """Texts to train on, or those to measure with."""
        return [i for i in range(len(self.contexts)) if self.shape.is_held_out(i) == held_out]

    def layer(self, layer: int, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states ``[N, D]`` of one layer and KVzip's scores ``[H, N]`` of some texts, without their sinks."""
        hidden, scores = [], []
        for index in indices:
            with self._open(index) as file:
                hidden.append(file.get_slice("hidden")[layer, self.shape.sinks :])
                scores.append(file.get_slice("kvzip")[layer, :, self.shape.sinks :])
        return torch.cat(hidden), torch.cat(scores, dim=-1).float()

    def scores(self, name: str, index: int) -> Tensor:
        """[L, H, T] float32 scores of one text without its sinks, "kvzip" or the name of a scorer."""
        with self._open(index) as file:
            return file.get_tensor(name)[..., self.shape.sinks :].float()

    def _path(self, index: int) -> Path:
        return self.folder / f"text-{index:05d}.safetensors"

    def _open(self, index: int) -> Any:
        try:
            return safe_open(self._path(index), framework="pt")
        except (SafetensorError, OSError) as error:
            raise TangramError(f"{self._path(index)} cannot be read ({error}); delete it and try again") from None


def make_contexts(tokenizer: Any, texts: Sequence[str], shape: Shape) -> list[list[int]]:
    """Token ids of each text, at most ``shape.length``; every other one as a chat message begins, if the model chats.

    Raises:
        TangramError: a text has no more tokens than sinks, or no text is left to train on or to measure with.

    """
    before = tokenizer.encode(chat_frame(tokenizer)[0], add_special_tokens=False)
    contexts = []
    for index, text in enumerate(texts):
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids = ([*before, *ids] if index % 2 == 0 else ids)[: shape.length]
        if len(ids) <= 2 * shape.sinks:
            raise TangramError(f"text {index + 1} has {len(ids)} tokens, too few to learn from; leave it out")
        contexts.append(list(ids))
    if len(contexts) < shape.held_out:
        raise TangramError(
            f"{len(contexts)} texts are too few to train a gate: give at least {shape.held_out}, one of which is "
            "held out"
        )
    return contexts


def _examples(dense: DenseModel, ids: Sequence[int], scorers: Sequence[Scorer], sinks: int) -> dict[str, Tensor]:
    with attention_inputs(dense.module) as inputs:
        chunk = dense.read(ids, scorers, sinks=sinks, window=64, after=dense.empty())
        hidden = torch.stack([inputs[layer][0] for layer in range(dense.num_layers)])
    tensors = {"hidden": hidden, "kvzip": kvzip_scores(dense, ids, sinks=sinks, state=chunk.state)}
    tensors |= chunk.scores
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
