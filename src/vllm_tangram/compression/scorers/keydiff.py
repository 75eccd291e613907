# SPDX-License-Identifier: Apache-2.0
"""KeyDiff, https://arxiv.org/abs/2504.15364: keys that differ from the average key matter.

    u[t, h] = k[t, h] / |k[t, h]|          m[h] = mean of u[t, h] over the chunk
    score[h, t] = -cos(k[t, h], m[h])

Keys are taken after RoPE. No options. Cost: two passes over the keys, O(T * H * d); on a GPU one launch for all chunks
of a step (`keydiff_kernel`).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from vllm_tangram.compression.base import ChunkContext, Scorer


class KeyDiff(Scorer):
    """Score by minus the cosine between the key and the mean direction of the chunk's keys."""

    name: ClassVar[str] = "keydiff"
    paper: ClassVar[str] = "https://arxiv.org/abs/2504.15364"
    packs: ClassVar[bool] = True

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        """See `Scorer.score`."""
        direction = normalize(key.float(), dim=-1)  # [T, H, d]
        anchor = normalize(context.chunk_mean(direction), dim=-1)
        return -(direction * anchor).sum(dim=-1).T.contiguous()

    def score_rows(self, key: Tensor, scores: Tensor, first: Tensor, num_tokens: Tensor) -> bool:
        """See `Scorer.score_rows`; on CUDA alone."""
        if not key.is_cuda:
            return False
        from vllm_tangram.compression.keydiff_kernel import keydiff_scores  # Triton comes with CUDA builds of torch

        keydiff_scores(key, scores, first, num_tokens)
        return True
