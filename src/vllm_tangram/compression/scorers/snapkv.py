# SPDX-License-Identifier: Apache-2.0
"""SnapKV, https://arxiv.org/abs/2404.14469: what the last queries attend to will be attended to again.

    w = min(window, T)                     the observation queries: the last w of the chunk
    a[q, j] = softmax_j(scale * q . k_j)   causal, over the chunk's keys
    s[h, j] = mean of a over the w queries of every query head of KV head h, for j < T - w
    score   = s averaged over 5 neighbouring positions; 1 for the last w tokens

The softmax runs over the chunk's own keys, not over what earlier chunks kept: within a chunk that is a constant
factor per query, and it keeps the score a function of the chunk (see `Scorer`). The pooling averages over the
neighbours that exist; the published code also counts zeros beyond the ends, which would push down both ends of
every chunk where the paper, with one chunk per prompt, only touches protected sinks and the window's edge. The last
w tokens are protected; 1 is the most that a mean attention weight can be, so they win even if they are not.

Defaults: window 16 (the engine's ``window``), pooling kernel 5. Cost: O(w * T * Hq * d) time, O(w * T * Hq) memory.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from vllm_tangram.compression.base import ChunkContext, Scorer

_POOLING_KERNEL = 5


class SnapKV(Scorer):
    """Score by the pooled mean attention of the chunk's last queries."""

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        """See `Scorer.score`."""
        num_tokens, num_heads, head_dim = key.shape
        window = min(context.window, num_tokens)
        past = num_tokens - window
        scores = torch.ones(num_heads, num_tokens, dtype=torch.float32, device=key.device)
        if past == 0:
            return scores
        observers = query[past:].float().view(window, num_heads, -1, head_dim).permute(1, 2, 0, 3)  # [H, group, w, d]
        logits = observers.flatten(1, 2) @ key.float().permute(1, 2, 0)  # [H, group * w, T]
        logits = logits.mul_(context.scale).view(num_heads, -1, window, num_tokens)
        future = torch.ones(window, window, dtype=torch.bool, device=key.device).triu_(1)
        logits[..., past:].masked_fill_(future, float("-inf"))
        attention = logits.softmax(dim=-1)[..., :past].mean(dim=(1, 2))  # [H, past]
        scores[:, :past] = avg_pool1d(
            attention, _POOLING_KERNEL, stride=1, padding=_POOLING_KERNEL // 2, count_include_pad=False
        )
        return scores
