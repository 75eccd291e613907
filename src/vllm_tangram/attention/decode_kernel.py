# SPDX-License-Identifier: Apache-2.0
"""The kernel behind `decode_attention`. Shapes and words: attention/decode.py."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_tangram.pages.device import page_ids

#: Rows of a matrix product: the query heads of one KV head, padded to what tensor cores take.
QUERY_ROWS = tl.constexpr(16)


@triton.jit
def tile_page_ids(
    flat_row, positions_row, tile, old, kept, tail, group, num_groups, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Pages of one tile of tokens: one id if the tile lies in one page, else ``[TILE]``, one per token."""
    token = tile * TILE if BLOCK >= TILE else tile * TILE + tl.arange(0, TILE)
    return page_ids(flat_row, positions_row, token // BLOCK, kept, tail, group, num_groups, token < old)


@triton.jit
def combine_pieces(
    partial,
    log_sums,
    first,
    step,
    count,
    RATIO: tl.constexpr,
    RATIO_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Attention over pieces ``first, first + step, ...`` and its log-sum, always summed in the same order.

    Returns ``[RATIO_PADDED, D_PADDED]`` and ``[RATIO_PADDED]``.
    """
    ratio_ids = tl.arange(0, RATIO_PADDED)
    dims = tl.arange(0, D_PADDED)
    top = tl.full([RATIO_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([RATIO_PADDED], tl.float32)
    acc = tl.zeros([RATIO_PADDED, D_PADDED], tl.float32)
    for start in tl.range(0, count, CHUNK, num_stages=1):
        piece = start + tl.arange(0, CHUNK)
        row = (first + piece * step)[:, None] * RATIO + ratio_ids[None, :]
        wanted = (piece < count)[:, None] & (ratio_ids < RATIO)[None, :]
        # .cg: other multiprocessors wrote these; what this one's L1 may hold is older.
        logs = tl.load(log_sums + row, mask=wanted, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial + row[:, :, None] * D + dims[None, None, :],
            mask=wanted[:, :, None] & (dims < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        logs = tl.where((piece < count)[:, None], logs, -float("inf"))
        new_top = tl.maximum(top, tl.max(logs, 0))
        weights = tl.exp2(logs - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        top = new_top
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def mean_tokens(seq_lens, num_rows, ROWS: tl.constexpr):
    """Mean tokens of the batch's requests, at least 1."""
    rows = tl.arange(0, ROWS)
    tokens = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    active = tl.sum((tokens > 0).to(tl.int32), 0)
    return tl.maximum(tl.sum(tokens.to(tl.int64), 0) // tl.maximum(active, 1), 1)


@triton.jit(
    do_not_specialize=["flat_stride", "rows_stride", "positions_table_stride", "positions_group_stride", "num_groups"]
)
def decode_kernel(
    query,
    key,
    value,
    pool,
    output,
    requests,
    seq_lens,
    flat,
    rows,
    positions,
    work,
    partial,
    log_sums,
    arrived,
    scale_log2,  # scale * log2(e): exponentials are powers of two
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    output_stride,
    output_head_stride,
    page_stride,
    flat_stride,
    rows_stride,
    positions_table_stride,
    positions_group_stride,
    num_groups,
    ROW_HEADER: tl.constexpr,
    WORK_ITEM: tl.constexpr,
    RATIO: tl.constexpr,
    RATIO_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    COMBINE_CHUNK: tl.constexpr,
    FAN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: one piece of one head of one row; the head's last piece also takes in and writes the new token.

    The map says into how many pieces a head of a request of mean length is cut. A longer or shorter one gets
    proportionally more or fewer, so that all pieces of a layer take about the same time, up to the slots of the head.
    """
    row = tl.program_id(0)
    item = work + tl.program_id(1) * WORK_ITEM
    slot = tl.load(requests + row)
    tokens = tl.load(seq_lens + row)
    head = tl.load(item)
    piece = tl.load(item + 1)
    pieces = tl.load(item + 2)
    before = tl.load(item + 3)
    group = tl.load(item + 4)
    column = tl.load(item + 5)
    room = tl.load(item + 6)
    round_up = tl.load(item + 7)

    row_wide = row.to(tl.int64)
    query_ids = tl.arange(0, QUERY_ROWS)
    dims = tl.arange(0, D_PADDED)
    real = dims < D
    query_real = (query_ids < RATIO)[:, None] & real[None, :]
    head_output = output + row_wide * output_stride + head * RATIO * output_head_stride
    output_places = head_output + query_ids[:, None] * output_head_stride + dims[None, :]
    if (slot < 0) | (tokens <= 0):
        if piece == 0:
            tl.store(output_places, tl.zeros([QUERY_ROWS, D_PADDED], tl.float32), mask=query_real)
        return

    if ROWS > 1:
        mean = mean_tokens(seq_lens, tl.num_programs(0), ROWS)
        scaled = (pieces.to(tl.int64) * tokens + round_up * (mean - 1)) // mean
        pieces = tl.maximum(tl.minimum(scaled, room), 1).to(tl.int32)
    if piece >= pieces:  # a slot that only a longer request uses: gone before it has loaded anything else
        return

    # What the member holds: docs/design.md, "The invariant". The new token comes from key and value, not from a page.
    request = rows + slot.to(tl.int64) * rows_stride
    prompt_blocks = tl.load(request) // BLOCK
    tail = tl.load(request + 1)
    table = tl.load(request + 2)
    kept = tl.load(request + ROW_HEADER + group)
    old = tl.maximum(tokens - BLOCK * (prompt_blocks - kept) - 1, 0)
    tiles = (old + TILE - 1) // TILE
    wanted = tl.maximum(tl.minimum(pieces, (tiles + MIN_TILES - 1) // MIN_TILES), 1)
    length = tl.maximum((tiles + wanted - 1) // wanted, 1)  # tiles of a piece
    first_tile = piece * length
    if (piece > 0) & (first_tile >= tiles):
        return
    end_tile = tl.minimum(first_tile + length, tiles)
    newest = first_tile + length >= tiles

    flat_row = flat + slot.to(tl.int64) * flat_stride
    positions_row = positions + table * positions_table_stride + group * positions_group_stride
    pages = tile_page_ids(flat_row, positions_row, first_tile, old, kept, tail, group, num_groups, TILE, BLOCK)
    new_page = page_ids(flat_row, positions_row, old // BLOCK, kept, tail, group, num_groups, newest)

    head_query = query + row_wide * query_stride + head * RATIO * query_head_stride
    q = tl.load(head_query + query_ids[:, None] * query_head_stride + dims[None, :], mask=query_real, other=0.0)
    new_wanted = dims < tl.where(newest, D, 0)  # the interpreter cannot mask with a broadcast scalar condition
    new_key = tl.load(key + row_wide * key_stride + head * key_head_stride + dims, mask=new_wanted, other=0.0)
    new_value = tl.load(value + row_wide * value_stride + head * value_head_stride + dims, mask=new_wanted, other=0.0)

    token_ids = tl.arange(0, TILE)
    new_score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale_log2
    top = tl.where(newest, new_score, -float("inf"))
    # One sum per lane of the tile, added up after the loop: no exchange between warps in it. The new token weighs 1.
    first_lane = token_ids < tl.where(newest, 1, 0)
    sums = tl.where(first_lane[None, :], 1.0, tl.zeros([QUERY_ROWS, TILE], tl.float32))
    acc = tl.zeros([QUERY_ROWS, D_PADDED], tl.float32) + new_value.to(tl.float32)[None, :]

    member = pool + column * (BLOCK * 2 * D)
    for tile in range(first_tile, end_tile):
        if BLOCK >= TILE:
            in_page = (tile * TILE) % BLOCK + token_ids
            tokens_of_tile = member + pages.to(tl.int64) * page_stride + in_page * (2 * D)
        else:
            tokens_of_tile = member + pages.to(tl.int64) * page_stride + (token_ids % BLOCK) * (2 * D)
        places = tokens_of_tile[:, None] + dims[None, :]
        held = tile * TILE + token_ids < old
        held_real = held[:, None] & real[None, :]
        k = tl.load(places, mask=held_real, other=0.0)
        v = tl.load(places + D, mask=held_real, other=0.0)
        # Ids of the next tile are asked for now: they come through two loads that depend on each other.
        pages = tile_page_ids(flat_row, positions_row, tile + 1, old, kept, tail, group, num_groups, TILE, BLOCK)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(held[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        sums = sums * shrink[:, None] + weights
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    if newest:
        token = member + new_page.to(tl.int64) * page_stride + (old % BLOCK) * (2 * D) + dims
        tl.store(token, new_key, mask=real)
        tl.store(token + D, new_value, mask=real)

    total = tl.sum(sums, 1)
    result = acc / total[:, None]
    if length >= tiles:
        tl.store(output_places, result, mask=query_real)
        return

    used = (tiles + length - 1) // length
    first = row_wide * tl.num_programs(1) + before
    head_partial = partial + first * (RATIO * D)
    head_sums = log_sums + first * RATIO
    place = piece * RATIO + query_ids
    tl.store(head_partial + place[:, None] * D + dims[None, :], result, mask=query_real)
    tl.store(head_sums + place, top + tl.log2(total), mask=query_ids < RATIO)
    tl.debug_barrier()  # the atomic below is one thread's: all threads' stores must come before it
    # In two levels, so that a head of hundreds of pieces does not wait for one block to read them all: the last block
    # of every FAN pieces combines these, the last of those the rest. The counter of a level lies where no other does.
    chunk = piece // FAN
    count = tl.minimum(used - chunk * FAN, FAN)
    chunks = (used + FAN - 1) // FAN
    begin = first + chunk * FAN
    if tl.atomic_add(arrived + begin, 1, sem="acq_rel") == count - 1:
        tl.store(arrived + begin, 0)  # for the next launch
        joined, joined_log = combine_pieces(
            partial, log_sums, begin, 1, count, RATIO, RATIO_PADDED, D, D_PADDED, COMBINE_CHUNK
        )
        ratio_ids = tl.arange(0, RATIO_PADDED)
        ratio_real = ratio_ids < RATIO
        joined_real = ratio_real[:, None] & real[None, :]
        output_rows = head_output + ratio_ids[:, None] * output_head_stride + dims[None, :]
        if chunks == 1:
            tl.store(output_rows, joined, mask=joined_real)
        else:
            tl.debug_barrier()  # all threads have read the pieces, of which the first is overwritten
            joined_place = begin * RATIO + ratio_ids
            tl.store(partial + joined_place[:, None] * D + dims[None, :], joined, mask=joined_real)
            tl.store(log_sums + joined_place, joined_log, mask=ratio_real)
            tl.debug_barrier()
            if tl.atomic_add(arrived + first + 1, 1, sem="acq_rel") == chunks - 1:
                tl.store(arrived + first + 1, 0)
                whole, _ = combine_pieces(
                    partial, log_sums, first, FAN, chunks, RATIO, RATIO_PADDED, D, D_PADDED, COMBINE_CHUNK
                )
                tl.store(output_rows, whole, mask=joined_real)
