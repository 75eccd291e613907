# SPDX-License-Identifier: Apache-2.0
"""Options that choose how tokens are ranked, for all commands that start an engine of ours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_tangram.config import DEFAULTS
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.compression.gate import Gate as TrainedGate
    from vllm_tangram.eval.dense import DenseModel

Scorer = Annotated[
    str | None,
    typer.Option(
        help="What tells important tokens from others.",
        show_default=f"fastkvzip if the model has a gate, else {DEFAULTS['scorer']}",
    ),
]
Gate = Annotated[
    str | None,
    typer.Option(help="Trained gate of the model, for --scorer fastkvzip; else a known one.", metavar="FILE"),
]
DocumentScores = Annotated[
    list[str],
    typer.Option(
        help="Scores of a document that prompts begin with (`tangram score`); may be repeated.", metavar="FILE"
    ),
]


def usable_device(name: str) -> str:
    """A device that torch can compute on.

    Raises:
        TangramError: it cannot.

    """
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise TangramError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None
    return name


def gate_of(scorers: Iterable[str], given: Path | None, dense: DenseModel) -> TrainedGate | None:
    """The gate that scorers of a model are made with; None if none of them needs one.

    Args:
        scorers: by name.
        given: the file that the user names, or None for a known one.
        dense: the model.

    Raises:
        TangramError: as ``find_gate``.

    """
    from vllm_tangram.compression import needs_gate
    from vllm_tangram.compression.gate import Gate
    from vllm_tangram.compression.shipped import find_gate

    if not any(map(needs_gate, scorers)):
        return None
    return Gate.load(find_gate(given, dense.fingerprint))


def checkpoint_folder(model: str) -> Path:
    """The folder of a checkpoint: the embedded model's, the one that is named, or that of a model of the hub.

    Raises:
        TangramError: there is none.

    """
    from vllm_tangram.embedded import embedded_model

    folder = embedded_model() if model == "embedded" else Path(model)
    if not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model))
        except (OSError, ValueError) as error:  # what the hub's errors are
            raise TangramError(f"there is no folder {model}, and no such model can be fetched: {error}") from None
    if not (folder / "config.json").is_file():
        raise TangramError(f"{model} is not a checkpoint folder: it has no config.json")
    return folder
