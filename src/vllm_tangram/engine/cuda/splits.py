# SPDX-License-Identifier: Apache-2.0
"""The split map of a running engine: made once per batch size of the CUDA graphs, read by every decode step."""

from __future__ import annotations

import os
from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_tangram.attention.decode import DecodeBatch, SplitScratch, decode_attention
from vllm_tangram.attention.partition import plan_work, resident_blocks, work_list

if TYPE_CHECKING:
    from vllm_tangram.engine.cuda.runner import TangramGPUModelRunner

#: "0" cuts nothing: one thread block per request and KV head. For measurements.
SWITCH = "TANGRAM_SPLIT_MAP"


class DecodeSplits:
    """Work lists of all layers by batch size, on the device.

    What the map is made from is known when the engine starts: the budgets at the server's retention and the thread
    blocks that the device runs at once. A batch is cut as the next larger batch size of the CUDA graphs is.
    """

    def __init__(self, runner: TangramGPUModelRunner) -> None:
        self.runner = runner
        largest = runner.max_num_reqs
        sizes = runner.compilation_config.cudagraph_capture_sizes or [2**i for i in range(largest.bit_length())]
        self._buckets = sorted({size for size in sizes if size < largest} | {largest})
        self._work: dict[int, list[Tensor]] = {}
        self._enabled = os.environ.get(SWITCH) != "0"

    def of(self, num_rows: int) -> tuple[list[Tensor], SplitScratch]:
        """Work lists of the layers for a batch of ``num_rows``, and room for its partial results."""
        bucket = self._buckets[min(bisect_left(self._buckets, num_rows), len(self._buckets) - 1)]
        if bucket not in self._work:
            lists = self._lists(bucket)
            together = torch.from_numpy(np.concatenate(lists)).to(self.runner.device)
            self._work[bucket] = list(together.split([len(layer) for layer in lists]))
        return self._work[bucket], self.scratch

    @cached_property
    def scratch(self) -> SplitScratch:
        """Room for the largest batch of any size."""
        runner = self.runner
        slots = max(size * max(map(len, self._lists(size))) for size in self._buckets)
        return SplitScratch(slots, self._ratio, runner.model_config.get_head_size(), runner.device)

    @property
    def _ratio(self) -> int:
        config, parallel = self.runner.model_config, self.runner.parallel_config
        return int(config.get_num_attention_heads(parallel) // config.get_num_kv_heads(parallel))

    @cached_property
    def shares(self) -> np.ndarray:
        """``[L, H]`` of this rank, fraction of the longest prompt that each member holds at the server's retention."""
        plan = self.runner.plan
        kept = plan.schedule(plan.config.retention).kept[-1]
        return np.maximum(kept, 1)[self.runner.groups.group] / max(int(kept.max()), 1)

    @cached_property
    def resident(self) -> int:
        """Thread blocks of the decode kernel that the device runs at once, asked of the driver for this very model."""
        runner = self.runner
        plan, device, dtype = runner.plan, runner.device, runner.dtype
        groups, head_dim = runner.groups, runner.model_config.get_head_size()
        heads = groups.group.shape[1]

        def rows(num_heads: int) -> Tensor:
            return torch.zeros(1, num_heads, head_dim, dtype=dtype, device=device)

        first = np.ones(heads, np.int32), np.ones(heads), groups.group[0], groups.column[0]
        nobody = torch.full((1,), -1, dtype=torch.int32, device=device)
        kernel = decode_attention(
            rows(heads * self._ratio),
            rows(heads),
            rows(heads),
            torch.zeros(1, groups.size, plan.block_size, 2 * head_dim, dtype=dtype, device=device),
            rows(heads * self._ratio),
            batch=DecodeBatch(nobody, torch.zeros_like(nobody), nobody[None], runner.pages),
            work=torch.from_numpy(work_list(*first, num_rows=1)).to(device),
            scratch=SplitScratch(heads, self._ratio, head_dim, device),
            scale=1.0,
        )
        return resident_blocks(kernel, device)

    def _lists(self, num_rows: int) -> list[np.ndarray]:
        groups = self.runner.groups
        if self._enabled:
            return plan_work(self.shares, groups.group, groups.column, num_rows, self.resident)
        ones = np.ones(self.shares.shape, np.int32)
        layers = zip(ones, self.shares, groups.group, groups.column, strict=True)
        return [work_list(*layer, num_rows=1) for layer in layers]
