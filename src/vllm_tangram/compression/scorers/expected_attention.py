# SPDX-License-Identifier: Apache-2.0
"""Expected attention, https://arxiv.org/abs/2510.00636: what queries to come will attend to, by their statistics.

Per query head, over the chunk's queries before RoPE: mean m and covariance S (divided by their number). R is the mean
of the RoPE rotations of the 512 positions after the chunk. If queries to come are normal with mean R m and covariance
R S R', the mean of exp(scale * q . k) is the exponential of

    l[j] = scale * (R m) . k_j + scale^2 / 2 * k_j' (R S R') k_j
    p    = mean over the query heads of the KV head of softmax_j(l)
    score[h, j] = (p[h, j] + 0.01) * |v_j|

Queries before RoPE are those after it, turned back. Keys are turned by R' once instead of every S by R, which gives the
same. The prompt's first tokens (the sinks: outliers, always kept) are left out of all sums and score above all others.

Where heads of all layers compete for a profile, those with large values win. That is as it should be: with norms
relative to the head's mean, profiles are worse than uniform budgets (docs/quality.md). What statistics and the softmax
are taken over is the chunk, not what earlier chunks kept.

Defaults: 512 positions, 0.01. Cost: O(T * Hq * d^2) time, O(T * Hq * d) float32 memory, three times.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_tangram.compression.base import ChunkContext, Need, Scorer

_FUTURE_POSITIONS = 512
_EPSILON = 0.01


class ExpectedAttention(Scorer):
    """Score by the attention that normal queries would pay, times the norm of the value."""

    name: ClassVar[str] = "expected_attention"
    paper: ClassVar[str] = "https://arxiv.org/abs/2510.00636"
    needs: ClassVar[frozenset[Need]] = frozenset({"rope"})

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        """See `Scorer.score`."""
        rope = context.rope
        assert rope is not None
        num_tokens, num_heads, head_dim = key.shape
        first = min(context.leading_sinks, num_tokens)
        scores = torch.ones(num_heads, num_tokens, dtype=torch.float32, device=key.device)
        if first == num_tokens:
            return scores

        queries = rope.unrotate(query[first:], context.start + first).transpose(0, 1)  # [Hq, n, d]
        mean = queries.mean(dim=1, keepdim=True)  # [Hq, 1, d]
        queries = queries - mean
        covariance = queries.transpose(1, 2) @ queries / queries.shape[1]
        future = rope.ahead(context.start + num_tokens - 1, _FUTURE_POSITIONS)
        keys = rope.turn(key[first:], future.conj()).transpose(0, 1).unsqueeze(1)  # [H, 1, n, d]

        linear = (keys @ mean.view(num_heads, -1, head_dim, 1))[..., 0]  # [H, group, n]
        square = ((keys @ covariance.view(num_heads, -1, head_dim, head_dim)) * keys).sum(dim=-1)
        logits = linear.mul_(context.scale).add_(square, alpha=context.scale**2 / 2)
        attention = logits.softmax(dim=-1).mean(dim=1)  # [H, n]

        norms = torch.linalg.vector_norm(value[first:].float(), dim=-1).T  # [H, n]
        scores[:, first:] = (attention + _EPSILON) * norms
        scores[:, :first] = scores[:, first:].amax() + 1
        return scores
