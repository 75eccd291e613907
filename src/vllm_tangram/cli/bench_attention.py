# SPDX-License-Identifier: Apache-2.0
"""``tangram bench attention`` and ``tangram bench profile``: decode attention alone, and profiles to measure with."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vllm_tangram.cli.rendering import console, human_bytes, percent, print_json, table
from vllm_tangram.errors import TangramError
from vllm_tangram.files import check_target

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Retentions = Annotated[list[float], typer.Option(help="May be repeated.")]


def attention(
    profile: Annotated[
        Path | None,
        typer.Option(help="What each head keeps: a profile, or a published .npz file; else all keep the same."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model shape of vllm_tangram/bench/models; else that of the profile.")
    ] = None,
    cells: Annotated[
        list[str] | None,
        typer.Option(help="Requests x mean tokens, such as 4x32768. May be repeated; else five cells."),
    ] = None,
    retention: Retentions = [1.0, 0.5, 0.25],  # noqa: B006 (typer copies it)
    engine: Annotated[list[str] | None, typer.Option(help="May be repeated; else all.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a page of ours.", min=16)] = 64,
    group_size: Annotated[int, typer.Option(help="KV heads of a page.", min=1)] = 4,
    repeats: Annotated[int, typer.Option(help="Replays of each engine.", min=1)] = 20,
    json: Json = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON object here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw a PNG here.")] = None,
) -> None:
    """Time of decode attention on CUDA, ours and others' on the same bytes."""
    from vllm_tangram.bench.attention import ENGINES, AttentionSetup, measure_attention
    from vllm_tangram.bench.published import profile_and_shape
    from vllm_tangram.bench.ragged import CELLS, Cell

    for value in retention:
        if not 0 < value <= 1:
            raise TangramError(f"--retention: must be in (0, 1], got {value:g}")
    unknown = sorted(set(engine or ()) - set(ENGINES))
    if unknown:
        raise TangramError(f"--engine: unknown {', '.join(unknown)}; known: {', '.join(ENGINES)}")
    for name, path in (("--output", output), ("--plot", plot)):
        if path is not None:
            check_target(path, name)  # now, not after minutes of work
    retentions, shape = profile_and_shape(profile, model)
    setup = AttentionSetup(
        shape=shape,
        profile=retentions,
        cells=[Cell.parse(text) for text in cells] if cells else CELLS,
        retentions=retention,
        engines=[name for name in ENGINES if engine is None or name in engine],
        block_size=block_size,
        group_size=group_size,
        repeats=repeats,
    )
    with Console(stderr=True).status("reading") as status:
        report = measure_attention(setup, progress=status.update)
    if output is not None:
        output.write_text(json_format.dumps(report, indent=2) + "\n")
    if plot is not None:
        from vllm_tangram.cli.attention_plot import plot_attention

        plot_attention(plot, report)
    if json:
        print_json(report)
    else:
        print_attention(report)


def print_attention(report: dict[str, Any]) -> None:
    """Tables of a report: speed of all engines, then what ours did and what planning costs FlashInfer."""
    measured = [cell for cell in report["cells"] if "engines" in cell]
    names = list(dict.fromkeys(entry["engine"] for cell in measured for entry in cell["engines"]))
    speed, details = [], []
    for cell in measured:
        of = {entry["engine"]: entry for entry in cell["engines"]}
        speed.append((_batch(cell), *(f"{of[name]['gb_per_second']:.0f}" if name in of else "-" for name in names)))
        ratio = of.get("ours", {}).get("ratio_to_stock")
        plan = of.get("flashinfer", {}).get("plan_milliseconds")
        details.append(
            (
                _batch(cell),
                percent(cell["held_fraction"]),
                *(f"{of[name]['milliseconds']:.2f} ms" if name in of else "-" for name in ("stock", "ours")),
                "-" if ratio is None else f"{ratio:.2f}",
                "{} to {}".format(*of["ours"]["pieces"]) if "ours" in of else "-",
                str(cell["resident_blocks"]),
                "-" if cell["max_relative_error"] is None else f"{cell['max_relative_error']:.4f}",
                "-" if plan is None else f"{plan:.1f} ms",
            )
        )
    shape = report["shape"]
    title = (
        f"Decode attention of {shape['layers']} layers, {shape['query_heads']} query and {shape['kv_heads']} KV heads "
        f"of {shape['head_dim']}, {report['device']}: GB/s of KV cache"
    )
    out = console()
    out.print(table(title, ("batch, retention", *names), speed))
    columns = ("", "kept", "stock", "ours", "/ stock", "pieces", "resident", "error", "FlashInfer's plan")
    out.print()
    out.print(table("Time of all layers; ours includes writing the new token", columns, details))
    for cell in measured:
        if cell["agrees"] is False:
            out.print(f"[red]{_batch(cell)}: ours and FlashAttention differ[/]")
        for name, reason in cell["unavailable"].items():
            out.print(f"{_batch(cell)}: no {name}: {escape(reason)}")
    for cell in report["cells"]:
        if "skipped_bytes" in cell:
            out.print(f"{_batch(cell)}: skipped, needs {human_bytes(cell['skipped_bytes'])}")


def _batch(cell: dict[str, Any]) -> str:
    return f"{cell['requests']} x {cell['tokens']}, {cell['retention']:g}"


def profile(
    published: Annotated[Path, typer.Argument(help="A published .npz file.", show_default=False)],
    model: Annotated[str, typer.Argument(help="A model shape of vllm_tangram/bench/models.", show_default=False)],
    scorer: Annotated[str, typer.Argument(help="The scorer that will be served with it.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.", show_default=False)],
) -> None:
    """Make a profile from a published one, so that a model with dummy weights is served with realistic lengths."""
    from vllm_tangram.bench.published import import_published
    from vllm_tangram.bench.shapes import model_folder, shape_fingerprint
    from vllm_tangram.compression import scorer_names

    if scorer not in scorer_names():
        raise TangramError(f"unknown scorer {scorer!r}; known: {', '.join(scorer_names())}")
    check_target(output, "--output")
    import_published(published, shape_fingerprint(model), scorer).save(output)
    out = console()
    out.print(
        f"Wrote {escape(str(output))}, for engines that serve {escape(str(model_folder(model)))} with dummy weights."
    )
