# SPDX-License-Identifier: Apache-2.0
"""``tangram bench``: what the plugin costs and saves, beside stock vLLM, in one run."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vllm_tangram.cli import bench_attention, bench_lengths, bench_multiturn, bench_serving
from vllm_tangram.cli.rendering import console, human_bytes, percent, print_json, table
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.bench.decode import DecodeSetup, DecodeTimes

app = typer.Typer(help="Measure beside stock vLLM.", no_args_is_help=True)
app.command()(bench_attention.attention)
app.command()(bench_attention.profile)
for _command in (bench_serving.throughput, bench_serving.groups, bench_serving.prefill, bench_serving.ttft):
    app.command()(_command)
app.command()(bench_multiturn.multiturn)
app.command()(bench_lengths.lengths)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def decode(
    model: Annotated[str, typer.Argument(help="Path or name, or `embedded`.")] = "embedded",
    context: Annotated[int, typer.Option(help="Prompt tokens of a request.", min=256)] = 4096,
    batch: Annotated[int, typer.Option(help="Requests that decode together.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Steps timed at a time.", min=1)] = 64,
    retention: Annotated[list[float], typer.Option(help="May be repeated.")] = [1.0, 0.25],  # noqa: B006 (typer copies it)
    repeats: Annotated[int, typer.Option(help="Turns of each engine.", min=1)] = 5,
    json: Json = False,
) -> None:
    """Time of a decode step at each retention, and of stock vLLM."""
    from vllm_tangram.bench.decode import DecodeSetup, measure_decode

    for value in retention:
        if not 0 < value <= 1:
            raise TangramError(f"--retention: must be in (0, 1], got {value:g}")
    setup = DecodeSetup(model, context, batch, steps, repeats)
    with Console(stderr=True).status("starting engines") as status:
        times = measure_decode(setup, retention, progress=status.update)
    report = _decode_report(setup, times)
    if json:
        print_json(report)
    else:
        _print_decode(report)


def _decode_report(setup: DecodeSetup, times: list[DecodeTimes]) -> dict[str, Any]:
    stock = times[0]
    rows = []
    for engine in times:
        ratios = engine.ratios(stock)
        rows.append(
            {
                "engine": "stock" if engine.retention is None else "tangram",
                "retention": engine.retention,
                "milliseconds": 1e3 * engine.seconds,
                "ratio_to_stock": median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
                "kv_bytes": engine.filled.kv_bytes,
                "kept_fraction": engine.filled.kept_fraction,
            }
        )
    return {
        **vars(setup),
        "threads": stock.filled.num_threads,
        "kv_cache_bytes": stock.filled.kv_cache_bytes,
        "engines": rows,
    }


def _print_decode(report: dict[str, Any]) -> None:
    rows = [
        (
            row["engine"] if row["retention"] is None else f"retention {row['retention']:g}",
            f"{row['milliseconds']:.1f} ms",
            f"{row['ratio_to_stock']:.2f}",
            "{:.2f} to {:.2f}".format(*row["ratio_range"]),
            human_bytes(row["kv_bytes"]),
            percent(row["kept_fraction"]),
        )
        for row in report["engines"]
    ]
    title = f"A decode step of {report['batch']} requests of {report['context']} tokens on {report['threads']} core(s)"
    console().print(table(title, ("engine", "median step", "/ stock", "per repeat", "KV held", "of full KV"), rows))


@app.command()
def pagetable(
    requests: Annotated[int, typer.Option(help="Requests that decode.", min=1)] = 64,
    groups: Annotated[int, typer.Option(help="Head groups of the model.", min=1)] = 72,
    json: Json = False,
) -> None:
    """Time of a step's page-table work, compiled and in plain Python."""
    from vllm_tangram.bench.page_table import measure_page_table

    times = measure_page_table(requests, groups)
    report = {
        "requests": requests,
        "groups": groups,
        **{f"{name}_microseconds": 1e6 * seconds for name, seconds in vars(times).items()},
    }
    if json:
        print_json(report)
        return
    rows = [
        (what, f"{1e6 * ours:.0f} us", f"{1e6 * python:.0f} us", f"{python / ours:.0f} x")
        for what, ours, python in (
            ("every request begins new pages", times.crossing, times.python_crossing),
            ("no request does", times.common, times.python_common),
        )
    ]
    title = f"Page-table work of a step, {requests} requests, {groups} head groups"
    console().print(table(title, ("step", "compiled", "plain Python", "faster by"), rows))
