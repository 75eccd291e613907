# SPDX-License-Identifier: Apache-2.0
"""Scores of a document that many prompts begin with, computed once and kept in a file.

KVzip (https://arxiv.org/abs/2505.23416) scores a token by the attention that it gets while the model repeats the text.
That takes a second pass, so no engine has such scores of a prompt that it reads for the first time. Of a document that
is known beforehand it can have them (``tangram score``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as to_safetensors
from torch import Tensor

from vllm_tangram.budget.fingerprint import check_made_for
from vllm_tangram.errors import TangramError
from vllm_tangram.files import write_atomically
from vllm_tangram.tensor_file import TensorFile

_COMMAND = "tangram score"
_FILE = TensorFile(
    name="document scores",
    title="a file of document scores",
    key="tangram_document",
    version=1,
    tensors=("scores", "ids"),
    command=_COMMAND,
)


@dataclass(frozen=True, eq=False)
class DocumentScores:
    """How important each token of a document is to each KV head of one model.

    Attributes:
        ids: ``[T]`` int32, the tokens as prompts begin with them: what a chat template puts before is part of it.
        scores: ``[L, H, T]`` float16; higher means keep.
        model: fingerprint of the model (``model_fingerprint``).
        recipe: how it was scored, values that JSON can carry.
        info: free text: date, versions, where the text came from.
        source: the file, for messages.

    """

    ids: NDArray[np.int32]
    scores: Tensor
    model: dict[str, Any]
    recipe: dict[str, Any] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    source: str = "<memory>"

    def __post_init__(self) -> None:
        """Refuse what cannot be scores of a document.

        Raises:
            TangramError: tokens or scores have a wrong type or shape, do not belong together, or are not finite.

        """
        if self.scores.dtype != torch.float16 or self.ids.dtype != np.int32:
            raise self._damaged(f"scores and ids are of types {self.scores.dtype} and {self.ids.dtype}")
        if self.ids.ndim != 1 or self.scores.ndim != 3 or not self.scores.numel():
            raise self._damaged(f"ids are {list(self.ids.shape)} and scores {list(self.scores.shape)}, not [L, H, T]")
        if self.scores.shape[-1] != len(self.ids):
            raise self._damaged(f"it scores {self.scores.shape[-1]} tokens and names {len(self.ids)}")
        if (self.ids < 0).any() or not bool(self.scores.isfinite().all()):
            raise self._damaged("it has negative token ids, or scores that are not finite")

    @property
    def num_tokens(self) -> int:
        """Tokens, T."""
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        """Memory of the scores."""
        return self.scores.numel() * self.scores.element_size()

    def part(self, layers: slice, heads: slice, device: torch.device | str) -> DocumentScores:
        """The scores of some layers, and of each some KV heads, on a device: what one rank needs."""
        return replace(self, scores=self.scores[layers, heads].contiguous().to(device))

    def check(self, *, model: Mapping[str, Any]) -> None:
        """Refuse another model than the one whose scores these are.

        Args:
            model: fingerprint of the served model.

        Raises:
            TangramError: names what the file says and what is served.

        """
        sizes = dict(zip(("num_hidden_layers", "num_key_value_heads"), self.scores.shape, strict=False))
        problems = check_made_for("the scores are", sizes, self.model, model)
        if problems:
            raise TangramError(
                f"--document-scores: {self.source} does not fit ({'; '.join(problems)}); score the document with this "
                f"model: `{_COMMAND}`"
            )

    def save(self, path: Path) -> None:
        """Write a safetensors file, all of it or nothing.

        Raises:
            TangramError: the file cannot be written.

        """
        tensors = {"scores": self.scores.cpu().contiguous(), "ids": torch.from_numpy(self.ids)}
        header = {"model": self.model, "recipe": self.recipe, "info": self.info}
        write_atomically(path, to_safetensors(tensors, metadata=_FILE.metadata(header)), "document scores")

    @classmethod
    def load(cls, path: str | Path) -> DocumentScores:
        """Read a file; scores are on the CPU.

        Raises:
            TangramError: the file is missing, damaged, incomplete, something else, or of a newer format.

        """
        path = Path(path)
        if not path.is_file():
            raise TangramError(f"--document-scores: there is no file {path}; make one with `{_COMMAND}`")
        header, tensors = _FILE.read(path, "pt")
        with _FILE.parsing(path):
            return cls(
                ids=tensors["ids"].numpy(),
                scores=tensors["scores"],
                model=dict(header["model"]),
                recipe=dict(header["recipe"]),
                info={str(name): str(text) for name, text in dict(header["info"]).items()},
                source=str(path),
            )

    def _damaged(self, reason: str) -> TangramError:
        return _FILE.damaged(self.source, reason)
