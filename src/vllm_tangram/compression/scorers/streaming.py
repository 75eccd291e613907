# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM, https://arxiv.org/abs/2309.17453: the newest tokens win.

    score[h, t] = position of t in the prompt

The attention sinks of the paper are the first tokens that every scorer's selection protects (4 by default). All
heads agree, so this scorer is a baseline: budgets profiled with it are uniform. Cost: none.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_tangram.compression.base import ChunkContext, Scorer


class Streaming(Scorer):
    """Score by position."""

    name: ClassVar[str] = "streaming"
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        """See `Scorer.score`; exact for prompts of up to 2**24 tokens."""
        num_tokens, num_heads, _ = key.shape
        positions = torch.arange(context.start, context.start + num_tokens, dtype=torch.float32, device=key.device)
        return positions.repeat(num_heads, 1)
