# SPDX-License-Identifier: Apache-2.0
"""``tangram bench multiturn``: conversations that go on, beside stock vLLM with its prefix cache."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tangram.cli import bench_options as opt
from vllm_tangram.cli import bench_reports
from vllm_tangram.cli.bench_reports import Report, column, number, print_notes, ratio
from vllm_tangram.cli.rendering import console, table
from vllm_tangram.config import DEFAULTS
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.bench.multiturn import Replayed
    from vllm_tangram.bench.serving import Engine, Started
    from vllm_tangram.bench.traffic import Traffic

# By whether there is CUDA.
_TALK = {True: (8, 16384, 256, 256), False: (5, 1500, 60, 24)}  # turns, first prompt, text of a turn, answer
_TRACE = {True: (1.0, 1.0, 1000, 65536), False: (0.2, 40.0, 40, 4096)}  # scale, speed, requests, longest request
# A prefix is reused in whole chunks, and the conversations of a CPU are short.
_CHUNK = {True: DEFAULTS["chunk_size"], False: 512}
_WORKING_SET = 3.0

_TRACE_FILE = "Requests of this file instead, in the format of Mooncake's traces."
_DIALOGUES_FILE = (
    "Dialogues of this file or folder instead, in the format of MT-Bench-101; the answers are the engine's."
)
_SPILL = "Ours once more with so much host memory for sessions, in GiB."


def multiturn(
    model: opt.Model = "embedded",
    working_set: Annotated[
        float | None,
        typer.Option(help="Final histories over the pool, at full KV: decides --conversations.  [default: 3]"),
    ] = None,
    conversations: Annotated[int | None, typer.Option(help="At once.", min=1, show_default=False)] = None,
    turns: Annotated[
        int | None, typer.Option(help="Of a conversation.  [default: 8; without CUDA 5]", min=1, show_default=False)
    ] = None,
    first_tokens: Annotated[
        int | None,
        typer.Option(help="First prompt.  [default: 16384; without CUDA 1500]", min=1, show_default=False),
    ] = None,
    user_tokens: Annotated[
        int | None,
        typer.Option(help="New text of a later turn.  [default: 256; without CUDA 60]", min=1, show_default=False),
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Of a turn.  [default: 256; without CUDA 24]", min=2, show_default=False)
    ] = None,
    think: Annotated[
        float | None,
        typer.Option(help="Mean seconds from an answer to the next turn.  [default: 0: at once]", show_default=False),
    ] = None,
    begin_within: Annotated[
        float | None,
        typer.Option(help="Seconds over which conversations begin.  [default: 0: all at once]", show_default=False),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help=_TRACE_FILE, show_default=False)] = None,
    dialogues: Annotated[Path | None, typer.Option(help=_DIALOGUES_FILE, show_default=False)] = None,
    scale: Annotated[
        float | None, typer.Option(help="Of the trace's lengths.  [default: 1; without CUDA 0.2]", show_default=False)
    ] = None,
    speed: Annotated[
        float | None, typer.Option(help="Of the trace's time.  [default: 1; without CUDA 40]", show_default=False)
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Requests of the trace or the dialogues, in whole conversations.  [default: 1000; without CUDA 40]",
            min=1,
            show_default=False,
        ),
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option(
            help="No longer ones, scaled, answers included.  [default: 65536; without CUDA 4096]",
            min=2,
            show_default=False,
        ),
    ] = None,
    retention: opt.Retention = [0.25],  # noqa: B006 (typer copies it)
    spill_gib: Annotated[float | None, typer.Option(help=_SPILL, min=0.001, show_default=False)] = None,
    engine: opt.Only = [],  # noqa: B006
    max_seconds: opt.MaxSeconds = None,
    profile: opt.Profile = None,
    kv_gib: opt.KvGib = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens that ours compresses at once; a prefix is reused in whole chunks.  "
            f"[default: {_CHUNK[True]}; without CUDA {_CHUNK[False]}]",
            min=32,
            show_default=False,
        ),
    ] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens of a step.  [default: 8192; without CUDA 2048; at least a chunk]",
            min=32,
            show_default=False,
        ),
    ] = None,
    enforce_eager: opt.Eager = None,
    set_: opt.Set = [],  # noqa: B006
    json: opt.Json = False,
    output: opt.Output = None,
    plot: opt.Plot = None,
) -> None:
    """Prompts that repeat what came before: ours with sessions, stock vLLM with its prefix cache."""
    from vllm_tangram.bench.multiturn import measure_multiturn
    from vllm_tangram.bench.serving import Engine
    from vllm_tangram.bench.sizing import kv_bytes_per_token
    from vllm_tangram.bench.traffic import Conversations

    cuda = opt.on_cuda()
    chunk = chunk_size or _CHUNK[cuda]
    engines = [Engine.parse(key) for key in engine or ["stock", *map(str, retention)]]
    if spill_gib is not None:
        engines += [
            replace(one, key=f"{one.key}+spill", options={**one.options, "session_spill_gib": spill_gib})
            for one in engines
            if one.retention is not None
        ]
    talk = {"turns": turns, "first-tokens": first_tokens, "user-tokens": user_tokens, "answer-tokens": answer_tokens}
    others = {"working-set": working_set, "conversations": conversations}
    others |= {"think": think, "begin-within": begin_within}
    recorded = {"scale": scale, "speed": speed, "limit": limit, "longest": longest}
    _check(trace, dialogues, talk | others, recorded)
    traffic: Traffic
    if trace is None and dialogues is None:
        traffic = Conversations(1, *_or_usual(talk, _TALK[cuda]))
    else:
        traffic = _read(model, trace, dialogues, *_or_usual(recorded, _TRACE[cuda]))
    setup = opt.setup_of(
        model, profile, kv_gib, traffic.max_model_len, max_num_seqs, chunk, enforce_eager, opt.options_of(set_)
    )
    if step_tokens is not None and step_tokens < chunk:
        raise TangramError(f"--step-tokens: must be at least --chunk-size ({chunk}), got {step_tokens}")
    setup = replace(setup, step_tokens=step_tokens or setup.step_tokens, prefix_caching=True)
    pool = setup.kv_tokens if setup.kv_bytes is None else setup.kv_bytes // kv_bytes_per_token(model)
    if isinstance(traffic, Conversations):
        wanted = round((working_set or _WORKING_SET) * pool / traffic.max_model_len)
        traffic = replace(
            traffic,
            conversations=conversations or max(wanted, 1),
            think_seconds=think or 0.0,
            begin_within=begin_within or 0.0,
        )
    sizes = {
        "requests": traffic.requests,
        "working_set_tokens": traffic.working_set,
        "working_set": traffic.working_set / pool,
    }
    results = opt.results_of("multiturn", setup, {**traffic.described(), **sizes}, output, plot)

    def done(engine: Engine, started: Started, measured: Replayed) -> None:
        results.add(engine.key, {**asdict(started), **asdict(measured)})

    with opt.progress_shown() as progress:
        measure_multiturn(setup, engines, traffic, max_seconds, done, progress)
    bench_reports.show(results.report, json, plot, print_multiturn, plot_multiturn)


def _or_usual(given: dict[str, Any], usual: tuple[Any, ...]) -> list[Any]:
    return [usual if value is None else value for value, usual in zip(given.values(), usual, strict=True)]


def _read(
    model: str, trace: Path | None, dialogues: Path | None, scale: float, speed: float, limit: int, longest: int
) -> Traffic:
    from vllm_tangram.bench.dialogues import read_dialogues, tokenizer_of
    from vllm_tangram.bench.traffic import read_trace

    if trace is not None:
        return read_trace(trace, scale, speed, limit, longest)
    assert dialogues is not None
    return read_dialogues(dialogues, tokenizer_of(model), limit, longest)


def _check(trace: Path | None, dialogues: Path | None, talk: dict[str, Any], recorded: dict[str, Any]) -> None:
    if trace is not None and dialogues is not None:
        raise TangramError("--trace, --dialogues: give one")
    for name in ("scale", "speed"):
        if trace is None and recorded[name] is not None:
            raise TangramError(f"--{name}: only with --trace")
    for name, value in (recorded if trace is None and dialogues is None else talk).items():
        if value is not None:
            given = "with" if name in recorded else "without"
            raise TangramError(f"--{name}: only {given} --trace or --dialogues")
    if talk["working-set"] is not None and talk["conversations"] is not None:
        raise TangramError("--working-set, --conversations: one decides the other, give one")
    for name in ("working-set", "scale", "speed"):
        value = (talk | recorded)[name]
        if value is not None and not 0 < value < float("inf"):
            raise TangramError(f"--{name}: must be a number above 0, got {value:g}")
    for name in ("think", "begin-within"):
        if talk[name] is not None and not 0 <= talk[name] < float("inf"):
            raise TangramError(f"--{name}: must be a number of seconds, 0 or more, got {talk[name]:g}")


def print_multiturn(report: Report) -> None:
    """Requests per second and time to first token, and what was reused."""
    engines = report["engines"]
    stock = engines.get("stock", {})
    rows = [
        (
            key,
            number(row["requests_per_second"], 3),
            ratio(row, stock, "requests_per_second"),
            number(row["ttft_p50"], 2),
            number(row["ttft_p99"], 2),
            str(row["prefilled_tokens"]),
            f"{100 * row['hit_rate']:.1f}",
            str(row["preemptions"]),
            "-" if row["sessions"] is None else str(row["sessions"]),
            "-" if row["restored"] is None else str(row["restored"]),
        )
        for key, row in engines.items()
    ]
    columns = (
        "engine", "req/s", "/ stock", "p50 s", "p99 s", "prefilled", "hit %", "preempt.", "sessions", "restored"
    )  # fmt: skip
    console().print(table(_title(report), columns, rows))
    size = f"The KV of all that is said is {report['setup']['working_set']:.1f} times what stock's pool holds."
    what = "p50, p99: time to first token. Prefilled: prompt tokens computed. Sessions: prefixes left at the end."
    restored = "Restored: requests that began with pages from host memory."
    print_notes(report, what, restored, size, bench_reports.unfinished(report))


def plot_multiturn(report: Report, path: Path) -> None:
    """Bars by engine."""
    from vllm_tangram.cli.bench_plots import Panel, plot_panels

    keys = list(report["engines"])
    waits = {name: column(report, f"ttft_{name}") for name in ("p50", "p99")}
    panels = [
        Panel("Throughput", "requests / s", keys, {"": column(report, "requests_per_second")}),
        Panel("Time to first token", "s", keys, waits),
        Panel("Prompt tokens computed", "tokens", keys, {"": column(report, "prefilled_tokens")}),
    ]
    plot_panels(path, _title(report), panels)


def _title(report: Report) -> str:
    setup = report["setup"]
    if "trace" in setup:
        what = f"{setup['requests']} requests of {setup['trace']}, lengths x {setup['scale']:g}"
        return f"{setup['model']}: {what}, time / {setup['speed']:g}"
    if "dialogues" in setup:
        return (
            f"{setup['model']}: {setup['conversations']} dialogues of {setup['dialogues']}, {setup['requests']} turns"
        )
    sizes = (
        f"first prompt {setup['first_tokens']}, then {setup['user_tokens']}, answers {setup['answer_tokens']} tokens"
    )
    return f"{setup['model']}: {setup['conversations']} conversations of {setup['turns']} turns, {sizes}"
