# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from vllm_tangram.attention.reference import ragged_attention
from vllm_tangram.bench import attention as bench
from vllm_tangram.bench import rivals
from vllm_tangram.bench.attention import ENGINES, AttentionSetup, measure_attention, numbers_of, summary
from vllm_tangram.bench.kernels import Case, Kernels, OurKernels
from vllm_tangram.bench.ragged import CELLS, Cell, Workload
from vllm_tangram.bench.shapes import HeadShape
from vllm_tangram.budget import RetentionProfile
from vllm_tangram.cli.app import app
from vllm_tangram.errors import TangramError

SHAPE = HeadShape(layers=3, kv_heads=3, query_heads=6, head_dim=64)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs in Triton's interpreter")


def _profile() -> RetentionProfile:
    kept = np.random.default_rng().random((2, 1, SHAPE.layers, SHAPE.kv_heads)) ** 4
    return RetentionProfile(np.array([0.3]), kept, "keydiff", {}, sinks=4, window=64, chunk_size=2048)


def _setup(**changed: Any) -> AttentionSetup:
    given = {
        "shape": SHAPE,
        "profile": _profile(),
        "cells": [Cell(3, 500)],
        "retentions": [0.4],
        "engines": ENGINES,
        "block_size": 16,
        "group_size": 2,
        "repeats": 2,
    }
    return AttentionSetup(**{**given, **changed})


@pytest.fixture
def case() -> Case:
    (work,) = _setup().workloads()
    return Case.random(work, SHAPE, torch.randn(numbers_of(work, SHAPE)))


def _expected(case: Case, layer: int) -> torch.Tensor:
    """[R, Hq, D] float64, from the block table that the other kernels are given, with the new token after the rest."""
    blocks = case.work.member_blocks(layer).astype(np.int64)
    heads = case.pool.flatten(0, 1)
    rows = []
    for row, lengths in enumerate(case.work.lengths[:, layer]):
        keys, values = [], []
        for head, length in enumerate(lengths.tolist()):
            tokens = heads[blocks[row * SHAPE.kv_heads + head]].flatten(0, 1)[: length - 1]
            keys.append(torch.cat([tokens[:, : SHAPE.head_dim], case.key[layer, row, head, None]]))
            values.append(torch.cat([tokens[:, SHAPE.head_dim :], case.value[layer, row, head, None]]))
        rows.append(ragged_attention(case.query[layer, row, None], keys, values, case.scale)[0])
    return torch.stack(rows)


def test_cells() -> None:
    assert Cell.parse(" 4 X 32768 ") == Cell(4, 32768)
    for text in ("4", "4x", "0x32768", "4x255", "4x-300", "4x3e4"):
        with pytest.raises(TangramError, match=r"--cells: .* is not requests x tokens"):
            Cell.parse(text)
    for cell in CELLS:
        tokens = cell.request_tokens()
        assert len(tokens) == cell.requests
        assert abs(tokens.mean() - cell.tokens) <= 1
        assert (cell.requests == 1) == (tokens.min() == tokens.max())
        assert tokens.max() < 1.41 / 0.59 * tokens.min()


@pytest.mark.parametrize(("block_size", "group_size"), [(16, 2), (32, 4), (64, 9)])
def test_no_token_has_two_holders(block_size: int, group_size: int) -> None:
    works = _setup(retentions=[1.0, 0.3], block_size=block_size, group_size=group_size).workloads()
    assert [work.plan.config.retention for work in works] == [1.0, 0.3]
    for work in works:
        held = []
        for layer in range(SHAPE.layers):
            counts = -(-work.lengths[:, layer].ravel() // block_size)
            held += [row[:count] for row, count in zip(work.member_blocks(layer), counts, strict=True)]
        blocks = np.concatenate(held)
        assert len(np.unique(blocks)) == len(blocks)
        assert blocks.min() >= group_size  # page 0 is vLLM's null page
        assert blocks.max() < work.num_pages * group_size
        assert (work.lengths <= work.tokens[:, None, None]).all()
        assert (work.uniform_lengths * SHAPE.layers * SHAPE.kv_heads >= work.lengths.sum(axis=(1, 2))).all()
    full, less = works
    assert (full.lengths == full.tokens[:, None, None]).all()
    assert less.lengths.sum() < 0.6 * full.lengths.sum()
    shares = less.shares.ravel()[np.lexsort((less.shares.ravel(), less.lengths[0].ravel()))]
    assert (np.diff(shares) >= 0).all()  # the map's shares rank heads as their lengths do


def test_without_profile_all_heads_are_alike() -> None:
    (work,) = _setup(profile=None).workloads()
    assert (work.lengths == work.lengths[:, :1, :1]).all()
    with pytest.raises(TangramError, match="--page-group-size must be from 1 to 9"):
        _setup(group_size=10).workloads()
    with pytest.raises(TangramError, match="--block-size"):
        _setup(block_size=48).workloads()


@NO_GPU
def test_our_kernel_reads_what_the_others_are_given(case: Case) -> None:
    ours = OurKernels(case)
    expected = [_expected(case, layer) for layer in range(SHAPE.layers)]
    made = {"balanced": ours.split(50), "even": ours.split(50, even=True), "few": ours.split(1)}
    for name, kernels in made.items():
        kernels.output.fill_(float("nan"))
        for layer, run in enumerate(kernels.layers):
            run()
            torch.testing.assert_close(kernels.output[layer].double(), expected[layer], rtol=0, atol=2e-5, msg=name)
    pieces = {name: kernels.notes["pieces"] for name, kernels in made.items()}
    assert pieces["few"] == [1, 1]
    assert 1 < pieces["even"][1] <= 50 // (len(case.work.tokens) * SHAPE.kv_heads)
    assert pieces["balanced"][1] > 1


def _paged(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: list[list[int]], lengths: list[int]
) -> torch.Tensor:
    """What a paged kernel computes: [S, Hq, D] from [blocks, block size, H, D], in float64."""
    rows = []
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        own = [cache[table].flatten(0, 1)[:length].transpose(0, 1) for cache in (keys, values)]
        rows.append(ragged_attention(query[row, None], *map(list, own), SHAPE.head_dim**-0.5)[0])
    return torch.stack(rows)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention and FlashInfer in plain torch, with the arguments that theirs take."""

    def flash_decode(
        query: torch.Tensor, cache: torch.Tensor, output: torch.Tensor, **given: Any
    ) -> Callable[[], None]:
        assert given["starts"].tolist() == list(range(len(query) + 1))
        assert given["longest"] == given["lengths"].max()
        assert given["scale"] == SHAPE.head_dim**-0.5
        halves = cache.split(SHAPE.head_dim, dim=-1)
        tables, lengths = given["block_table"].tolist(), given["lengths"].tolist()
        return lambda: output.copy_(_paged(query, *halves, tables, lengths))

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool) -> None:
            assert layout == "NHD"

        def plan(self, *given: Any, sm_scale: float, **dtypes: torch.dtype) -> None:
            starts, blocks, last, query_heads, kv_heads, head_dim, block_size = given
            assert (query_heads, kv_heads, head_dim) == (2, 1, SHAPE.head_dim)
            ends = starts.tolist()
            self.tables = [blocks[a:b].tolist() for a, b in pairwise(ends)]
            sizes = zip(self.tables, last.tolist(), strict=True)
            self.lengths = [(len(table) - 1) * block_size + rest for table, rest in sizes]

        def run(self, query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
            out.copy_(_paged(query, *caches, self.tables, self.lengths))

    fakes = {"vllm_tangram.engine.stock_attention": "flash_decode", "flashinfer": "BatchDecodeWithPagedKVCacheWrapper"}
    for module, name in fakes.items():
        fake = ModuleType(module)
        setattr(fake, name, flash_decode if name == "flash_decode" else Wrapper)
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@NO_GPU
@pytest.mark.usefixtures("stand_ins")
def test_rivals_attend_to_the_same_tokens(case: Case) -> None:
    ours = OurKernels(case).split(13)
    for run in ours.layers:
        run()  # writes the new tokens
    for maker in (rivals.flash_ragged, rivals.flashinfer_ragged):
        for kernels in maker(case):
            kernels.output.fill_(float("nan"))
            for run in kernels.layers:
                run()
            torch.testing.assert_close(kernels.output, ours.output, rtol=0, atol=2e-5)
            assert kernels.kv_bytes == ours.kv_bytes == case.work.lengths.sum() * 2 * 64 * 4
    assert rivals.flashinfer_ragged(case)[0].notes["plan_milliseconds"] > 0


@pytest.mark.usefixtures("stand_ins")
def test_stock_reads_as_much_memory(case: Case) -> None:
    ways = rivals.stock(case)
    assert [kernels.notes["scheduled"] for kernels in ways] == ["ahead", "in each call"]
    members = SHAPE.layers * SHAPE.kv_heads
    for kernels in ways:
        assert 0 <= kernels.kv_bytes - case.kv_bytes < len(case.work.tokens) * members * 2 * 64 * 4
        for layer, run in enumerate(kernels.layers):
            kernels.output[layer].fill_(float("nan"))
            run()
            assert kernels.output[layer].isfinite().all()
    # Different pages of different layers: no two layers may give the same to the same query.
    case.query[1] = case.query[0]
    for run in ways[0].layers[:2]:
        run()
    assert not torch.allclose(ways[0].output[0], ways[0].output[1], atol=1e-3)


def test_the_fastest_way_is_reported() -> None:
    def kernels(kv_bytes: int, **notes: Any) -> Kernels:
        return Kernels([], torch.empty(0), kv_bytes, notes)

    stock = [
        (kernels(10**9, scheduled="ahead"), [4.0, 2.0, 3.0]),
        (kernels(10**9, scheduled="in each call"), [2.5] * 3),
    ]
    rows = summary({"ours": [(kernels(10**9, pieces=[1, 7]), [2.0, 9.0, 2.0])], "stock": stock})
    assert [row["engine"] for row in rows] == ["ours", "stock"]
    assert rows[0] == {
        "engine": "ours",
        "milliseconds": 2.0,
        "kv_bytes": 10**9,
        "gb_per_second": 500.0,
        "ratio_to_stock": 0.8,
        "pieces": [1, 7],
    }
    assert (rows[1]["milliseconds"], rows[1]["scheduled"], rows[1]["ratio_to_stock"]) == (2.5, "in each call", 1.0)
    assert summary({"ours": [(kernels(1), [1.0])]})[0]["ratio_to_stock"] is None


def _report(**changed: Any) -> dict[str, Any]:
    engines = [
        {"engine": "stock", "milliseconds": 2.0, "kv_bytes": 8, "gb_per_second": 3000.0, "ratio_to_stock": 1.0},
        {"engine": "ours", "milliseconds": 1.6, "kv_bytes": 8, "gb_per_second": 3750.0, "ratio_to_stock": 0.8}
        | {"pieces": [1, 9]},
        {"engine": "flashinfer", "milliseconds": 1.8, "kv_bytes": 8, "gb_per_second": 3333.0, "ratio_to_stock": 0.9}
        | {"plan_milliseconds": 12.34},
    ]
    cell = {"requests": 4, "tokens": 32768, "retention": 0.25}
    measured = {"held_fraction": 0.251, "resident_blocks": 528, "engines": engines, "unavailable": {"fa3-ragged": "?"}}
    checked = {"max_relative_error": 0.0031, "agrees": True, **changed}
    cells = [{**cell, **measured, **checked}, {**cell, "retention": 1.0, "skipped_bytes": 2**40}]
    return {"device": "A GPU", "shape": vars(SHAPE), "cells": cells}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[AttentionSetup]:
    """Setups that the command asked to measure; it is given a report without measuring."""
    setups: list[AttentionSetup] = []

    def measure(setup: AttentionSetup, progress: Callable[[str], None]) -> dict[str, Any]:
        setups.append(setup)
        return _report()

    monkeypatch.setattr(bench, "measure_attention", measure)
    return setups


def test_command_for_people(measured: list[AttentionSetup], tmp_path: Path) -> None:
    output, plot = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--engine", "ours", "--engine", "stock", "--cells", "2x300", "--retention", "0.5", "--block-size", "32"]
    files = ["--output", str(output), "--plot", str(plot)]
    result = CliRunner().invoke(app, ["bench", "attention", *options, *files])
    assert result.exit_code == 0, result.output
    (setup,) = measured
    assert (list(setup.cells), setup.retentions, setup.engines) == ([Cell(2, 300)], [0.5], ["stock", "ours"])
    assert (setup.block_size, setup.profile, setup.shape.layers) == (32, None, 36)
    for text in (
        " 3750 ",
        " 0.80 ",
        "12.3 ms",
        "1 to 9",
        "0.0031",
        "25.1 %",
        "no fa3-ragged: ?",
        "skipped, needs 1.0 TiB",
    ):
        assert text in result.stdout
    assert json.loads(output.read_text()) == _report()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_command_with_json(measured: list[AttentionSetup]) -> None:
    result = CliRunner().invoke(app, ["bench", "attention", "--json"])
    assert json.loads(result.stdout) == _report()
    assert (list(measured[0].cells), measured[0].engines) == (list(CELLS), list(ENGINES))


def test_a_wrong_kernel_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    report = _report(max_relative_error=float("nan"), agrees=False)
    monkeypatch.setattr(bench, "measure_attention", lambda setup, progress: report)
    result = CliRunner().invoke(app, ["bench", "attention"])
    assert "4 x 32768, 0.25: ours and FlashAttention differ" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--retention", "1.5"], "--retention: must be in (0, 1]"),
        (["--engine", "fa4"], "--engine: unknown fa4; known: stock, ours"),
        (["--cells", "4"], "--cells: '4' is not requests x tokens"),
        (["--model", "gpt-2"], "unknown model shape 'gpt-2'"),
        (["--profile", "/nowhere/p.safetensors"], "there is no file /nowhere/p.safetensors"),
        (["--profile", "/nowhere/p.npz"], "published profile /nowhere/p.npz cannot be read"),
        (["--output", "/nowhere/out.json"], "--output /nowhere/out.json cannot be written"),
        (["--plot", "/nowhere/out.png"], "--plot /nowhere/out.png cannot be written"),
    ],
)
def test_refusals(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "attention", *options])
    assert result.exit_code == 2
    assert message in result.stderr


@NO_GPU
def test_without_cuda_it_says_so() -> None:
    with pytest.raises(TangramError, match="torch sees no CUDA device"):
        measure_attention(_setup())


class _Device:
    """A device whose clock is moved by replays alone: by as much as the graph has cost so far, plus one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
        device = self
        self.now = 0.0

        class Graph:
            def __init__(self) -> None:
                self.cost = 0.0

            def replay(self) -> None:
                self.cost += 1.0
                device.now += self.cost

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        fakes = {
            "is_available": lambda: True,
            "mem_get_info": lambda: (free_bytes, 2 * free_bytes),
            "get_device_name": lambda: "A GPU",
            "empty_cache": lambda: None,
            "CUDAGraph": Graph,
            "graph": nullcontext,
            "Event": Event,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(bench, "_DTYPE", torch.float32)
        monkeypatch.setattr(bench, "random_numbers", torch.randn)
        monkeypatch.setattr(OurKernels, "resident", lambda _: 13)


@NO_GPU
@pytest.mark.usefixtures("stand_ins")
def test_a_whole_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Cell(1, 256), Cell(2, 600)
    engines = ["stock", "ours", "fa3-ragged", "flashinfer"]
    setup = _setup(cells=[small, large], retentions=[1.0], engines=engines, repeats=4)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # not installed
    needs = [4 * numbers_of(work, SHAPE) for work in setup.workloads()]
    _Device(monkeypatch, bench._RESERVE + needs[1] - 1)
    seen: list[str] = []
    report = measure_attention(setup, seen.append)
    json.dumps(report, allow_nan=False)
    assert seen[-1] == "2 x 600 tokens, retention 1"
    first, second = report["cells"]
    assert second == {"requests": 2, "tokens": 600, "retention": 1.0, "skipped_bytes": needs[1]}
    # Three replays to warm up, four timed: the median of 4, 5, 6, 7.
    assert {row["engine"]: row["milliseconds"] for row in first["engines"]} == dict.fromkeys(engines[:3], 5.5)
    assert list(first["unavailable"]) == ["flashinfer"]
    assert first["agrees"] is True
    assert 0 <= first["max_relative_error"] < 1e-5
    assert (first["held_fraction"], first["resident_blocks"]) == (1.0, 13)
    _Device(monkeypatch, bench._RESERVE + needs[0] - 1)
    with pytest.raises(TangramError, match="--cells: the smallest batch needs"):
        measure_attention(setup)


@NO_GPU
@pytest.mark.usefixtures("stand_ins")
def test_a_kernel_that_is_wrong_does_not_agree(case: Case) -> None:
    made = {"ours": [OurKernels(case).split(13)], "fa3-ragged": rivals.flash_ragged(case)}
    middle = SHAPE.layers // 2
    made["ours"][0].layers[middle] = lambda: None  # leaves the poison
    assert bench._compare(made)["agrees"] is False


def test_workloads_are_the_same_in_every_run() -> None:
    setup = _setup()
    first, second = (Workload(Cell(3, 500), setup.workloads()[0].plan) for _ in range(2))
    assert (first.flat == second.flat).all()
