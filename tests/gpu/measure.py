# SPDX-License-Identifier: Apache-2.0
"""What docs/performance.md says of whole engines on a GPU, in one run: engines start together and are measured alone.

    python tests/gpu/measure.py OUT --profile q3.safetensors [--phase 1] [--phase 2] [--tiny]

The commands of ``tangram bench`` start their engines one after another, which takes longer than measuring; this calls
the same functions. Writes a line of JSON per measurement to OUT/measured.jsonl as soon as it is there. Phase 1 is stock
vLLM and retention 0.25, phase 2 the paper's ablation and group sizes. ``--tiny`` tries the script on a CPU.
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

from vllm_tangram.bench import serving
from vllm_tangram.bench.groups import describe_groups, engines_of
from vllm_tangram.bench.multiturn import replayed
from vllm_tangram.bench.prefill import prefill
from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.bench.serving import Engine, Setup, describe
from vllm_tangram.bench.throughput import Workload, serve
from vllm_tangram.bench.traffic import Conversations
from vllm_tangram.bench.ttft import Arrivals, first_tokens
from vllm_tangram.engine.stepper import EngineStepper

_GIB = 1 << 30
STOCK, OURS = Engine.parse("stock"), Engine.parse("0.25")


@dataclass(frozen=True)
class Sizes:
    """What is asked of the engines; requests of throughput are those of stock, ours gets four times as many."""

    setup: Setup
    prompt: int
    long: Workload
    mid: Workload
    host: Workload
    talk: Conversations
    arrivals: Arrivals
    rates: tuple[float, ...]
    max_seconds: float
    small_pool: int  # bytes; of phase 2, which has more engines

    @classmethod
    def of_gpu(cls, profile: Path | None) -> Sizes:
        """Shapes of Qwen3-4B, a pool of 24 GiB: an 80 GB card holds two such engines, an H200 four."""
        setup = Setup(
            model="qwen3-4b",
            profile=str(profile),
            kv_bytes=24 * _GIB,
            kv_tokens=0,
            max_num_seqs=96,
            chunk_size=2048,
            enforce_eager=False,
            step_tokens=8192,
            prefix_caching=True,
        )
        long, mid, host = Workload(32768, 2048, 15), Workload(8192, 1024, 34), Workload(2048, 128, 64)
        talk = Conversations(29, 14, 12000, 300, 150, begin_within=8.0)
        return cls(setup, 32768, long, mid, host, talk, Arrivals(30720, 256, 16), (0.4, 0.8, 1.2), 110.0, 10 * _GIB)

    @classmethod
    def tiny(cls) -> Sizes:
        """The embedded model; shows that the script works, and nothing else."""
        setup = Setup("embedded", None, 200 << 20, 0, 8, 128, enforce_eager=True, step_tokens=512, prefix_caching=True)
        short = Workload(64, 8, 2)
        talk, arrivals = Conversations(2, 2, 200, 20, 8, begin_within=1.0), Arrivals(256, 4, 3)
        return cls(setup, 256, Workload(256, 16, 2), short, short, talk, arrivals, (2.0,), 20.0, 100 << 20)


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
    length = max(sizes.long.max_model_len, sizes.talk.max_model_len, sizes.arrivals.max_model_len)
    with ExitStack() as stack:
        processes = start(stack, report, sizes.setup, [STOCK, OURS], length)
        for key, process in processes.items():
            more = 1 if key == STOCK.key else 4
            report.add(process, "prefill", prefill, sizes.prompt, 5, key != STOCK.key)
            for what in ("host", "mid", "long"):
                workload: Workload = getattr(sizes, what)
                wanted = workload if what == "host" else replace(workload, requests=more * workload.requests)
                report.add(process, what, serve, wanted, sizes.max_seconds)
            report.add(process, "conversations", replayed, sizes.talk, sizes.max_seconds)
            for rate in sizes.rates:
                report.add(process, f"ttft at {rate:g}/s", first_tokens, sizes.arrivals, rate)


def phase_2(report: Report, sizes: Sizes) -> None:
    """The ablation, and pages of 1 and 16 heads; prompts have nothing in common, so nothing is kept for later ones."""
    setup = replace(sizes.setup, kv_bytes=sizes.small_pool, prefix_caching=False)
    steps = [Engine.parse(f"{OURS.key}/{step}") for step in ("unified", "groups", "splits")]
    groups = engines_of(steps[-1], (1, 16))
    with ExitStack() as stack:
        processes = start(stack, report, setup, [STOCK, *steps, *groups], sizes.mid.max_model_len)
        for key, process in processes.items():
            if key != STOCK.key:
                report.add(process, "groups", describe_groups, sizes.mid.prompt_tokens)
            more = 1 if key == STOCK.key else 4
            wanted = replace(sizes.mid, requests=more * max(sizes.mid.requests // 2, 1))
            report.add(process, "mid", serve, wanted, sizes.max_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", type=Path, help="of `tangram bench profile`")
    parser.add_argument("--phase", type=int, action="append", choices=(1, 2))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny == (options.profile is not None):
        parser.error("give --profile, or --tiny")
    sizes = Sizes.tiny() if options.tiny else Sizes.of_gpu(options.profile)
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
