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

from vllm_tangram.attention.decode import DecodeBatch, SplitScratch, Tuning, decode_attention
from vllm_tangram.attention.partition import PIECES, SplitPlan, resident_blocks
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
    """Our kernel on a batch, however it is split over thread blocks."""

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
        self._members = case.put(plan.groups.places)

    def resident(self) -> int:
        """Thread blocks that the device runs at once."""
        return resident_blocks(self.split(1).layers[0](), self.case.memory.device)

    def split(self, num_blocks: int, *, even: bool = False) -> Kernels:
        """As the engine runs it; or with every head cut into as many pieces, however long it is.

        The first layer also plans the step, as in the engine.
        """
        case, device = self.case, self.case.memory.device
        tuning = Tuning.default(case.shape.head_dim, case.memory.dtype)
        plan = SplitPlan(self._members, case.work.cell.requests, num_blocks, tuning.tile, even=even)
        plan.make(self._batch)
        ratio = case.shape.query_heads // case.shape.kv_heads
        scratch = SplitScratch(plan.num_blocks, ratio, case.shape.head_dim, device)
        output = torch.empty_like(case.query)

        def layer(index: int) -> Callable[[], Any]:
            tensors = case.query[index], case.key[index], case.value[index], case.pool, output[index]

            def run() -> Any:
                if index == 0:
                    plan.make(self._batch)
                return decode_attention(
                    *tensors, batch=self._batch, plan=plan, layer=index, scratch=scratch, scale=case.scale
                )

            return run

        pieces = plan.segments[:, :, PIECES]
        notes = {"pieces": [int(pieces.min()), int(pieces.max())]}
        return Kernels([layer(index) for index in range(case.shape.layers)], output, case.kv_bytes, notes)
