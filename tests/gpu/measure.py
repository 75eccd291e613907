# SPDX-License-Identifier: Apache-2.0
"""What docs/performance.md says of whole engines on a GPU, in one run: engines start together and are measured alone.

    python tests/gpu/measure.py OUT --profile FILE [--phase 1] [--phase 2] [--tiny]

The commands of ``tangram bench`` start their engines one after another, which takes longer than measuring; this calls
the same functions. Writes a line of JSON per measurement to OUT/measured.jsonl as soon as it is there. Phase 1 is stock
vLLM and retention 0.25, phase 2 the paper's ablation, group sizes and a gate. ``--tiny`` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm_tangram.bench import serving
from vllm_tangram.bench.groups import describe_groups, engines_of
from vllm_tangram.bench.multiturn import replayed
from vllm_tangram.bench.prefill import prefill
from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.bench.serving import Engine, Setup, describe
from vllm_tangram.bench.shapes import HeadShape, shape_fingerprint
from vllm_tangram.bench.sizing import kv_bytes_per_token
from vllm_tangram.bench.throughput import Workload, decode_kernels, serve
from vllm_tangram.bench.traffic import Conversations
from vllm_tangram.bench.ttft import Arrivals, first_tokens
from vllm_tangram.budget import RetentionProfile
from vllm_tangram.cli.bench_options import on_cuda
from vllm_tangram.compression.gate import Gate, GateWeights
from vllm_tangram.engine.stepper import EngineStepper

_GIB = 1 << 30
_TURNS_WITHIN = 80.0  # seconds of conversations: stock's pace is that of its prefills from the first turn to the last
STOCK, OURS = Engine.parse("stock"), Engine.parse("0.25")
# Half the default chunks, and blocks so small that the windows are no more of a chunk.
SMALL = Engine("0.25, chunks of 512, blocks of 32", 0.25, {"chunk_size": 512, "block_size": 32})


@dataclass(frozen=True)
class Sizes:
    """What is asked of the engines; requests of throughput are those of stock, compressed ones get up to four times."""

    setup: Setup
    prompt: int
    long: Workload
    mid: Workload
    host: Workload
    talks: tuple[Conversations, ...]
    arrivals: Arrivals
    rates: tuple[float, ...]
    gated: Engine
    max_seconds: float
    small_pool: int  # bytes; of phase 2, which has more engines

    @classmethod
    def of_gpu(cls, profile: Path, gate: Path, gate_profile: Path) -> Sizes:
        """Shapes of Qwen3-4B, a pool of 24 GiB: an 80 GB card holds two such engines, an H200 four."""
        setup = Setup(
            model="qwen3-4b",
            profile=str(profile),
            kv_bytes=24 * _GIB,
            kv_tokens=0,
            max_num_seqs=96,
            chunk_size=1024,
            enforce_eager=False,
            step_tokens=8192,
            prefix_caching=True,
        )
        long, mid, host = Workload(32768, 2048, 15), Workload(8192, 1024, 34), Workload(2048, 128, 64)
        # Both three times the pool; the second are those of `tangram bench multiturn`.
        talks = (
            Conversations(29, 14, 12000, 300, 150, begin_within=8.0),
            Conversations(26, 8, 16384, 256, 256, begin_within=8.0),
        )
        gated = Engine("0.25, gate", 0.25, {"gate": str(gate), "profile": str(gate_profile)})
        arrivals, rates = Arrivals(30720, 256, 16), (0.5, 1.0, 1.5)
        return cls(setup, 32768, long, mid, host, talks, arrivals, rates, gated, 110.0, 7 * _GIB)

    @classmethod
    def tiny(cls) -> Sizes:
        """The embedded model; shows that the script works, and nothing else."""
        setup = Setup("embedded", None, 200 << 20, 0, 8, 128, enforce_eager=True, step_tokens=512, prefix_caching=True)
        setup = replace(setup, options={"budgets": "uniform"})  # no profile has to be made
        short = Workload(64, 8, 2)
        talks, arrivals = (Conversations(2, 2, 200, 20, 8, begin_within=1.0),), Arrivals(256, 4, 3)
        long, gated = Workload(256, 16, 2), Engine("0.25, gate", 0.25, {"scorer": "fastkvzip"})
        return cls(setup, 256, long, short, short, talks, arrivals, (2.0,), gated, 20.0, 100 << 20)


def random_gate(folder: Path, profile: Path) -> tuple[Path, Path]:
    """A gate of the shapes of Qwen3-4B whose weights are random, and the profile for it: what it costs is real."""
    model = shape_fingerprint("qwen3-4b")
    shape = HeadShape.of(model)
    heads, inner, sinks, width = shape.kv_heads, 16, 16, int(model["hidden_size"])
    random = torch.Generator().manual_seed(0)

    def draw(*sizes: int, factor: float = 1.0) -> torch.Tensor:
        return (factor * torch.randn(shape.layers, *sizes, generator=random)).half().float()

    weights = GateWeights(
        q_weight=draw(shape.query_heads * inner, width, factor=width**-0.5),
        q_bias=draw(shape.query_heads * inner),
        k_weight=draw(heads * inner, width, factor=width**-0.5),
        q_norm=1 + draw(inner, factor=0.1),
        k_norm=1 + draw(inner, factor=0.1),
        k_base=draw(heads, sinks, inner),
        bias=draw(heads, shape.query_heads // heads),
    )
    folder.mkdir(parents=True, exist_ok=True)
    gate, gate_profile = folder / "gate.safetensors", folder / "gate-profile.safetensors"
    Gate(weights, model).save(gate)
    made = replace(RetentionProfile.load(profile), scorer="fastkvzip", gate=Gate.load(gate).digest())
    made.save(gate_profile)
    return gate, gate_profile


class Report:
    """The file of results."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "measured.jsonl").open("a", buffering=1)
        self._start = time.monotonic()

    def add(self, process: EngineProcess, what: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Measure, with no prefix known from what was measured before; an engine that fails ends no other's part."""
        begun = time.monotonic()
        try:
            process.call(EngineStepper.forget_prefixes)
            result = process.call(function, *arguments)
            found: dict[str, Any] = {"result": asdict(result) if is_dataclass(result) else result}  # type: ignore[arg-type]
        except Exception as error:
            found = {"error": str(error)}
        seconds = time.monotonic() - begun
        self._file.write(json.dumps({"engine": process.name, "what": what, "took": seconds, **found}) + "\n")
        note = found.get("error", "")[-500:] or f"{seconds:.0f} s"
        print(f"[{time.monotonic() - self._start:5.0f}] {process.name}, {what}: {note}", flush=True)


def start(stack: ExitStack, report: Report, setup: Setup, engines: Sequence[Engine], length: int) -> dict[str, Any]:
    """Processes of all engines by key, ready."""
    processes = {engine.key: stack.enter_context(setup.start(engine, length)) for engine in engines}
    with ThreadPoolExecutor(len(processes)) as threads:
        list(threads.map(lambda process: report.add(process, "start", describe), processes.values()))
    return processes


def phase_1(report: Report, sizes: Sizes) -> None:
    """Stock vLLM beside ours."""
    length = max(part.max_model_len for part in (sizes.long, *sizes.talks, sizes.arrivals))
    with ExitStack() as stack:
        processes = start(stack, report, sizes.setup, [STOCK, OURS, SMALL], length)
        for key, process in processes.items():
            report.add(process, "prefill", prefill, sizes.prompt, 5, key != STOCK.key)
            for number, talk in enumerate(sizes.talks):
                report.add(process, f"conversations {number}", replayed, talk, _TURNS_WITHIN)
        for key, process in processes.items():
            if key == SMALL.key:
                continue
            more = 1 if key == STOCK.key else 4
            report.add(process, "host", serve, sizes.host, sizes.max_seconds)
            if on_cuda():
                report.add(process, "kernels", decode_kernels, sizes.host)
            for what in ("mid", "long"):
                workload: Workload = getattr(sizes, what)
                wanted = replace(workload, requests=more * workload.requests)
                report.add(process, what, serve, wanted, sizes.max_seconds)
            if key != STOCK.key:
                wanted = replace(sizes.mid, requests=2 * sizes.mid.requests, retention=0.5)
                report.add(process, "mid, requests of 0.5", serve, wanted, sizes.max_seconds)
            for rate in sizes.rates:
                report.add(process, f"ttft at {rate:g}/s", first_tokens, sizes.arrivals, rate)


def phase_2(report: Report, sizes: Sizes) -> None:
    """Retention 1, the ablation, pages of one head, and prefill with a gate; no prompt begins as another does."""
    setup = replace(sizes.setup, kv_bytes=sizes.small_pool, prefix_caching=False)
    steps = [Engine.parse(f"{OURS.key}/{step}") for step in ("unified", "groups", "splits")]
    # With the number of batches; a batch has as many requests as fit stock at once.
    engines = [(STOCK, 2), (Engine.parse("1"), 2)]
    engines += [(engine, 7) for engine in (*steps, *engines_of(steps[-1], (1,)))]
    fit = max(sizes.small_pool // (sizes.mid.max_model_len * kv_bytes_per_token(setup.model)), 1)
    with ExitStack() as stack:
        length = max(sizes.mid.max_model_len, sizes.prompt + 1)
        processes = start(stack, report, setup, [*(engine for engine, _ in engines), sizes.gated], length)
        for engine in (STOCK, steps[-1], sizes.gated):
            compressing = engine.retention is not None
            report.add(processes[engine.key], "prefill", prefill, sizes.prompt, 5, compressing)
        for engine, count in engines:
            process = processes[engine.key]
            if engine.retention is not None:
                report.add(process, "groups", describe_groups, sizes.mid.prompt_tokens)
            report.add(process, "mid", serve, replace(sizes.mid, requests=count * fit), sizes.max_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", type=Path, help="of `tangram bench profile`, for KeyDiff")
    parser.add_argument("--phase", type=int, action="append", choices=(1, 2))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny == (options.profile is not None):
        parser.error("give --profile, or --tiny")
    sizes = Sizes.tiny() if options.tiny else Sizes.of_gpu(options.profile, *random_gate(options.out, options.profile))
    if not options.tiny:
        plain = serving.model_options

        def beside_others(model: str) -> tuple[str, dict[str, Any]]:
            path, given = plain(model)
            return path, given | {"gpu_memory_utilization": 0.1}  # what vLLM wants to see free; pools are in bytes

        serving.model_options = beside_others
    report = Report(options.out)
    for phase in options.phase or (1, 2):
        {1: phase_1, 2: phase_2}[phase](report, sizes)


if __name__ == "__main__":
    main()
