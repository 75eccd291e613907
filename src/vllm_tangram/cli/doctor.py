# SPDX-License-Identifier: Apache-2.0
"""``tangram doctor``: can this installation serve, and if not, what to do."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from vllm_tangram.cli.diagnosis import Diagnosis, diagnose
from vllm_tangram.cli.rendering import console, print_json, table


def doctor(
    model: Annotated[
        bool, typer.Option("--model/--no-model", help="Make the embedded model if it is not there yet.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this installation: exit status 0 when serving is possible, 1 when not."""
    diagnosis = diagnose(with_model=model)
    if json:
        print_json(diagnosis.as_json())
    else:
        _print(diagnosis)
    raise typer.Exit(1 if diagnosis.problems else 0)


def _print(diagnosis: Diagnosis) -> None:
    out = console()
    facts = [(name, version or "not installed") for name, version in diagnosis.versions.items()]
    facts += [
        ("backend", f"{diagnosis.backend or 'none'} ({diagnosis.backend_reason})"),
        *((group, value or "not found") for group, value in diagnosis.entry_points.items()),
        ("scorers", ", ".join(diagnosis.scorers) or "none"),
        ("cache folder", diagnosis.cache_folder + ("" if diagnosis.cache_writable else " (not writable)")),
        ("embedded model", diagnosis.embedded_model or "not made"),
    ]
    out.print(table("Installation", ("", ""), facts, numeric=False))
    if diagnosis.refused:
        out.print()
        out.print(
            table("An engine with one of these does not start", ("option", "reason"), diagnosis.refused, numeric=False)
        )
    out.print()
    for warning in diagnosis.warnings:
        out.print(Text.assemble(("warning: ", "bold yellow"), warning))
    for problem in diagnosis.problems:
        out.print(Text.assemble(("problem: ", "bold red"), problem))
    if not diagnosis.problems:
        out.print(Text("Ready to serve.", style="bold green"))
