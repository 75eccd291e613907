# SPDX-License-Identifier: Apache-2.0
"""The kernel behind `SplitGate`, which documents its tensors: everything of a gate but the projection."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(
    rows,
    bias,
    inside,
    i,
    part_stride,
    unscale,
    PARTS: tl.constexpr,
    INNER: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """[TOKENS, INNER] sum of a projection's parts with its bias, divided by its root mean square; 0 where padded."""
    x = tl.load(rows, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(rows + part * part_stride, mask=inside, other=0.0)
    x = x * unscale + tl.load(bias + i, mask=i < INNER, other=0.0)[None, :]
    return x * tl.rsqrt(tl.sum(x * x, 1) / INNER + EPSILON)[:, None]


@triton.jit(do_not_specialize=["num_tokens", "scores_stride"])
def gate_kernel(
    projections,
    scores,
    bias,
    factor,
    sinks,
    own_bias,
    num_tokens,
    unscale,
    token_stride,
    part_stride,
    scores_stride,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    INNER: tl.constexpr,
    INNER_PADDED: tl.constexpr,
    SINKS: tl.constexpr,
    SINKS_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """One program: some tokens of one KV head."""
    head = tl.program_id(1)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    i = tl.arange(0, INNER_PADDED)
    s = tl.arange(0, SINKS_PADDED)
    inside = (t < num_tokens)[:, None] & (i < INNER)[None, :]
    first = head * (GROUP + 1) * INNER
    rows = projections + t.to(tl.int64)[:, None] * token_stride + first + i[None, :]
    bias += first
    wanted = (i < INNER)[:, None] & (s < SINKS)[None, :]
    sink = tl.load(sinks + (head * SINKS + s[None, :]) * INNER + i[:, None], mask=wanted, other=0.0)

    key = _normed(rows + GROUP * INNER, bias + GROUP * INNER, inside, i, part_stride, unscale, PARTS, INNER, EPSILON)
    key *= tl.load(factor + i, mask=i < INNER, other=0.0)[None, :]
    total = tl.zeros([TOKENS], tl.float32)
    for member in range(GROUP):
        at = member * INNER
        query = _normed(rows + at, bias + at, inside, i, part_stride, unscale, PARTS, INNER, EPSILON)
        own = tl.sum(query * key, 1) + tl.load(own_bias + head * GROUP + member)
        logits = tl.dot(query, sink, input_precision="ieee")
        # An exponential that is too large for float32 makes the score 0, which it is then.
        others = tl.where((s < SINKS)[None, :], tl.exp(logits - own[:, None]), 0.0)
        total += 1 / (1 + tl.sum(others, 1))
    tl.store(scores + head.to(tl.int64) * scores_stride + t, total / GROUP, mask=t < num_tokens)
