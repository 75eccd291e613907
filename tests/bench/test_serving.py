# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of whole engines: on stand-ins whose time is known, and on a tiny real engine without weights."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_tangram.bench import groups, prefill, serving, throughput, ttft
from vllm_tangram.bench.prefill import Prefilled, Reclaim, compress_and_reclaim
from vllm_tangram.bench.profiler import own_kernels
from vllm_tangram.bench.results import Results
from vllm_tangram.bench.serving import Engine, Setup, Started
from vllm_tangram.bench.sizing import card_kv_bytes, graph_sizes, kv_heads, model_options
from vllm_tangram.bench.throughput import Served, Workload, serve
from vllm_tangram.bench.ttft import Arrivals, FirstTokens, first_tokens
from vllm_tangram.budget import RetentionPlan
from vllm_tangram.cli.app import app
from vllm_tangram.config import TangramConfig
from vllm_tangram.engine.clock import StepClock
from vllm_tangram.errors import TangramError

STARTED = Started(1 << 30, 12.0, "some device", "vLLM 0, torch 0")
SERVED = Served(10.0, 4, 0.4, 0.5, 30.0, 2.5, 3, 1, 0.26, 1000, 7, 0.02, 3, {"schedule": 1e-4, "model": 0.01})
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 10240,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A folder with a configuration and nothing else."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def setup(model: str = "some/model", **changes: Any) -> Setup:
    given = {"profile": None, "kv_bytes": 1 << 20, "kv_tokens": 0, "max_num_seqs": 4, "chunk_size": 64}
    return Setup(model, **{**given, "enforce_eager": True, **changes})


class FakeStepper:
    """``fits`` requests run at once. A prompt takes a step of 2 seconds, a token of all others 1 second."""

    def __init__(self, fits: int) -> None:
        self.fits, self.now, self.preemptions, self.steps = fits, 0.0, 3, 0
        self.left: dict[str, int] = {}
        self.fresh: set[str] = set()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add_counted(self, name: str, prompt: list[int], max_tokens: int, retention: float | None = None) -> None:
        assert name not in self.left
        self.left[name] = max_tokens
        self.fresh.add(name)

    def advance(self) -> SimpleNamespace:
        running = list(self.left)[: self.fits]
        prompts = [name for name in running if name in self.fresh][:1]
        got = prompts or running
        seconds = 2.0 if prompts else 1.0
        self.now += seconds
        self.steps += 1
        self.fresh.difference_update(prompts)
        for name in got:
            self.left[name] -= 1
        finished = [name for name in got if self.left[name] == 0]
        for name in finished:
            del self.left[name]
        host = {"schedule": 0.1 * len(got), "model": 0.5}
        return SimpleNamespace(
            seconds=seconds,
            new_tokens=dict.fromkeys(got, 1),
            finished=finished,
            running=len(running),
            decode_only=not prompts,
            host=host,
        )

    def held(self) -> tuple[int, float]:
        return 100 * self.steps, 0.25

    def abort_all(self) -> None:
        self.left.clear()
        self.fresh.clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStepper:
    """Two at once, and the benchmarks' clock is its."""
    stepper = FakeStepper(2)
    for module in (throughput, ttft):
        monkeypatch.setattr(module, "time", stepper)
    return stepper


def test_served(fake: FakeStepper) -> None:
    """4 requests of 3 tokens, two at once: twice (2 prompts of 2 s, then 2 steps of 1 s)."""
    served = serve(fake, Workload(8, 3, 4))  # type: ignore[arg-type]
    assert served.seconds == 12.0
    assert served.finished == 4
    assert served.requests_per_second == pytest.approx(4 / 12)
    assert served.output_tokens_per_second == pytest.approx(1.0)
    assert served.steady_requests_per_second == pytest.approx(2 / 6)
    assert (served.mean_running, served.most_running, served.preemptions) == (2.0, 2, 3)
    assert (served.decode_steps, served.decode_step_seconds, served.decode_rows) == (4, 1.0, 2)
    assert served.decode_host_seconds == pytest.approx({"schedule": 0.2, "model": 0.5})
    assert not fake.left


def test_served_samples_what_is_held(fake: FakeStepper) -> None:
    served = serve(fake, Workload(8, 20, 2))  # type: ignore[arg-type]
    before = 2 + 7  # the warm-up: 2 prompts and 7 steps
    assert served.kept_fraction == 0.25
    assert served.most_held_bytes == 100 * (before + 16)


def test_time_limit(fake: FakeStepper) -> None:
    served = serve(fake, Workload(8, 3, 100), max_seconds=20)  # type: ignore[arg-type]
    assert (served.seconds, served.finished) == (20.0, 6)
    assert not fake.left
    with pytest.raises(TangramError, match="no request got a token in 0 s"):
        serve(fake, Workload(8, 3, 100), max_seconds=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "requests", "expected"),
    [
        ([1, 1, 1, 5, 5, 5, 9, 9, 9], 9, 3 / 4),  # waves of three
        ([1, 2, 3, 4, 5, 6, 7, 7.1, 7.2], 9, 1.0),  # one a second, until nobody takes the place of who is done
        ([1, 2, 3, 4, 5, 6, 7], 100, 1.0),  # stopped at the time limit
        ([1, 1, 1, 9, 9], 5, None),  # less than two batches
        ([1, 2, 3], 100, None),
        ([], 100, None),
    ],
)
def test_steady(ends: list[float], requests: int, expected: float | None) -> None:
    log = throughput._Log(requests)
    log.times, log.running, log.finished_at = [0.0, *ends], [3], list(range(1, len(ends) + 1))
    assert log._steady() == (None if expected is None else pytest.approx(expected))


def test_first_tokens(fake: FakeStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for the step that runs when they arrive, for prompts before them, and for room."""
    monkeypatch.setattr(Arrivals, "times", lambda self, rate: [1.0, 1.5, 3.5, 30.0])
    result = first_tokens(fake, Arrivals(8, 4, 4), 1.0)  # type: ignore[arg-type]
    # 1 to 3: prompt 0. 3 to 5: prompt 1. Three steps of both until 8. Prompt 2 until 10. Prompt 3 when it is due.
    assert result.seconds == pytest.approx((2.0, 3.5, 6.5, 2.0), abs=0.02)
    assert (result.most_running, result.preemptions) == (2, 3)
    assert result.mean == pytest.approx(3.5, abs=0.02)
    assert result.percentile(50) == pytest.approx(2.75, abs=0.02)


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = Arrivals(1, 1, 4000)
    times = np.array(arrivals.times(2.0))
    assert arrivals.times(2.0) == times.tolist()
    gaps = np.diff(times, prepend=0.0)
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.5, rel=0.06)
    assert gaps.std() == pytest.approx(0.5, rel=0.1)
    assert arrivals.times(4.0) == pytest.approx(times / 2), "rates are compared by the same arrivals"


class FakePool:
    """vLLM's pool, as far as the benchmark uses it."""

    def __init__(self, pages: int) -> None:
        self.free = list(range(pages))

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[int]:
        assert count <= len(self.free), "more than there are"
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def free_blocks(self, blocks: Any) -> None:
        self.free += blocks
        assert len(set(self.free)) == len(self.free), "freed twice"


@pytest.mark.parametrize(("tokens", "pages"), [(1000, 300), (1024, 128), (300, 95), (1024, 1000)])
def test_compress_and_reclaim(tokens: int, pages: int) -> None:
    config = TangramConfig(retention=0.25, budgets="uniform", chunk_size=256, window=16)
    plan = RetentionPlan(config, None, num_layers=4, num_kv_heads=4, block_size=32, max_tokens=1024)
    pool = FakePool(pages)
    scheduler = SimpleNamespace(plan=plan, kv_cache_manager=SimpleNamespace(block_pool=pool))
    reclaim = compress_and_reclaim(scheduler, tokens, 3)
    assert reclaim is not None
    assert len(pool.free) == pages
    assert reclaim.full_pages == 4 * -(-tokens // 32)
    assert reclaim.kept_pages == plan.schedule(0.25).num_pages(tokens, tokens)
    assert min(reclaim.allocate_full_seconds, reclaim.allocate_kept_seconds, reclaim.free_seconds) > 0

    def admitted(need: int, hold: int) -> int:
        count, free = 0, pages
        while free >= need:
            count, free = count + 1, free - hold
        return count

    full, kept = reclaim.full_pages, reclaim.kept_pages
    assert reclaim.at_once == admitted(kept, kept)
    assert reclaim.at_once_reclaim == admitted(full, kept)
    assert reclaim.at_once_unreclaimed == admitted(full, full)


def test_compress_and_reclaim_without_room() -> None:
    plan = RetentionPlan(
        TangramConfig(budgets="uniform"), None, num_layers=2, num_kv_heads=2, block_size=32, max_tokens=4096
    )
    scheduler = SimpleNamespace(plan=plan, kv_cache_manager=SimpleNamespace(block_pool=FakePool(100)))
    assert compress_and_reclaim(scheduler, 4096, 1) is None


def test_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class JITFunction:
        __name__ = "_select"

    kernel = JITFunction()
    monkeypatch.setitem(sys.modules, "vllm_tangram.made_up", SimpleNamespace(select=kernel, other=3))
    monkeypatch.setitem(sys.modules, "others.made_up", SimpleNamespace(theirs=JITFunction()))
    before = own_kernels()
    assert "_select" in before
    monkeypatch.delitem(sys.modules, "vllm_tangram.made_up")
    assert own_kernels() == before - {"_select"}


def test_step_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeStepper(fits=1)
    monkeypatch.setattr("vllm_tangram.engine.clock.time", time)
    batch = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 4}, total_num_scheduled_tokens=5)
    scheduler = SimpleNamespace(schedule=lambda: batch, update_from_output=lambda _: time.sleep(2))
    executor = SimpleNamespace(execute_model=lambda _: time.sleep(3), sample_tokens=lambda _: time.sleep(4))
    clock = StepClock(scheduler, executor)
    assert scheduler.schedule() is batch
    for call in (executor.execute_model, executor.sample_tokens, scheduler.update_from_output):
        call(batch)
    assert (clock.rows, clock.tokens) == (2, 5)
    assert clock.take() == {"schedule": 0.0, "model": 7.0, "update": 2.0}
    assert set(clock.take().values()) == {0.0}


def test_engines() -> None:
    assert Engine.parse("stock") == Engine("stock", None)
    assert Engine.parse("1.0") == Engine("1", 1.0)
    unified = Engine.parse("0.25/unified")
    assert (unified.key, unified.retention) == ("0.25/unified", 0.25)
    assert unified.options["grouping"] == "neighbours"
    assert unified.environment == Engine.parse("0.25/groups").environment == {"TANGRAM_SPLIT_MAP": "0"}
    assert Engine.parse("0.25/splits").environment == {}
    assert {Engine.parse(f"0.25/{step}").options["margin"] for step in ("unified", "groups", "splits")} == {"on_top"}
    assert [engine.options["page_group_size"] for engine in groups.engines_of(Engine.parse("0.5"), [1, 8])] == [1, 8]


@pytest.mark.parametrize("key", ["", "stok", "0", "1.5", "nan", "0.25/other", "stock/unified"])
def test_no_engine(key: str) -> None:
    with pytest.raises(TangramError, match=f"--engine, --retention: {key!r} is neither 'stock' nor a retention"):
        Engine.parse(key)


@pytest.mark.parametrize("most", [1, 2, 5, 8, 20, 128])
def test_graph_sizes(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    decode = [size for size in sizes if size <= most]
    assert (decode[0], decode[-1]) == (1, most)
    assert max(np.diff(decode, prepend=0)) <= (8 if most <= 64 else 16)
    assert sizes[len(decode) :] == list(range(512, 2049, 256))


# Parameters of the published models.
@pytest.mark.parametrize(
    ("model", "billions"), [("qwen3-4b", 4.02), ("qwen2.5-7b", 7.62), ("llama-3.1-8b", 8.03), ("qwen2.5-32b", 32.76)]
)
def test_what_an_80_gb_card_leaves(model: str, billions: float) -> None:
    for ranks in (1, 2):  # each has its part of the weights
        left = (0.9 * 79.6 - 3) * 2**30 - 2e9 * billions / ranks
        assert card_kv_bytes(model, ranks) == pytest.approx(left, abs=0.05e9)


def test_unknown_sizes() -> None:
    for function in (card_kv_bytes, kv_heads):
        with pytest.raises(TangramError, match="some/model: its sizes are not in a folder"):
            function("some/model")


def test_model_options(tiny: str) -> None:
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
    assert model_options(tiny) == (tiny, dummy)
    assert model_options("qwen3-4b")[1] == dummy
    (Path(tiny) / "model.safetensors").touch()
    assert model_options(tiny) == (tiny, {})
    assert model_options("some/model") == ("some/model", {})


def test_engine_options(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is the same for stock vLLM and for ours, but what is ours."""
    started: list[tuple[Any, Any]] = []
    monkeypatch.setattr(serving, "EngineProcess", lambda *given, **named: started.append((given, named)))
    common = setup(tiny, options={"scorer": "knorm"}, enforce_eager=False)
    for key in ("stock", "1", "0.25/unified"):
        common.start(Engine.parse(key), 100)
    (stock_given, stock), (_, full), (_, unified) = started
    assert stock_given == ("stock", tiny)
    assert (stock["ours"], full["ours"], stock["kv_bytes"], full["kv_bytes"]) == (False, True, 1 << 20, 1 << 20)
    ours = {"retention": 1.0, "profile": None, "chunk_size": 64, "scorer": "knorm"}
    assert full["options"] == stock["options"] | ours
    assert stock["options"]["max_num_batched_tokens"] == 68
    assert stock["options"]["compilation_config"] == {"cudagraph_capture_sizes": graph_sizes(4)}
    assert unified["options"]["page_group_size"] == TINY["num_key_value_heads"]
    assert unified["environment"] == full["environment"] | {"TANGRAM_SPLIT_MAP": "0"}


def test_shape_without_profile() -> None:
    with pytest.raises(TangramError, match="--profile: qwen3-4b has no weights to make a profile from"):
        setup("qwen3-4b").start(Engine.parse("0.25"), 100)


def test_results_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results("throughput", {"model": "m", "sizes": (1, 2)}, path)
    first.add("stock", {"rate": 1})
    first.add("0.25", {"rate": 2})
    second = Results("throughput", {"model": "m", "sizes": (1, 2)}, path)
    second.add("0.25", {"rate": 3})
    written = json.loads(path.read_text())
    assert written == second.report
    assert written["engines"] == {"stock": {"rate": 1}, "0.25": {"rate": 3}}
    with pytest.raises(TangramError, match=r"another setup \(model 'm' there, 'n' here; more None there, 1 here\)"):
        Results("throughput", {"model": "n", "sizes": (1, 2), "more": 1}, path)
    with pytest.raises(TangramError, match="benchmark 'throughput' there, 'ttft' here"):
        Results("ttft", {"model": "m", "sizes": (1, 2)}, path)
    assert json.loads(path.read_text()) == written


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "throughput"}'])
def test_file_that_holds_no_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(TangramError, match="exists and holds no results"):
        Results("throughput", {}, path)
    assert path.read_text() == text


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--mix", "huge"], "--mix: must be long, mid, short, got 'huge'"),
        (["throughput", "--engine", "2"], "--engine, --retention: '2' is neither"),
        (["throughput", "--set", "block_size"], "--set: 'block_size' is not NAME=VALUE"),
        (["throughput", "--plot", "/nowhere/plot.png"], "--plot: there is no folder /nowhere"),
        (["prefill", "--output", "/nowhere/out.json"], "--output: there is no folder /nowhere"),
        (["prefill", "--retention", "0"], "--engine, --retention: '0.0' is neither"),
        (["ttft", "--rate", "0"], "--rate: must be above 0, got 0"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"error: {message}" in result.stderr


def _measured(results: dict[str, Any]) -> Any:
    """A stand-in for ``measure_...`` that gives ``results`` by engine, and an error where it has none."""

    def measure(setup: Setup, engines: list[Engine], *given: Any) -> None:
        done = given[-2]
        for engine in engines:
            done(engine, STARTED, results[engine.key])

    return measure


def test_throughput_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stock = Served(10.0, 2, 0.2, 0.2, 15.0, 1.0, 1, 0, 1.0, 4000, 0, None, None, {})
    steps = {f"0.25/{step}": SERVED for step in ("unified", "groups", "splits")}
    results = {"stock": stock, "0.25": SERVED, **steps}
    monkeypatch.setattr(throughput, "measure_throughput", _measured(results))
    output, plot = tmp_path / "out.json", tmp_path / "plot.png"
    common = ["throughput", "--requests", "4", "--output", str(output), "--plot", str(plot)]
    assert run(*common, "--engine", "stock").exit_code == 0
    result = run(*common, "--retention", "0.25", "--ablation", "--set", "block_size=64", "--json")
    assert "options {} there, {'block_size': 64} here" in result.stderr
    result = run(*common, "--retention", "0.25", "--ablation", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(output.read_text())
    assert list(report["engines"]) == list(results)
    assert report["engines"]["0.25"]["steady_requests_per_second"] == 0.5
    assert report["setup"]["requests"] == 4
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = " ".join(run(*common, "--engine", "0.25").stdout.split())
    for part in ("0.400 2.00 0.500 2.50 2.5 1 26.0 20", "stock after 2 requests", "some device", "1.0 GiB of KV"):
        assert part in shown


def test_groups_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def figures(size: int) -> dict[str, Any]:
        grouped = groups.Grouped(size, 90 // size, 1.0 + size / 100, 500, 77, 0.251)
        return vars(grouped) | vars(SERVED)

    monkeypatch.setattr(groups, "measure_groups", _measured({f"G={size}": figures(size) for size in (1, 8)}))
    arguments = ["groups", "--group-size", "8", "--group-size", "1", "--plot", str(tmp_path / "plot.png")]
    report = json.loads(run(*arguments, "--json").stdout)
    assert report["engines"]["G=8"]["over_allocation"] == 1.08
    shown = " ".join(run(*arguments).stdout.split())
    assert "8 11 1.080 25.1 77 0.400 0.500 20 0.1 - 10" in shown
    assert (tmp_path / "plot.png").exists()


def test_prefill_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = {"schedule": 0.001, "update": 0.002, "model": 1.0}
    reclaim = Reclaim(1000, 250, 0.004, 0.001, 0.003, 5000, 20, 17, 5)
    results = {
        "stock": Prefilled((2.0, 3.0, 2.5), 4, host, {}, None, None),
        "1": Prefilled((2.0, 2.0, 9.0), 4, host, {}, None, None),
        "0.25": Prefilled((1.5,), 4, host, {"gemm": 0.6, "_select": 0.1, "total": 0.8}, 0.2, reclaim),
    }
    monkeypatch.setattr(prefill, "measure_prefill", _measured(results))
    plot = tmp_path / "plot.png"
    arguments = ["prefill", "--retention", "1", "--retention", "0.25", "--plot", str(plot)]
    report = json.loads(run(*arguments, "--json").stdout)
    assert [row["median_seconds"] for row in report["engines"].values()] == [2.5, 2.0, 1.5]
    assert report["engines"]["0.25"]["reclaim"]["at_once_reclaim"] == 17
    shown = " ".join(run(*arguments).stdout.split())
    assert "0.25 1500 0.60 0.75 1500 to 1500 3 25.0 %" in shown
    assert "0.25 250 in 1 ms 1000 in 4 ms 3 ms 20 17 (5)" in shown
    assert plot.exists()


def test_ttft_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = {"stock": [FirstTokens(0.5, (1.0, 3.0), 2, 0), FirstTokens(1.0, (9.0, 9.0), 2, 1)]}
    results["0.25"] = [FirstTokens(0.5, (1.0, 1.0), 1, 0)]
    monkeypatch.setattr(ttft, "measure_ttft", _measured(results))
    plot = tmp_path / "plot.png"
    result = run("ttft", "--plot", str(plot), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["engines"]) == ["stock at 0.5/s", "stock at 1/s", "0.25 at 0.5/s"]
    assert report["engines"]["stock at 0.5/s"]["p99"] == pytest.approx(2.98)
    shown = " ".join(run("ttft").stdout.split())
    assert "stock 0.5/s 2.00 s 2.00 s 2.98 s 2 0" in shown
    assert plot.exists()


@pytest.mark.engine
def test_tiny_engines(tiny: str, tmp_path: Path) -> None:
    """Stock vLLM and ours, without weights and tokenizer: what they do is known beforehand."""
    output = tmp_path / "out.json"
    sizes = ["--input-tokens", "300", "--output-tokens", "20", "--requests", "6", "--chunk-size", "128"]
    common = ["--max-num-seqs", "4", "--kv-gib", "0.004", "--set", "budgets=uniform", "--set", "window=32"]
    result = run("throughput", tiny, *sizes, *common, "--engine", "stock", "--output", str(output))
    assert result.exit_code == 0, result.output
    figures = json.loads(output.read_text())["engines"]["stock"]
    assert (figures["finished"], figures["most_running"], figures["kept_fraction"]) == (6, 4, 1.0)
    assert figures["output_tokens_per_second"] == pytest.approx(6 * 20 / figures["seconds"])
    assert figures["decode_rows"] in (2, 4)
    assert figures["decode_host_seconds"]["model"] > figures["decode_host_seconds"]["schedule"] > 0

    ours = setup(tiny, kv_bytes=4 << 20, chunk_size=128, options={"budgets": "uniform", "window": 32})
    with ours.start(Engine.parse("0.25"), 321) as process:
        measured = process.call(prefill.prefill, 300, 2, True)
        assert (len(measured.seconds), measured.steps) == (2, 3)
        assert measured.reclaim is not None
        assert measured.reclaim.kept_pages < measured.reclaim.full_pages == 10
        arrived = process.call(first_tokens, Arrivals(300, 5, 4), 50.0)
        assert len(arrived.seconds) == 4
        assert min(arrived.seconds) > 0
        described = process.call(groups.describe_groups, 300)
        assert (described.group_size, described.num_groups, described.over_allocation) == (4, 1, 1.0)
        served = process.call(serve, Workload(300, 20, 6), None)
        assert (served.finished, served.most_running) == (6, 4)
        assert served.kept_fraction is not None
        assert served.kept_fraction < 0.7
    assert not multiprocessing.active_children()
