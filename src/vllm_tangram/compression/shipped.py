# SPDX-License-Identifier: Apache-2.0
"""Which gate belongs to a model: the one that a user names, one that was trained here, or one of the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_tangram import paths
from vllm_tangram.compression.gate import Gate
from vllm_tangram.errors import TangramError

FOLDER = Path(__file__).parent.parent / "gates_data"


def trained_gates() -> Path:
    """Where gates lie that were trained or converted without naming a file; the folder may not exist."""
    return paths.cache_dir() / "gates"


def known_gate(model: Mapping[str, Any]) -> Path | None:
    """The gate of a model that is used if none is named: one of the user's cache folder, else one of the package.

    Nobody chose it, so it must have been made for these very weights: a model whose weights are not known (no
    safetensors, or not downloaded yet) has none, and neither has another fine-tune.
    """
    for folder in (trained_gates(), FOLDER):
        for path in sorted(folder.glob("*.safetensors")):
            try:
                weights = Gate.model_of(path).get("weights")
                if weights is None or weights != model.get("weights"):
                    continue
                Gate.load(path).check(model=model)
            except TangramError:
                continue
            return path
    return None


def find_gate(given: str | Path | None, model: Mapping[str, Any]) -> Path:
    """The file of the gate that a model is to be scored with.

    Args:
        given: the file that the user names, or None.
        model: fingerprint of the model.

    Raises:
        TangramError: it is no gate or one of another model; or none is named and none is known for this model.

    """
    if given is not None:
        Gate.load(given).check(model=model)
        return Path(given)
    if (known := known_gate(model)) is not None:
        return known
    raise TangramError(
        "--scorer fastkvzip needs a gate, and there is none of this model: train one with `tangram gate train MODEL`, "
        "or convert a published one with `tangram gate convert`"
    )
