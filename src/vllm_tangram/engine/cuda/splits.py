# SPDX-License-Identifier: Apache-2.0
"""How a running engine splits decode attention over the device: one plan of all layers per step, made on the device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_tangram.attention.decode import DecodeBatch, SplitScratch, Tuning, decode_attention
from vllm_tangram.attention.partition import SplitPlan, resident_blocks

if TYPE_CHECKING:
    from vllm_tangram.engine.cuda.runner import TangramGPUModelRunner

#: "0" cuts all heads of a batch into equally many pieces, however long they are. For measurements.
SWITCH = "TANGRAM_SPLIT_MAP"


class DecodeSplits:
    """The plan of the current step and room for its partial results.

    Attributes:
        plan: shares of all layers.
        scratch: for as many thread blocks as the plan can have.

    """

    def __init__(self, runner: TangramGPUModelRunner, num_blocks: int | None = None) -> None:
        """Allocate for the largest batch.

        Args:
            runner: with its plan and pages.
            num_blocks: thread blocks of a layer; None for as many as the device runs of this model's kernel at once.

        """
        groups = runner.groups
        config, parallel = runner.model_config, runner.parallel_config
        head_dim, heads = config.get_head_size(), groups.group.shape[1]
        ratio = int(config.get_num_attention_heads(parallel) // config.get_num_kv_heads(parallel))
        tuning = Tuning.default(head_dim, runner.dtype)
        on_device = torch.from_numpy(groups.places).to(runner.device)

        def plan(max_rows: int, blocks: int, *, even: bool = False) -> SplitPlan:
            return SplitPlan(on_device, max_rows, blocks, tuning.tile, even=even)

        def rows(num_heads: int) -> Tensor:
            return torch.zeros(1, num_heads, head_dim, dtype=runner.dtype, device=runner.device)

        if num_blocks is None:
            nobody = torch.full((1,), -1, dtype=torch.int32, device=runner.device)
            batch = DecodeBatch(nobody, torch.zeros_like(nobody), nobody[None], runner.pages)
            nothing = plan(1, heads)
            nothing.make(batch)
            kernel = decode_attention(
                *(rows(heads * ratio), rows(heads), rows(heads)),
                rows(2 * groups.size * runner.plan.block_size).view(1, groups.size, -1, 2 * head_dim),
                rows(heads * ratio),
                batch=batch,
                plan=nothing,
                layer=0,
                scratch=SplitScratch(heads, ratio, head_dim, runner.device),
                scale=1.0,
            )
            num_blocks = resident_blocks(kernel, runner.device)
        even = os.environ.get(SWITCH) == "0"
        self.plan = plan(runner.max_num_reqs, num_blocks, even=even)
        self.scratch = SplitScratch(self.plan.shares.shape[1], ratio, head_dim, runner.device)
