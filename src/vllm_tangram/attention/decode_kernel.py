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
def load_segment(record):
    """The numbers of a segment: attention/partition.py."""
    begin = tl.load(record)
    old = tl.load(record + 1)
    slot = tl.load(record + 2)
    kept = tl.load(record + 3)
    tail = tl.load(record + 4)
    table = tl.load(record + 5)
    group = tl.load(record + 6)
    column = tl.load(record + 7)
    first_block = tl.load(record + 8)
    pieces = tl.load(record + 9)
    return begin, old, slot, kept, tail, table, group, column, first_block, pieces


@triton.jit
def piece_slot(first_block, piece):
    """Where the result of a segment's piece lies: a block has a slot for a segment's end and one for its beginning."""
    return 2 * (first_block + piece) + tl.where(piece == 0, 1, 0)


@triton.jit
def combine_pieces(
    partial,
    log_sums,
    first_block,
    first,
    step,
    count,
    RATIO: tl.constexpr,
    RATIO_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Attention over pieces ``first, first + step, ...`` and its log-sum, always summed in the same order.

    Returns ``[RATIO_PADDED, D_PADDED]`` and ``[RATIO_PADDED]``.
    """
    ratio_ids = tl.arange(0, RATIO_PADDED)
    dims = tl.arange(0, D_PADDED)
    top = tl.full([RATIO_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([RATIO_PADDED], tl.float32)
    acc = tl.zeros([RATIO_PADDED, D_PADDED], tl.float32)
    for start in tl.range(0, count, AT_ONCE, num_stages=1):
        new_top = top
        for offset in tl.static_range(AT_ONCE):
            wanted = ratio_ids < tl.where(start + offset < count, RATIO, 0)
            rows = piece_slot(first_block, first + (start + offset) * step) * RATIO + ratio_ids
            # .cg: other multiprocessors wrote these; what this one's L1 may hold is older.
            logs = tl.load(log_sums + rows, mask=wanted, other=-float("inf"), cache_modifier=".cg")
            new_top = tl.maximum(new_top, logs)
        new_top = tl.where(ratio_ids < RATIO, new_top, 0.0)  # padding: no infinity less infinity
        shrink = tl.exp2(top - new_top)
        total = total * shrink
        acc = acc * shrink[:, None]
        for offset in tl.static_range(AT_ONCE):  # unrolled: all loads are under way at once, and none waits for a sum
            wanted = ratio_ids < tl.where(start + offset < count, RATIO, 0)
            rows = piece_slot(first_block, first + (start + offset) * step) * RATIO + ratio_ids
            logs = tl.load(log_sums + rows, mask=wanted, other=-float("inf"), cache_modifier=".cg")
            values = tl.load(
                partial + rows[:, None] * D + dims[None, :],
                mask=wanted[:, None] & (dims < D)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            weights = tl.where(wanted, tl.exp2(logs - new_top), 0.0)
            total += weights
            acc += values * weights[:, None]
        top = new_top
    total = tl.where(ratio_ids < RATIO, total, 1.0)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit(
    do_not_specialize=["flat_stride", "positions_table_stride", "positions_group_stride", "num_groups", "num_heads"]
)
def decode_kernel(
    query,
    key,
    value,
    pool,
    output,
    flat,
    positions,
    segments,
    shares,
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
    positions_table_stride,
    positions_group_stride,
    num_groups,
    num_heads,
    SEGMENT: tl.constexpr,
    SHARE: tl.constexpr,
    RATIO: tl.constexpr,
    RATIO_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FAN: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program: one share, segment after segment; a segment's last piece also takes in and writes the new token."""
    block = tl.program_id(0)
    share = shares + block * SHARE
    first_segment = tl.load(share)
    end_segment = tl.load(share + 1)
    low = tl.load(share + 2)
    high = tl.load(share + 3)
    first_page = tl.load(share + 4)
    # The first segment's record and page come with the share; those of the next are asked for early.
    begin, old, slot, kept, tail, table, group, column, first_block, pieces = load_segment(share + 5)

    query_ids = tl.arange(0, QUERY_ROWS)
    dims = tl.arange(0, D_PADDED)
    token_ids = tl.arange(0, TILE)
    real = dims < D
    query_real = (query_ids < RATIO)[:, None] & real[None, :]
    for segment in tl.range(first_segment, end_segment, num_stages=1):
        row = (segment // num_heads).to(tl.int64)
        head = segment % num_heads

        tiles = (old + TILE - 1) // TILE
        first_tile = tl.maximum(low - begin, 0)
        end_tile = tl.minimum(high - begin, tiles)
        newest = (high - begin >= tiles) & (slot >= 0)
        flat_row = flat + slot.to(tl.int64) * flat_stride
        positions_row = positions + table * positions_table_stride + group * positions_group_stride
        if BLOCK >= TILE:
            pages = first_page
        else:
            pages = tile_page_ids(flat_row, positions_row, first_tile, old, kept, tail, group, num_groups, TILE, BLOCK)
        new_page = page_ids(flat_row, positions_row, old // BLOCK, kept, tail, group, num_groups, newest)

        head_query = query + row * query_stride + head * RATIO * query_head_stride
        q = tl.load(head_query + query_ids[:, None] * query_head_stride + dims[None, :], mask=query_real, other=0.0)
        new_wanted = dims < tl.where(newest, D, 0)  # the interpreter cannot mask with a broadcast scalar condition
        new_key = tl.load(key + row * key_stride + head * key_head_stride + dims, mask=new_wanted, other=0.0)
        new_value = tl.load(value + row * value_stride + head * value_head_stride + dims, mask=new_wanted, other=0.0)

        new_score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale_log2
        top = tl.where(newest, new_score, -float("inf"))
        # One sum per lane of the tile, added up after the loop: no exchange between warps in it. The new token
        # weighs 1.
        first_lane = token_ids < tl.where(newest, 1, 0)
        sums = tl.where(first_lane[None, :], 1.0, tl.zeros([QUERY_ROWS, TILE], tl.float32))
        acc = tl.zeros([QUERY_ROWS, D_PADDED], tl.float32) + new_value.to(tl.float32)[None, :]

        member = pool + column * (BLOCK * 2 * D)
        following = load_segment(segments + tl.minimum(segment + 1, end_segment - 1) * SEGMENT)
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

        token = member + new_page.to(tl.int64) * page_stride + (old % BLOCK) * (2 * D) + dims
        tl.store(token, new_key, mask=new_wanted)
        tl.store(token + D, new_value, mask=new_wanted)

        begin, old, slot, kept, tail, table, group, column, next_block, next_pieces = following
        if BLOCK >= TILE:
            first_page = page_ids(
                flat + slot.to(tl.int64) * flat_stride,
                positions + table * positions_table_stride + group * positions_group_stride,
                0,
                kept,
                tail,
                group,
                num_groups,
                old > 0,
            )

        total = tl.sum(sums, 1)
        result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row without a request has nothing to sum
        head_output = output + row * output_stride + head * RATIO * output_head_stride
        if pieces == 1:
            tl.store(
                head_output + query_ids[:, None] * output_head_stride + dims[None, :],
                result,
                mask=query_real,
            )
        else:
            piece = block - first_block
            rows = piece_slot(first_block, piece) * RATIO + query_ids
            tl.store(partial + rows[:, None] * D + dims[None, :], result, mask=query_real)
            tl.store(log_sums + rows, top + tl.log2(total), mask=query_ids < RATIO)
            tl.debug_barrier()  # the atomic below is one thread's: all threads' stores must come before it
            # In two levels, so that a head of hundreds of pieces does not wait for one block to read them all: the last
            # block of every FAN pieces combines these, the last of those the rest. The counter of a level lies where
            # no other does.
            chunk = piece // FAN
            count = tl.minimum(pieces - chunk * FAN, FAN)
            chunks = (pieces + FAN - 1) // FAN
            counter = arrived + piece_slot(first_block, chunk * FAN)
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                tl.store(counter, 0)  # for the next launch
                joined, joined_log = combine_pieces(
                    partial,
                    log_sums,
                    first_block,
                    chunk * FAN,
                    1,
                    count,
                    RATIO,
                    RATIO_PADDED,
                    D,
                    D_PADDED,
                    AT_ONCE,
                )
                ratio_ids = tl.arange(0, RATIO_PADDED)
                ratio_real = ratio_ids < RATIO
                joined_real = ratio_real[:, None] & real[None, :]
                output_rows = head_output + ratio_ids[:, None] * output_head_stride + dims[None, :]
                if chunks == 1:
                    tl.store(output_rows, joined, mask=joined_real)
                else:
                    tl.debug_barrier()  # all threads have read the pieces, of which the first is overwritten
                    joined_place = piece_slot(first_block, chunk * FAN) * RATIO + ratio_ids
                    tl.store(partial + joined_place[:, None] * D + dims[None, :], joined, mask=joined_real)
                    tl.store(log_sums + joined_place, joined_log, mask=ratio_real)
                    tl.debug_barrier()
                    upper = arrived + piece_slot(first_block, 1)
                    if tl.atomic_add(upper, 1, sem="acq_rel") == chunks - 1:
                        tl.store(upper, 0)
                        whole, _ = combine_pieces(
                            partial,
                            log_sums,
                            first_block,
                            0,
                            FAN,
                            chunks,
                            RATIO,
                            RATIO_PADDED,
                            D,
                            D_PADDED,
                            AT_ONCE,
                        )
                        tl.store(output_rows, whole, mask=joined_real)
        first_block, pieces = next_block, next_pieces
