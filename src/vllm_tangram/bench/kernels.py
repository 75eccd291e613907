# SPDX-License-Identifier: Apache-2.0
"""One batch in device memory, and our decode kernel on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_tangram.attention.decode import DecodeBatch, SplitScratch, decode_attention
from vllm_tangram.attention.partition import plan_work, resident_blocks, work_list
from vllm_tangram.bench.ragged import Workload
from vllm_tangram.bench.shapes import HeadShape
from vllm_tangram.pages.device import DevicePages


@dataclass(frozen=True)
class Case:
    """One batch in device memory.

    Attributes:
        work: lengths and pages.
        shape: the model's heads.
        memory: numbers that pools are cut from; random, so that attention has something to weigh.
        query: [L, R, Hq, D].
        key: [L, R, H, D], of the new token.
        value: [L, R, H, D], of the new token.

    """

    work: Workload
    shape: HeadShape
    memory: Tensor
    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def random(cls, work: Workload, shape: HeadShape, memory: Tensor) -> Case:
        """Draw queries, keys and values; all else is given."""

        def draw(heads: int) -> Tensor:
            size = (shape.layers, work.cell.requests, heads, shape.head_dim)
            return torch.randn(size, dtype=memory.dtype, device=memory.device)

        return cls(work, shape, memory, draw(shape.query_heads), draw(shape.kv_heads), draw(shape.kv_heads))

    @property
    def pool(self) -> Tensor:
        """[num_pages, G, B, 2 * D], all layers'."""
        plan = self.work.plan
        size = (self.work.num_pages, plan.groups.size, plan.block_size, 2 * self.shape.head_dim)
        return self.memory[: int(np.prod(size))].view(size)

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return float(self.shape.head_dim**-0.5)

    @property
    def kv_bytes(self) -> int:
        """Keys and values that all layers attend to."""
        return int(self.work.lengths.sum()) * 2 * self.shape.head_dim * self.memory.itemsize

    def put(self, values: NDArray[Any]) -> Tensor:
        """Values as int32 on the device."""
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(self.memory.device)


@dataclass(frozen=True)
class Kernels:
    """One engine's kernels, ready to run.

    Attributes:
        layers: one call per layer.
        output: [L, R, Hq, D], written by them.
        kv_bytes: that they read.
        notes: what to report beside the time.

    """

    layers: list[Callable[[], Any]]
    output: Tensor
    kv_bytes: int
    notes: dict[str, Any] = field(default_factory=dict)


class OurKernels:
    """Our kernel on a batch, whatever the split map."""

    def __init__(self, case: Case) -> None:
        """Give every request a slot and its pages."""
        work, plan, device = case.work, case.work.plan, case.memory.device
        most = len(work.schedule.kept) - 1
        pages = DevicePages(work.cell.requests, plan.num_groups, most, plan.block_size, 1, device)
        for slot, t in enumerate(work.tokens.tolist()):
            pages.open(slot, t - 1, work.schedule)
        self.case = case
        self._batch = DecodeBatch(
            requests=torch.arange(work.cell.requests, dtype=torch.int32, device=device),
            seq_lens=case.put(work.tokens),
            flat=case.put(work.flat),
            pages=pages,
        )

    def unsplit(self) -> Kernels:
        """One piece per head, longest first: the engine with its split map off."""
        shares, groups = self.case.work.shares, self.case.work.plan.groups
        layers = zip(np.ones(shares.shape, np.int32), shares, groups.group, groups.column, strict=True)
        return self._run([work_list(*layer, num_rows=1) for layer in layers])

    def even(self, resident: int) -> Kernels:
        """As many pieces for every head, however long, in the order of the heads."""
        return self._planned(np.ones_like(self.case.work.shares), resident)

    def mapped(self, resident: int) -> Kernels:
        """The split map, as the engine makes it."""
        return self._planned(self.case.work.shares, resident)

    def resident(self) -> int:
        """Thread blocks that the device runs at once."""
        return resident_blocks(self.unsplit().layers[0](), self.case.memory.device)

    def _planned(self, shares: NDArray[np.float64], resident: int) -> Kernels:
        groups = self.case.work.plan.groups
        return self._run(plan_work(shares, groups.group, groups.column, self.case.work.cell.requests, resident))

    def _run(self, lists: list[NDArray[np.int32]]) -> Kernels:
        case = self.case
        works = [case.put(work) for work in lists]
        scratch = SplitScratch(
            case.work.cell.requests * max(map(len, works)),
            case.shape.query_heads // case.shape.kv_heads,
            case.shape.head_dim,
            case.memory.device,
        )
        output = torch.empty_like(case.query)

        def layer(index: int) -> Callable[[], Any]:
            tensors = case.query[index], case.key[index], case.value[index], case.pool, output[index]
            return lambda: decode_attention(
                *tensors, batch=self._batch, work=works[index], scratch=scratch, scale=case.scale
            )

        pieces = [work[:, 2] for work in lists]
        notes = {"pieces": [min(int(layer.min()) for layer in pieces), max(int(layer.max()) for layer in pieces)]}
        return Kernels([layer(index) for index in range(case.shape.layers)], output, case.kv_bytes, notes)
