# SPDX-License-Identifier: Apache-2.0
"""``tangram bench lengths``: do heads keep other shares of longer prompts?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_tangram.cli.lists import token_counts
from vllm_tangram.cli.rendering import console, human_tokens, percent, print_json, table
from vllm_tangram.cli.scorer_options import gate_of, usable_device
from vllm_tangram.config import DEFAULTS, TangramConfig


def lengths(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, or the word `embedded`.")] = "embedded",
    scorer: Annotated[list[str] | None, typer.Option(help="May be repeated; else keydiff.")] = None,
    gate: Annotated[Path | None, typer.Option(help="For --scorer fastkvzip; else a known one.")] = None,
    lengths: Annotated[str, typer.Option(help="Beginnings of texts, in tokens.", metavar="N[,N...]")] = (
        "512,1024,2048,4096,8192"
    ),
    chunk_size: Annotated[int, typer.Option(help="Tokens of the reference, and of the chunks of a whole text.")] = (
        DEFAULTS["chunk_size"]
    ),
    num_samples: Annotated[int, typer.Option(help="Built-in pilot texts, of five domains in turn.", min=2)] = 10,
    retention: Annotated[float, typer.Option(help="As for `tangram serve`.")] = DEFAULTS["retention"],
    alpha: Annotated[float, typer.Option(help="As for `tangram serve`.")] = DEFAULTS["alpha"],
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare what heads keep of longer and shorter prompts, and of later chunks, with what a profile is made of."""
    from vllm_tangram.bench.lengths import measure_lengths, pieces_of
    from vllm_tangram.compression import get_scorer
    from vllm_tangram.embedded import embedded_model
    from vllm_tangram.eval.dense import DenseModel
    from vllm_tangram.pilot import pilot_samples
    from vllm_tangram.progress import progress_bars

    names = list(dict.fromkeys(scorer or ["keydiff"]))
    configs = [
        TangramConfig.parse({"scorer": name, "retention": retention, "alpha": alpha, "chunk_size": chunk_size})
        for name in names
    ]
    pieces = pieces_of(token_counts("--lengths", lengths), chunk_size)
    dense = DenseModel.load(embedded_model() if model == "embedded" else model, device=usable_device(device))
    found_gate = gate_of(names, gate, dense)
    placed = None if found_gate is None else found_gate.placed(dense.device, dense.dtype)
    longest = max(piece.stop for piece in pieces)
    samples = pilot_samples(num_samples, tokens=longest)
    made = [get_scorer(name, placed) for name in names]
    with progress_bars() as start:
        found = measure_lengths(dense, made, samples, pieces, configs[0], start("texts", num_samples))
    report = {
        "model": dense.fingerprint,
        "samples": num_samples,
        "retention": retention,
        "alpha": alpha,
        "scorers": {
            name: {"other_texts": other_texts, "pieces": [asdict(effect) for effect in effects]}
            for name, (effects, other_texts) in found.items()
        },
    }
    if json:
        print_json(report)
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    out = console()
    columns = ("tokens", "rank correlation", "moved", "clipped", "with own budgets")
    for name, scorer in report["scorers"].items():
        rows = [
            (
                f"{human_tokens(row['piece']['start'])} to {human_tokens(row['piece']['stop'])}",
                f"{row['rank_correlation']:.3f}",
                *(percent(row[field]) for field in ("moved", "clipped", "clipped_own")),
            )
            for row in scorer["pieces"]
        ]
        title = f"{name}, retention {report['retention']:g}, {report['samples']} texts, beside the first row"
        out.print(table(title, columns, rows))
        out.print(f"(rank correlation of half the texts with the other half, first row: {scorer['other_texts']:.3f})\n")
