# SPDX-License-Identifier: Apache-2.0
"""How far scores agree with KVzip's: do both keep the same tokens?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

FRACTION = 0.25


def overlap(scores: Tensor, wanted: Tensor, fraction: float = FRACTION) -> Tensor:
    """Share of the best tokens by one score that are also among the best by another.

    Args:
        scores: ``[..., T]``.
        wanted: ``[..., T]``.
        fraction: of the tokens that counts as the best; at least one token.

    Returns:
        ``[...]`` float32 in [0, 1]; scores that know nothing get about ``fraction``.

    """
    count = max(1, round(fraction * scores.shape[-1]))
    best, chosen = (
        torch.zeros_like(each, dtype=torch.bool).scatter_(-1, each.topk(count, dim=-1).indices, True)
        for each in (scores, wanted)
    )
    return (best & chosen).sum(-1).float() / count


def agreement(texts: Sequence[Mapping[str, Tensor]], wanted: str = "kvzip") -> dict[str, float]:
    """Agreement of several scorers on several texts.

    Args:
        texts: for each, scorer name -> ``[L, H, T]`` scores.
        wanted: the name of the scores to agree with.

    Returns:
        By scorer the overlap of the best quarter of each head, averaged over heads and texts; and as "NAME, all heads"
        that of the best quarter of all heads together, which is what a retention profile lets compete.

    """
    result = {}
    for name in (name for name in texts[0] if name != wanted):
        result[name] = fmean(float(overlap(text[name], text[wanted]).mean()) for text in texts)
        together = (overlap(text[name].flatten(), text[wanted].flatten()) for text in texts)
        result[f"{name}, all heads"] = fmean(map(float, together))
    return result
