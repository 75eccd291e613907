# SPDX-License-Identifier: Apache-2.0
"""Key norm, Devoto et al., https://arxiv.org/abs/2406.11430: keys of small norm draw the most attention.

    score[h, t] = -|k[t, h]| / mean of |k[s, h]| over the chunk

The mean changes nothing within a head. It makes heads comparable where they compete for one budget: norms differ by
head for reasons that have nothing to do with importance, and with bare norms the heads of small keys take everything
(docs/quality.md).

No options. Cost: one pass over the keys, O(T * H * d).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_tangram.compression.base import ChunkContext, Scorer


class KNorm(Scorer):
    """Score by minus the L2 norm of the key, relative to the head's mean norm."""

    name: ClassVar[str] = "knorm"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.11430"
    packs: ClassVar[bool] = True

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        """See `Scorer.score`."""
        norms: Tensor = torch.linalg.vector_norm(key.float(), dim=-1)  # [T, H]
        tiny = torch.finfo(norms.dtype).tiny
        # Keys of zeros have no mean to be relative to: all equal.
        return -(norms / context.chunk_mean(norms).clamp_min(tiny)).T.contiguous()
