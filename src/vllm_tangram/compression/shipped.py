# SPDX-License-Identifier: Apache-2.0
"""Which gate belongs to a model: the one that a user names, or one that comes with the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_tangram.compression.gate import Gate
from vllm_tangram.errors import TangramError

FOLDER = Path(__file__).parent.parent / "gates_data"


def find_gate(given: str | Path | None, model: Mapping[str, Any]) -> Path:
    """The file of the gate that a model is to be scored with.

    Args:
        given: the file that the user names, or None.
        model: fingerprint of the model.

    Raises:
        TangramError: it is no gate or one of another model; or none is named and none is shipped for this model.

    """
    if given is not None:
        Gate.load(given).check(model=model)
        return Path(given)
    for path in sorted(FOLDER.glob("*.safetensors")):
        try:
            Gate.load(path).check(model=model)
        except TangramError:
            continue
        return path
    raise TangramError(
        "--scorer fastkvzip needs a gate, and none is shipped for this model: train one with `tangram gate train`, or "
        "convert a published one with `tangram gate convert`, and name it with --gate"
    )
