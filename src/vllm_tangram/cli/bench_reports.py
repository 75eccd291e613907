# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of the benchmarks of whole engines, from their reports (``bench.results``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from vllm_tangram.cli.rendering import console, human_bytes, percent, print_json, table

Report = dict[str, Any]


def show(
    report: Report,
    json: bool,
    plot: Path | None,
    print_: Callable[[Report], None],
    plot_: Callable[[Report, Path], None],
) -> None:
    """Draw a report if a picture is wanted, and print it."""
    if plot is not None:
        plot_(report, plot)
    if json:
        print_json(report)
    else:
        print_(report)


def print_throughput(report: Report) -> None:
    """Requests per second of every engine, and how it got there."""
    engines = report["engines"]
    stock = engines.get("stock", {})
    rows = [
        (
            key,
            number(row["requests_per_second"], 3),
            ratio(row, stock, "requests_per_second"),
            number(row["steady_requests_per_second"], 3),
            ratio(row, stock, "steady_requests_per_second"),
            f"{row['mean_running']:.1f}",
            str(row["preemptions"]),
            "-" if row["kept_fraction"] is None else f"{100 * row['kept_fraction']:.1f}",
            _milliseconds(row["decode_step_seconds"]),
        )
        for key, row in engines.items()
    ]
    columns = (
        "engine", "req/s", "/ stock", "steady", "/ stock", "at once", "preempt.", "KV %", "step ms"
    )  # fmt: skip
    console().print(table(_served_title(report), columns, rows))
    notes = (
        "Step: the median of those that only decode. Steady: while the queue was not empty, if that was long enough."
    )
    print_notes(report, notes, unfinished(report))


def plot_throughput(report: Report, path: Path) -> None:
    """Bars of requests per second and of requests at once."""
    from vllm_tangram.cli.bench_plots import Panel, plot_panels

    engines = report["engines"]
    rates = {
        "whole run": column(report, "requests_per_second"),
        "steady": column(report, "steady_requests_per_second"),
    }
    panels = [
        Panel("Throughput", "requests / s", list(engines), rates),
        Panel("Requests at once", "mean", list(engines), {"": column(report, "mean_running")}),
    ]
    plot_panels(path, _served_title(report), panels)


def print_groups(report: Report) -> None:
    """What the heads of a page cost and save."""
    rows = [
        (
            str(row["group_size"]),
            str(row["num_groups"]),
            f"{row['over_allocation']:.3f}",
            f"{100 * row['held_fraction']:.1f}",
            str(row["prompt_pages"]),
            number(row["requests_per_second"], 3),
            number(row["steady_requests_per_second"], 3),
            _milliseconds(row["decode_step_seconds"]),
            *(_milliseconds(row["decode_host_seconds"].get(part)) for part in ("schedule", "update", "model")),
        )
        for row in report["engines"].values()
    ]
    columns = (
        "G", "groups", "over", "KV %", "pages", "req/s", "steady", "step ms", "schedule", "update", "model"
    )  # fmt: skip
    console().print(table(f"{_served_title(report)}, retention {report['setup']['retention']:g}", columns, rows))
    steps = "Over: held over needed by the heads. Step: one that only decodes, and its host time, all in ms."
    print_notes(report, steps, unfinished(report))


def plot_groups(report: Report, path: Path) -> None:
    """Lines over the heads of a page."""
    from vllm_tangram.cli.bench_plots import Panel, plot_panels

    engines = sorted(report["engines"].values(), key=lambda row: row["group_size"])
    sizes = [str(row["group_size"]) for row in engines]
    hosts = [row["decode_host_seconds"] for row in engines]
    panels = [
        Panel("Throughput", "requests / s", sizes, {"": [row["requests_per_second"] for row in engines]}),
        Panel("Over-allocation", "held / needed", sizes, {"": [row["over_allocation"] for row in engines]}),
        Panel(
            "Scheduler's time of a decode step",
            "ms",
            sizes,
            {part: [1e3 * host.get(part, 0.0) for host in hosts] for part in ("schedule", "update")},
            stacked=True,
        ),
    ]
    plot_panels(path, f"Heads of a page: {_served_title(report)}", panels)


def print_prefill(report: Report) -> None:
    """Latency of the prompt, and compress and reclaim beside it."""
    setup, engines = report["setup"], report["engines"]
    stock, full = engines.get("stock", {}), engines.get("1", {})
    rows = [
        (
            key,
            _milliseconds(row["median_seconds"]),
            ratio(row, stock, "median_seconds"),
            ratio(row, full, "median_seconds"),
            f"{_milliseconds(min(row['seconds']))} to {_milliseconds(max(row['seconds']))}",
            _milliseconds(row["host_seconds"]["schedule"] + row["host_seconds"]["update"]),
            "-" if row["own_kernels"] is None else percent(row["own_kernels"] / row["kernels"]["total"]),
        )
        for key, row in engines.items()
    ]
    title = f"{setup['model']}: first token of a prompt of {setup['prompt_tokens']} tokens"
    columns = ("engine", "ms", "/ stock", "/ full", "of repeats", "scheduler ms", "our kernels")
    console().print(table(title, columns, rows))
    reclaiming = {key: row["reclaim"] for key, row in engines.items() if row["reclaim"] is not None}
    if reclaiming:
        _print_reclaim(reclaiming)
    print_notes(report, "Full: ours at retention 1. Our kernels: their share of the GPU's time.")


def _print_reclaim(engines: dict[str, Report]) -> None:
    rows = [
        (
            key,
            f"{row['kept_pages']} in {_milliseconds(row['allocate_kept_seconds'])} ms",
            f"{row['full_pages']} in {_milliseconds(row['allocate_full_seconds'])} ms",
            f"{_milliseconds(row['free_seconds'])} ms",
            str(row["at_once"]),
            f"{row['at_once_reclaim']} ({row['at_once_unreclaimed']})",
        )
        for key, row in engines.items()
    ]
    columns = ("", "ours takes", "reclaim takes", "gives back", "at once: ours", "reclaim")
    console().print(table("Pages of the prompt, ours beside compress and reclaim", columns, rows))
    console().print(Text("In brackets: admitted while none of them is compressed yet.", "dim"))


def plot_prefill(report: Report, path: Path) -> None:
    """Bars of latency, and the pool's work beside that of compress and reclaim."""
    from vllm_tangram.cli.bench_plots import Panel, plot_panels

    seconds = {"": column(report, "median_seconds")}
    panels = [Panel("Time to first token", "s", list(report["engines"]), seconds)]
    reclaiming = {key: row["reclaim"] for key, row in report["engines"].items() if row["reclaim"] is not None}
    if reclaiming:
        places = [f"{key}{baseline}" for key in reclaiming for baseline in ("", "\nreclaim")]
        pairs = list(reclaiming.values())
        work = {
            "take": [1e3 * row[name] for row in pairs for name in ("allocate_kept_seconds", "allocate_full_seconds")],
            "give back": [1e3 * value for row in pairs for value in (0.0, row["free_seconds"])],
        }
        panels.append(Panel("Pages in the scheduler", "ms", places, work, stacked=True))
    setup = report["setup"]
    plot_panels(path, f"{setup['model']}, a prompt of {setup['prompt_tokens']} tokens", panels)


def print_ttft(report: Report) -> None:
    """Time to first token at every rate."""
    setup = report["setup"]
    rows = [
        (
            row["engine"],
            f"{row['rate']:g}/s",
            *(f"{row[name]:.2f} s" for name in ("mean", "p50", "p99")),
            str(row["most_running"]),
            str(row["preemptions"]),
        )
        for row in report["engines"].values()
    ]
    title = (
        f"{setup['model']}: time to first token, {setup['requests']} requests of {setup['prompt_tokens']} tokens and "
        f"{setup['output_tokens']} new ones"
    )
    columns = ("engine", "rate", "mean", "p50", "p99", "most at once", "preempted")
    console().print(table(title, columns, rows))
    print_notes(report)


def plot_ttft(report: Report, path: Path) -> None:
    """Lines over the rate."""
    from vllm_tangram.cli.bench_plots import Panel, plot_panels

    results = list(report["engines"].values())
    rates = sorted({row["rate"] for row in results})
    found = {(row["engine"], row["rate"]): row for row in results}
    panels = [
        Panel(
            f"Time to first token, {name}",
            "s",
            rates,
            {
                engine: [found.get((engine, rate), {}).get(name) for rate in rates]
                for engine in dict.fromkeys(row["engine"] for row in results)
            },
            quantity="requests / s",
        )
        for name in ("mean", "p50", "p99")
    ]
    setup = report["setup"]
    plot_panels(path, f"{setup['model']}, prompts of {setup['prompt_tokens']} tokens", panels)


def _served_title(report: Report) -> str:
    setup = report["setup"]
    return (
        f"{setup['model']}: {setup['requests']} requests of {setup['prompt_tokens']} tokens and "
        f"{setup['output_tokens']} new ones"
    )


def unfinished(report: Report) -> str:
    wanted = report["setup"]["requests"]
    stopped = [f"{key} after {row['finished']}" for key, row in report["engines"].items() if row["finished"] < wanted]
    return f"Stopped at the time limit: {', '.join(stopped)} requests." if stopped else ""


def print_notes(report: Report, *notes: str) -> None:
    """What holds for all engines, and how long each took to start."""
    engines = report["engines"]
    memory = sorted({human_bytes(row["kv_cache_bytes"]) for row in engines.values()})
    machine = sorted({f"{row['device']}, {row['versions']}" for row in engines.values()})
    started = {row.get("engine", key): row["start_seconds"] for key, row in engines.items()}
    starts = ", ".join(f"{key} {seconds:.0f} s" for key, seconds in started.items())
    for note in (f"{', '.join(memory)} of KV memory; {'; '.join(machine)}.", f"Started in: {starts}.", *notes):
        if note:
            console().print(Text(note, "dim"))


def column(report: Report, name: str) -> Sequence[float | None]:
    return [row[name] for row in report["engines"].values()]


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    """Three digits, without the unit: the column's head has it."""
    return "-" if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def ratio(row: Report, other: Report, name: str) -> str:
    value, base = row[name], other.get(name)
    return f"{value / base:.2f}" if value and base else "-"
