# SPDX-License-Identifier: Apache-2.0
"""Options that choose how tokens are ranked, for all commands that start an engine of ours."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_tangram.config import TangramConfig

Scorer = Annotated[
    str | None,
    typer.Option(
        help="What tells important tokens from others.",
        show_default=f"fastkvzip if the model has a gate, else {TangramConfig.model_fields['scorer'].default}",
    ),
]
Gate = Annotated[
    str | None,
    typer.Option(help="Trained gate of the model, for --scorer fastkvzip; else a known one.", metavar="FILE"),
]
