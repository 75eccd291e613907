# SPDX-License-Identifier: Apache-2.0
"""``tangram bench throughput``, ``groups``, ``prefill``, ``ttft``: whole engines beside stock vLLM."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tangram.cli import bench_options as opt
from vllm_tangram.cli import bench_reports
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.bench.prefill import Prefilled
    from vllm_tangram.bench.serving import Engine, Started
    from vllm_tangram.bench.throughput import Served
    from vllm_tangram.bench.ttft import FirstTokens

# Prompt tokens, new tokens, requests at every rate; and the rates.
_ARRIVALS = {True: (30720, 256, 48), False: (2048, 16, 8)}
_RATES = {True: [0.2, 0.4, 0.6, 0.8], False: [0.2, 0.5]}

GroupSize = Annotated[list[int], typer.Option(help="Heads of a page; repeatable.", min=1)]


def throughput(
    model: opt.Model = "embedded",
    mix: opt.Mix = "long",
    input_tokens: opt.InputTokens = None,
    output_tokens: opt.OutputTokens = None,
    requests: opt.Requests = None,
    retention: opt.Retention = [1.0, 0.75, 0.5, 0.25],  # noqa: B006 (typer copies it)
    ablation: Annotated[bool, typer.Option("--ablation", help="The paper's ablation at the least retention.")] = False,
    engine: opt.Only = [],  # noqa: B006
    max_seconds: opt.MaxSeconds = None,
    profile: opt.Profile = None,
    kv_gib: opt.KvGib = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    chunk_size: opt.ChunkSize = None,
    enforce_eager: opt.Eager = None,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    set_: opt.Set = [],  # noqa: B006
    json: opt.Json = False,
    output: opt.Output = None,
    plot: opt.Plot = None,
) -> None:
    """Requests per second of a full queue, at each retention and of stock vLLM (the paper's Figure 10)."""
    from vllm_tangram.bench.serving import Engine
    from vllm_tangram.bench.throughput import Workload, measure_throughput

    workload = Workload(*opt.sizes(mix, input_tokens, output_tokens, requests))
    keys = ["stock", *map(str, retention)]
    keys += [f"{min(retention):g}/{step}" for step in ("unified", "groups", "splits") if ablation]
    engines = [Engine.parse(key) for key in engine or keys]
    setup = opt.setup_of(
        model,
        profile,
        kv_gib,
        workload.max_model_len,
        max_num_seqs,
        chunk_size,
        enforce_eager,
        opt.options_of(set_),
        tensor_parallel_size,
    )
    results = opt.results_of("throughput", setup, asdict(workload), output, plot)

    def done(engine: Engine, started: Started, served: Served) -> None:
        results.add(engine.key, {**asdict(started), **asdict(served)})

    with opt.progress_shown() as progress:
        measure_throughput(setup, engines, workload, max_seconds, done, progress)
    bench_reports.show(results.report, json, plot, bench_reports.print_throughput, bench_reports.plot_throughput)


def groups(
    model: opt.Model = "embedded",
    group_size: GroupSize = [1, 2, 4, 8, 16, 32, 64],  # noqa: B006
    retention: Annotated[float, typer.Option(help="Of all engines.")] = 0.25,
    mix: opt.Mix = "long",
    input_tokens: opt.InputTokens = None,
    output_tokens: opt.OutputTokens = None,
    requests: opt.Requests = None,
    max_seconds: opt.MaxSeconds = None,
    profile: opt.Profile = None,
    kv_gib: opt.KvGib = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    chunk_size: opt.ChunkSize = None,
    enforce_eager: opt.Eager = None,
    set_: opt.Set = [],  # noqa: B006
    json: opt.Json = False,
    output: opt.Output = None,
    plot: opt.Plot = None,
) -> None:
    """Throughput, over-allocation and host time against the heads of a page (the paper's Figures 8 and 12)."""
    from vllm_tangram.bench.groups import engines_of, measure_groups
    from vllm_tangram.bench.serving import Engine
    from vllm_tangram.bench.throughput import Workload

    workload = Workload(*opt.sizes(mix, input_tokens, output_tokens, requests))
    engines = engines_of(Engine.parse(f"{retention:g}"), group_size)
    setup = opt.setup_of(
        model, profile, kv_gib, workload.max_model_len, max_num_seqs, chunk_size, enforce_eager, opt.options_of(set_)
    )
    results = opt.results_of("groups", setup, {**asdict(workload), "retention": retention}, output, plot)

    def done(engine: Engine, started: Started, figures: dict[str, Any]) -> None:
        results.add(engine.key, {**asdict(started), **figures})

    with opt.progress_shown() as progress:
        measure_groups(setup, engines, workload, max_seconds, done, progress)
    bench_reports.show(results.report, json, plot, bench_reports.print_groups, bench_reports.plot_groups)


def prefill(
    model: opt.Model = "embedded",
    input_tokens: Annotated[
        int | None, typer.Option(help="Length of the prompt.  [default: 32768; without CUDA 4096]", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Prompts that are timed.", min=1)] = 5,
    retention: opt.Retention = [1.0, 0.75, 0.5, 0.25],  # noqa: B006
    engine: opt.Only = [],  # noqa: B006
    profile: opt.Profile = None,
    kv_gib: opt.KvGib = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    chunk_size: opt.ChunkSize = None,
    enforce_eager: opt.Eager = None,
    tensor_parallel_size: opt.TensorParallelSize = 1,
    set_: opt.Set = [],  # noqa: B006
    json: opt.Json = False,
    output: opt.Output = None,
    plot: opt.Plot = None,
) -> None:
    """Latency of one prompt, beside a baseline that takes all its pages and gives back (the paper's Figure 11)."""
    from vllm_tangram.bench.prefill import measure_prefill
    from vllm_tangram.bench.serving import Engine

    tokens = input_tokens or (32768 if opt.on_cuda() else 4096)
    engines = [Engine.parse(key) for key in engine or ["stock", *map(str, retention)]]
    setup = opt.setup_of(
        model,
        profile,
        kv_gib,
        tokens + 1,
        max_num_seqs,
        chunk_size,
        enforce_eager,
        opt.options_of(set_),
        tensor_parallel_size,
    )
    results = opt.results_of("prefill", setup, {"prompt_tokens": tokens}, output, plot)

    def done(engine: Engine, started: Started, measured: Prefilled) -> None:
        results.add(engine.key, {**asdict(started), "median_seconds": measured.median_seconds, **asdict(measured)})

    with opt.progress_shown() as progress:
        measure_prefill(setup, engines, tokens, repeats, done, progress)
    bench_reports.show(results.report, json, plot, bench_reports.print_prefill, bench_reports.plot_prefill)


def ttft(
    model: opt.Model = "embedded",
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests per second; repeatable.  [default: 0.2 0.4 0.6 0.8; without CUDA 0.2 0.5]"),
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option(help="Length of a prompt.  [default: 30720; without CUDA 2048]", min=1)
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(help="New tokens of a request.  [default: 256; without CUDA 16]", min=2)
    ] = None,
    requests: Annotated[int | None, typer.Option(help="At every rate.  [default: 48; without CUDA 8]", min=1)] = None,
    retention: opt.Retention = [0.25],  # noqa: B006
    engine: opt.Only = [],  # noqa: B006
    profile: opt.Profile = None,
    kv_gib: opt.KvGib = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    chunk_size: opt.ChunkSize = None,
    enforce_eager: opt.Eager = None,
    set_: opt.Set = [],  # noqa: B006
    json: opt.Json = False,
    output: opt.Output = None,
    plot: opt.Plot = None,
) -> None:
    """Time to the first token of prompts that arrive at random, against their rate (the paper's Figure 14)."""
    from vllm_tangram.bench.serving import Engine
    from vllm_tangram.bench.ttft import Arrivals, measure_ttft

    wanted = zip((input_tokens, output_tokens, requests), _ARRIVALS[opt.on_cuda()], strict=True)
    arrivals = Arrivals(*(given or usual for given, usual in wanted))
    rates = rate or _RATES[opt.on_cuda()]
    if min(rates) <= 0:
        raise TangramError(f"--rate: must be above 0, got {min(rates):g}")
    engines = [Engine.parse(key) for key in engine or ["stock", *map(str, retention)]]
    setup = opt.setup_of(
        model, profile, kv_gib, arrivals.max_model_len, max_num_seqs, chunk_size, enforce_eager, opt.options_of(set_)
    )
    results = opt.results_of("ttft", setup, asdict(arrivals), output, plot)

    def done(engine: Engine, started: Started, measured: list[FirstTokens]) -> None:
        for one in measured:
            key = f"{engine.key} at {one.rate:g}/s"
            figures = {"mean": one.mean, "p50": one.percentile(50), "p99": one.percentile(99), **asdict(one)}
            results.add(key, {"engine": engine.key, **asdict(started), **figures})

    with opt.progress_shown() as progress:
        measure_ttft(setup, engines, arrivals, rates, done, progress)
    bench_reports.show(results.report, json, plot, bench_reports.print_ttft, bench_reports.plot_ttft)
