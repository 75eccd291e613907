# SPDX-License-Identifier: Apache-2.0
"""Models without weights: folders that hold a ``config.json`` alone, enough to measure speed and memory with.

vLLM starts from such a folder with ``load_format="dummy"`` and ``skip_tokenizer_init=True``. Sizes are those of the
published models; the longest context is 131072 tokens everywhere and rope scaling is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tangram.budget import model_fingerprint
from vllm_tangram.errors import TangramError

_FOLDER = Path(__file__).parent / "models"


@dataclass(frozen=True)
class HeadShape:
    """What attention needs to know of a model.

    Attributes:
        layers: L.
        kv_heads: KV heads of a layer, H.
        query_heads: query heads of a layer, a multiple of H.
        head_dim: numbers of a key, and of a value.

    """

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int

    @classmethod
    def of(cls, fingerprint: dict[str, Any]) -> HeadShape:
        """From a model's fingerprint.

        Raises:
            TangramError: the fingerprint lacks a size.

        """
        names = ("num_hidden_layers", "num_key_value_heads", "num_attention_heads", "head_dim")
        sizes = [fingerprint.get(name) for name in names]
        missing = [name for name, size in zip(names, sizes, strict=True) if not isinstance(size, int)]
        if missing:
            raise TangramError(f"the profile's model does not say its {', '.join(missing)}: give --model a shape name")
        return cls(*sizes)  # type: ignore[arg-type]


def shape_names() -> tuple[str, ...]:
    """Names that `model_folder` knows."""
    return tuple(sorted(path.parent.name for path in _FOLDER.glob("*/config.json")))


def model_folder(name: str) -> Path:
    """Folder with the ``config.json`` of a shape.

    Raises:
        TangramError: there is no such shape.

    """
    if name not in shape_names():
        raise TangramError(f"unknown model shape {name!r}; known: {', '.join(shape_names())}")
    return _FOLDER / name


def shape_fingerprint(name: str) -> dict[str, Any]:
    """Fingerprint of the model that an engine with dummy weights serves from `model_folder`.

    Raises:
        TangramError: there is no such shape.

    """
    return model_fingerprint(json.loads((model_folder(name) / "config.json").read_text()), None)
