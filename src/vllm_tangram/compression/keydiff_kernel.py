# SPDX-License-Identifier: Apache-2.0
"""KeyDiff's scores of all chunks of a step in one launch; the formula is in `scorers.keydiff`.

A program has one chunk and KV head: it goes over the keys once for their mean direction, and once more for the cosines.
A step of few chunks has few such pairs. Then several programs share the second pass of one, and each makes the mean for
itself: another launch would cost the host more than that costs the device. So the scores of a chunk do not depend, bit
for bit, on what else is in the step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 128  # about as many as a large GPU has multiprocessors
_TILE = 32768  # numbers that a program holds at once, 256 keys of 128: its loads wait for memory together
_WARPS = 16  # 64 numbers a thread, in 99 registers of 128
_LEAST_NORM = tl.constexpr(1e-12)  # as `torch.nn.functional.normalize`: keys of zeros have direction 0


def keydiff_scores(key: Tensor, scores: Tensor, first: Tensor, num_tokens: Tensor) -> None:
    """Score chunks of a batch; arguments as of `Scorer.score_rows`. Queued on the current device; waits for nothing."""
    num_heads, head_dim = key.shape[1:]
    num_rows = len(first)
    padded = triton.next_power_of_2(head_dim)
    keydiff_kernel[(max(1, _PROGRAMS // (num_heads * num_rows)), num_heads, num_rows)](
        *(key, scores, first, num_tokens),
        *(first.stride(0), key.stride(0), key.stride(1), scores.stride(0)),
        D=head_dim,
        D_PADDED=padded,
        TOKENS=max(1, _TILE // padded),
        num_warps=_WARPS,
    )


@triton.jit
def _directions(keys, t, inside, token_stride, D: tl.constexpr, D_PADDED: tl.constexpr):
    """[TOKENS, D_PADDED] float32: keys divided by their norms; 0 where padded."""
    d = tl.arange(0, D_PADDED)
    mask = inside[:, None] & (d < D)[None, :]
    key = tl.load(keys + t.to(tl.int64)[:, None] * token_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
    return key * (1 / tl.maximum(tl.sqrt(tl.sum(key * key, 1)), _LEAST_NORM))[:, None]


@triton.jit(do_not_specialize=["first", "num_tokens", "row_stride", "scores_stride"])
def keydiff_kernel(
    key,
    scores,
    first,
    num_tokens,
    row_stride,
    token_stride,
    head_stride,
    scores_stride,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program per (part of the second pass, head, row)."""
    part, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * row_stride
    n, start = tl.load(num_tokens + row), tl.load(first + row).to(tl.int64)
    if part * TOKENS >= n:
        return
    keys = key + start * token_stride + head * head_stride
    i = tl.arange(0, TOKENS)
    total = tl.zeros([TOKENS, D_PADDED], tl.float32)  # added up over tokens at the end, which also errs less
    for tile in range(0, n, TOKENS):
        t = tile + i
        total += _directions(keys, t, t < n, token_stride, D, D_PADDED)
    mean = tl.sum(total, 0) / n
    anchor = mean / tl.maximum(tl.sqrt(tl.sum(mean * mean, 0)), _LEAST_NORM)

    scores += head * scores_stride + start
    for tile in range(part * TOKENS, n, tl.num_programs(0) * TOKENS):
        t = tile + i
        cosine = tl.sum(_directions(keys, t, t < n, token_stride, D, D_PADDED) * anchor[None, :], 1)
        tl.store(scores + t, -cosine, mask=t < n)
