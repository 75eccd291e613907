# SPDX-License-Identifier: Apache-2.0
"""TOVA, https://arxiv.org/abs/2401.06104: what the last query attends to stays.

    a[i, j] = softmax_j(scale * q_i . k_j)   the chunk's last query, each query head i over the keys of its KV head
    score   = mean of a[i, j] over ALL query heads, the same for every KV head; 1 for the last token

So the heads of a layer are treated alike, and a profile tells only layers apart. The paper evicts one token whenever
one is added; here a chunk is scored once, by its own last query over its own keys. The last token, which the paper may
evict, is protected (the window is never empty).

No options. Cost: one query's attention, O(T * Hq * d).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from vllm_tangram.compression.base import ChunkContext, Scorer


class Tova(Scorer):
    """Score by the last query's attention, averaged over all heads of the layer."""

    name: ClassVar[str] = "tova"
    paper: ClassVar[str] = "https://arxiv.org/abs/2401.06104"

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        """See `Scorer.score`."""
        num_tokens, num_heads, head_dim = key.shape
        last = query[-1].float().view(num_heads, -1, head_dim)  # [H, group, d]
        attention = (last @ key.float().permute(1, 2, 0) * context.scale).softmax(dim=-1)  # [H, group, T]
        scores = context.mean_over_ranks(attention.mean(dim=(0, 1)))
        scores[-1] = 1  # the most that a mean attention weight can be
        return scores.expand(num_heads, num_tokens).contiguous()
