# SPDX-License-Identifier: Apache-2.0
"""The kernels behind `vllm_tangram.attention.prefill`, which documents the arguments.

Sizes that differ from step to step are not specialised on, so each kernel is compiled once; `select_kernel` once for
each class of chunk sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_tangram.pages.device import ROW_HEADER, page_ids

_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
_INFINITY = tl.constexpr(0x7F800000)  # bits of float32 +inf; those of NaN without their sign are larger
_HEADER = tl.constexpr(ROW_HEADER)


@triton.jit
def _sortable(scores, i, num_tokens, protect_head, protect_tail):
    """Scores as int32 of the same order: NaN lowest, protected tokens highest; lowest too where ``i`` is outside."""
    bits = tl.load(scores + i, mask=i < num_tokens, other=0.0).to(tl.int32, bitcast=True)
    # -0.0 is the lowest integer. Integer arithmetic alone, so that denormal numbers are not flushed to 0.
    bits = tl.where(bits == _LOWEST, 0, bits)
    # Two's complement and IEEE 754 disagree on the order of negative numbers: flip all bits but the sign.
    order = tl.where(bits < 0, bits ^ _HIGHEST, bits)
    order = tl.where((bits & _HIGHEST) > _INFINITY, _LOWEST, order)
    order = tl.where((i < protect_head) | (i >= num_tokens - protect_tail), _HIGHEST, order)
    return tl.where(i < num_tokens, order, _LOWEST)


@triton.jit
def _chosen(keys, threshold, skipped, greater_seen, equal_seen):
    """Which tokens of a tile are kept, their ranks, and the tokens above and at the threshold so far.

    Both counts come from one scan over integers that hold one in each half, so a tile may have 2**15 - 1 tokens. What
    lies outside the chunk comes after all its tokens, so it does not matter how it is counted.
    """
    greater, equal = keys > threshold, keys == threshold
    scan = tl.cumsum(greater.to(tl.int32) * 65536 + equal.to(tl.int32), axis=0)
    above, ties = greater_seen + (scan >> 16), equal_seen + (scan & 65535)
    rank = above + tl.maximum(ties - skipped, 0) - 1
    return greater | (equal & (ties > skipped)), rank


@triton.jit(do_not_specialize=["row_stride", "group_stride", "scores_stride", "dest_stride"])
def select_kernel(
    scores,
    dest,
    first,
    num_tokens,
    requests,
    before,
    keep,
    protect_head,
    protect_tail,
    group,
    row_stride,
    group_stride,
    scores_stride,
    dest_stride,
    BLOCK: tl.constexpr,
    TILED: tl.constexpr,
):
    """One program per (head, row): bisect the bits of the k-th largest key, then place what lies at or above it."""
    head, row = tl.program_id(0), tl.program_id(1) * row_stride
    if tl.load(requests + row) < 0:
        return
    n = tl.load(num_tokens + row)
    start = tl.load(first + row)
    g = tl.program_id(1) * group_stride + tl.load(group + head)
    wanted, held = tl.load(keep + g), tl.load(before + g)
    i = tl.arange(0, BLOCK)
    scores += head.to(tl.int64) * scores_stride + start
    dest += head.to(tl.int64) * dest_stride + start
    if wanted >= n:
        for tile in range(0, n, BLOCK):
            tl.store(dest + tile + i, held + tile + i, mask=tile + i < n)
        return

    guard, tail = tl.load(protect_head + row), tl.load(protect_tail + row)
    if not TILED:
        keys = _sortable(scores, i, n, guard, tail)
    # The largest threshold that at least `wanted` keys reach, from the top bit down; as unsigned, the lowest key is 0.
    found = tl.full((), 0, tl.int32)
    for step in range(32):
        trial = found | (tl.full((), 1, tl.int32) << (31 - step))
        threshold = trial ^ _LOWEST
        if TILED:
            reached = tl.zeros([BLOCK], tl.int32)
            for tile in range(0, n, BLOCK):
                reached += (_sortable(scores, tile + i, n, guard, tail) >= threshold).to(tl.int32)
        else:
            reached = (keys >= threshold).to(tl.int32)
        found = tl.where(tl.sum(reached, axis=0) >= wanted, trial, found)
    threshold = found ^ _LOWEST

    # Of the tokens at the threshold the latest are kept: all but the first `equal - (wanted - greater)`.
    if TILED:
        reached = tl.zeros([BLOCK], tl.int32)
        for tile in range(0, n, BLOCK):
            keys = _sortable(scores, tile + i, n, guard, tail)
            reached += ((keys >= threshold) & (tile + i < n)).to(tl.int32)
        skipped = tl.sum(reached, axis=0) - wanted
        greater_seen, equal_seen = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for tile in range(0, n, BLOCK):
            keys = _sortable(scores, tile + i, n, guard, tail)
            chosen, rank = _chosen(keys, threshold, skipped, greater_seen, equal_seen)
            tl.store(dest + tile + i, tl.where(chosen, held + rank, -1), mask=tile + i < n)
            greater_seen += tl.sum((keys > threshold).to(tl.int32), axis=0)
            equal_seen += tl.sum((keys == threshold).to(tl.int32), axis=0)
    else:
        skipped = tl.sum(((keys >= threshold) & (i < n)).to(tl.int32), axis=0) - wanted
        chosen, rank = _chosen(keys, threshold, skipped, 0, 0)
        tl.store(dest + i, tl.where(chosen, held + rank, -1), mask=i < n)


@triton.jit(do_not_specialize=["row_stride", "dest_stride"])
def write_kernel(
    key,
    value,
    dest,
    pool,
    flat,
    page_rows,
    positions,
    first,
    num_tokens,
    requests,
    group,
    column,
    row_stride,
    key_token,
    key_head,
    value_token,
    value_head,
    dest_stride,
    flat_width,
    max_blocks,
    num_groups,
    G: tl.constexpr,
    PAGE: tl.constexpr,  # tokens
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program per (tile of tokens, head, row)."""
    head, row = tl.program_id(1), tl.program_id(2) * row_stride
    request = tl.load(requests + row).to(tl.int64)
    n = tl.load(num_tokens + row)
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if (request < 0) | (tl.program_id(0) * TOKENS >= n):
        return
    token = (tl.load(first + row) + i).to(tl.int64)
    to = tl.load(dest + head.to(tl.int64) * dest_stride + token, mask=i < n, other=-1)
    kept = to >= 0

    g, c = tl.load(group + head), tl.load(column + head)
    page_row = page_rows + request * (_HEADER + num_groups)
    positions_row = positions + (tl.load(page_row + 2).to(tl.int64) * num_groups + g) * max_blocks
    page = page_ids(
        flat + request * flat_width,
        positions_row,
        to // PAGE,
        tl.load(page_row + _HEADER + g),
        tl.load(page_row + 1),
        g,
        num_groups,
        kept,
    )
    d = tl.arange(0, D_PADDED)[None, :]
    mask = kept[:, None] & (d < D)
    k = tl.load(key + (token * key_token + head * key_head)[:, None] + d, mask=mask, other=0.0)
    v = tl.load(value + (token * value_token + head * value_head)[:, None] + d, mask=mask, other=0.0)
    place = pool + (((page.to(tl.int64) * G + c) * PAGE + to % PAGE) * (2 * D))[:, None] + d
    tl.store(place, k, mask=mask)
    tl.store(place + D, v, mask=mask)


@triton.jit(do_not_specialize=["row_stride", "group_stride", "out_stride", "out_width"])
def retained_blocks_kernel(
    out,
    lengths,
    flat,
    page_rows,
    positions,
    requests,
    before,
    group,
    column,
    row_stride,
    group_stride,
    out_stride,
    out_width,
    flat_width,
    max_blocks,
    num_groups,
    G: tl.constexpr,
    PAGE: tl.constexpr,  # tokens
    PAGES: tl.constexpr,
):
    """One program per (head, tile of pages, row)."""
    head, row = tl.program_id(0), tl.program_id(2)
    sequence = head * tl.num_programs(2) + row
    j = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    g, c = tl.load(group + head), tl.load(column + head)
    request = tl.load(requests + row * row_stride)
    held = tl.where(request < 0, 0, tl.load(before + row * group_stride + g))
    request = tl.maximum(request, 0).to(tl.int64)
    page_row = page_rows + request * (_HEADER + num_groups)
    positions_row = positions + (tl.load(page_row + 2).to(tl.int64) * num_groups + g) * max_blocks
    listed = (j < (held + PAGE - 1) // PAGE) & (j < out_width)
    page = page_ids(
        flat + request * flat_width,
        positions_row,
        j,
        tl.load(page_row + _HEADER + g),
        tl.load(page_row + 1),
        g,
        num_groups,
        listed,
    )
    tl.store(out + sequence.to(tl.int64) * out_stride + j, tl.where(listed, page * G + c, 0), mask=j < out_width)
    if tl.program_id(1) == 0:
        tl.store(lengths + sequence, held)


@triton.jit(do_not_specialize=["first_token", "row_stride", "group_stride", "total", "num_heads", "lse_stride"])
def merge_kernel(
    output,
    lse,
    retained,
    retained_lse,
    first,
    num_tokens,
    requests,
    before,
    group,
    first_token,
    row_stride,
    group_stride,
    total,  # tokens of all rows
    num_heads,
    output_token,
    output_head,
    lse_stride,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program per (tile of tokens, query head, row)."""
    query_head, row = tl.program_id(1), tl.program_id(2)
    head, member = query_head // RATIO, query_head % RATIO
    held = tl.load(before + row * group_stride + tl.load(group + head))
    n = tl.load(num_tokens + row * row_stride)
    if (tl.load(requests + row * row_stride) < 0) | (held == 0) | (tl.program_id(0) * TOKENS >= n):
        return
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = i < n
    t = (tl.load(first + row * row_stride) - first_token + i).to(tl.int64)
    column = head.to(tl.int64) * total + t
    own_lse = tl.load(lse + query_head.to(tl.int64) * lse_stride + t, mask=inside, other=0.0)
    old_lse = tl.load(retained_lse + member.to(tl.int64) * num_heads * total + column, mask=inside, other=0.0)
    smaller = tl.exp(-tl.abs(own_lse - old_lse))  # of two weights of which the larger is 1
    share = tl.where(old_lse > own_lse, 1.0, smaller) / (1.0 + smaller)  # of the retained part

    d = tl.arange(0, D_PADDED)[None, :]
    mask = inside[:, None] & (d < D)
    place = output + (t * output_token + query_head * output_head)[:, None] + d
    own = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    old = tl.load(retained + ((column * RATIO + member) * D)[:, None] + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (own + share[:, None] * (old - own)).to(output.dtype.element_ty), mask=mask)
