# SPDX-License-Identifier: Apache-2.0
"""Decode attention alone, ours and others' on the same bytes: one CUDA graph of all layers each, replayed in turn.

Paper (Tangram, arXiv 2606.06302): figures 5 and 13, table 1. Our time includes writing the new token; the others find
it written. Plans and schedules that depend on lengths are made beforehand and timed apart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from vllm_tangram.bench import rivals
from vllm_tangram.bench.kernels import Case, Kernels, OurKernels
from vllm_tangram.bench.ragged import Cell, Workload, plan_for
from vllm_tangram.bench.shapes import HeadShape
from vllm_tangram.budget import RetentionProfile
from vllm_tangram.errors import TangramError

ENGINES = ("stock", "ours", "ours-even", "fa3-ragged", "flashinfer")
_DTYPE = torch.bfloat16
_WARM_UP = 3  # replays
_RESERVE = 6 * 2**30  # bytes left to workspaces and graphs
_DRAWN_AT_ONCE = 2**28  # numbers
_TOLERANCE = 0.02  # of the largest value: five times the spacing of bfloat16
_Way = tuple[str, int]  # an engine, and which of its ways to run


@dataclass(frozen=True)
class AttentionSetup:
    """What is measured.

    Attributes:
        shape: the model's heads.
        profile: what they keep; None: all the same.
        cells: batches.
        retentions: of each batch.
        engines: of `ENGINES`.
        block_size: tokens of a page of ours.
        group_size: members of a page, G.
        repeats: replays of each engine.

    """

    shape: HeadShape
    profile: RetentionProfile | None
    cells: Sequence[Cell]
    retentions: Sequence[float]
    engines: Sequence[str]
    block_size: int
    group_size: int
    repeats: int

    def workloads(self) -> list[Workload]:
        """One per cell and retention, in the order of the report.

        Raises:
            TangramError: an option does not fit the others.

        """
        heads = self.shape.layers, self.shape.kv_heads
        sizes = {"group_size": self.group_size, "block_size": self.block_size}
        plans = [plan_for(self.profile, heads, r, cells=self.cells, **sizes) for r in self.retentions]
        return [Workload(cell, plan) for cell in self.cells for plan in plans]


def measure_attention(setup: AttentionSetup, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Time all engines on all batches.

    Returns:
        Values that JSON can carry. ``cells`` has one entry per batch; see `summary` for its ``engines``. A batch that
        does not fit the device has ``skipped_bytes`` instead.

    Raises:
        TangramError: there is no CUDA device, it is too small, or an option does not fit the others.

    """
    works = setup.workloads()
    if not torch.cuda.is_available():
        raise TangramError("this benchmark times CUDA kernels, and torch sees no CUDA device here")
    needs = [_DTYPE.itemsize * numbers_of(work, setup.shape) for work in works]
    limit = torch.cuda.mem_get_info()[0] - _RESERVE
    if min(needs) > limit:
        raise TangramError(f"--cells: the smallest batch needs {min(needs):,} bytes, the device has {limit:,} free")
    progress("filling memory")
    memory = random_numbers(max(need for need in needs if need <= limit) // _DTYPE.itemsize)
    cells = []
    for work, need in zip(works, needs, strict=True):
        progress(f"{work.cell} tokens, retention {work.plan.config.retention:g}")
        found = _measure(setup, work, memory) if need <= limit else {"skipped_bytes": need}
        cells.append({**asdict(work.cell), "retention": work.plan.config.retention, **found})
        gc.collect()
        torch.cuda.empty_cache()  # what the graphs of one batch held must not crowd out the next
    return {
        "device": torch.cuda.get_device_name(),
        "shape": asdict(setup.shape),
        "profile": None if setup.profile is None else setup.profile.source,
        "dtype": str(_DTYPE).removeprefix("torch."),
        "block_size": setup.block_size,
        "stock_block_size": rivals.STOCK_BLOCK_SIZE,
        "group_size": setup.group_size,
        "repeats": setup.repeats,
        "cells": cells,
    }


def numbers_of(work: Workload, shape: HeadShape) -> int:
    """Numbers of the largest pool that any engine needs for a batch."""
    return max(work.pool_numbers * 2 * shape.head_dim, rivals.stock_numbers(work, shape))


def random_numbers(count: int) -> Tensor:
    """[count] normally distributed numbers on the device."""
    numbers = torch.empty(count, dtype=_DTYPE, device="cuda")
    for start in range(0, count, _DRAWN_AT_ONCE):
        numbers[start : start + _DRAWN_AT_ONCE].normal_()
    return numbers


def _measure(setup: AttentionSetup, work: Workload, memory: Tensor) -> dict[str, Any]:
    """One batch: all engines in turn, then ours compared with FlashAttention."""
    case = Case.random(work, setup.shape, memory)
    ours = OurKernels(case)
    resident = ours.resident()
    makers: dict[str, Callable[[], list[Kernels]]] = {
        "stock": lambda: rivals.stock(case),
        "ours": lambda: [ours.split(resident)],
        "ours-even": lambda: [ours.split(resident, even=True)],
        "fa3-ragged": lambda: rivals.flash_ragged(case),
        "flashinfer": lambda: rivals.flashinfer_ragged(case),
    }
    made: dict[str, list[Kernels]] = {}
    graphs: dict[_Way, torch.cuda.CUDAGraph] = {}
    unavailable = {}
    for name in setup.engines:
        try:
            ways = makers[name]()
            graphs |= {(name, index): _capture(kernels) for index, kernels in enumerate(ways)}
            made[name] = ways
        except Exception as error:  # a rival that is not there, or cannot run here, must not end the measurement
            if name.startswith("ours"):
                raise
            unavailable[name] = f"{type(error).__name__}: {error}"
    times = _replay_in_turn(graphs, setup.repeats)
    engines = {
        name: [(kernels, times[name, index]) for index, kernels in enumerate(ways)] for name, ways in made.items()
    }
    return {
        "held_fraction": float(work.lengths.sum() / (work.tokens.sum() * work.shares.size)),
        "resident_blocks": resident,
        "engines": summary(engines),
        "unavailable": unavailable,
        **_compare(made),
    }


def summary(engines: dict[str, list[tuple[Kernels, list[float]]]]) -> list[dict[str, Any]]:
    """Report entries: of an engine that can run in several ways, the fastest.

    Args:
        engines: by name, ways to run it and the times of its replays in ms.

    Returns:
        Per engine its name, ``milliseconds`` (median of a step of all layers), ``kv_bytes``, ``gb_per_second`` of them,
        ``ratio_to_stock`` of the times (None where stock was not measured) and the notes of its kernels.

    """
    best = {name: min(ways, key=lambda way: median(way[1])) for name, ways in engines.items()}
    stock = median(best["stock"][1]) if "stock" in best else None
    return [
        {
            "engine": name,
            "milliseconds": median(times),
            "kv_bytes": kernels.kv_bytes,
            "gb_per_second": kernels.kv_bytes / median(times) / 1e6,
            "ratio_to_stock": None if stock is None else median(times) / stock,
            **kernels.notes,
        }
        for name, (kernels, times) in best.items()
    ]


def _capture(kernels: Kernels) -> torch.cuda.CUDAGraph:
    for run in kernels.layers:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in kernels.layers:
            run()
    return graph


def _replay_in_turn(graphs: dict[_Way, torch.cuda.CUDAGraph], repeats: int) -> dict[_Way, list[float]]:
    """Milliseconds of every replay. The order alternates, so that what one leaves behind serves no other more often."""
    for graph in graphs.values():
        for _ in range(_WARM_UP):
            graph.replay()
    events: dict[_Way, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in graphs}
    for turn in range(repeats):
        for key in list(graphs)[:: -1 if turn % 2 else 1]:
            start, end = _event(), _event()
            start.record()
            graphs[key].replay()
            end.record()
            events[key].append((start, end))
    torch.cuda.synchronize()
    return {key: [start.elapsed_time(end) for start, end in pairs] for key, pairs in events.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _compare(made: dict[str, list[Kernels]]) -> dict[str, Any]:
    """One layer of ours beside FlashAttention on the same pages: largest difference over the largest value."""
    if not {"ours", "fa3-ragged"} <= made.keys():
        return {"max_relative_error": None, "agrees": None}
    ours, reference = made["ours"][0], made["fa3-ragged"][0]
    middle = len(ours.layers) // 2
    for kernels in (ours, reference):  # ours first: it writes the new token
        kernels.output[middle].fill_(float("nan"))
        kernels.layers[middle]()
    expected = reference.output[middle].float()
    error = float((ours.output[middle].float() - expected).abs().max() / expected.abs().max())
    return {"max_relative_error": error, "agrees": error <= _TOLERANCE}
