# SPDX-License-Identifier: Apache-2.0
"""The kernel behind `decode_attention`. Shapes and words: attention/decode.py."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_tangram.pages.device import born_places, page_ids, page_ids_at

#: Rows of a matrix product: the query heads of one KV head, padded to what tensor cores take.
QUERY_ROWS = tl.constexpr(16)


@triton.jit
def tile_blocks(tile, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Page indices of one tile of tokens: one if the tile lies in one page, else ``[TILE]``, one per token."""
    token = tile * TILE if BLOCK >= TILE else tile * TILE + tl.arange(0, TILE)
    return token // BLOCK


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
    new_page = tl.load(record + 10)
    first_page = tl.load(record + 11)
    second_born = tl.load(record + 12)
    holder = slot, kept, tail, table, group, column
    return begin, old, holder, first_block, pieces, new_page, first_page, second_born


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
    FAN: tl.constexpr,
):
    """Attention over pieces ``first, first + step, ...`` and its log-sum, always summed in the same order.

    Returns ``[RATIO_PADDED, D_PADDED]`` and ``[RATIO_PADDED]``.
    """
    ratio_ids = tl.arange(0, RATIO_PADDED)
    dims = tl.arange(0, D_PADDED)
    top = tl.full([RATIO_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([RATIO_PADDED], tl.float32)
    acc = tl.zeros([RATIO_PADDED, D_PADDED], tl.float32)
    for start in tl.range(0, count, FAN, num_stages=1):
        logs = ()
        values = ()
        for offset in tl.static_range(FAN):  # all loads are under way at once, and none waits for another's answer
            wanted = ratio_ids < tl.where(start + offset < count, RATIO, 0)
            rows = piece_slot(first_block, first + (start + offset) * step) * RATIO + ratio_ids
            # .cg: other multiprocessors wrote these; what this one's L1 may hold is older.
            logs += (tl.load(log_sums + rows, mask=wanted, other=-float("inf"), cache_modifier=".cg"),)  # type: ignore[assignment]
            places = partial + rows[:, None] * D + dims[None, :]
            real = wanted[:, None] & (dims < D)[None, :]
            values += (tl.load(places, mask=real, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        new_top = top
        for offset in tl.static_range(FAN):
            new_top = tl.maximum(new_top, logs[offset])
        new_top = tl.where(ratio_ids < RATIO, new_top, 0.0)  # padding: no infinity less infinity
        shrink = tl.exp2(top - new_top)
        total = total * shrink
        acc = acc * shrink[:, None]
        for offset in tl.static_range(FAN):
            weights = tl.exp2(logs[offset] - new_top)
            total += weights
            acc += values[offset] * weights[:, None]
        top = new_top
    total = tl.where(ratio_ids < RATIO, total, 1.0)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit(do_not_specialize=["flat_stride", "positions_table_stride", "positions_group_stride", "num_groups"])
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
    SEGMENT: tl.constexpr,
    SHARE: tl.constexpr,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    RATIO_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FAN: tl.constexpr,
):
    """One program: one share, segment after segment; a segment's last piece also takes in and writes the new token."""
    block = tl.program_id(0)
    share = shares + block * SHARE
    first_segment = tl.load(share)
    end_segment = tl.load(share + 1)
    low = tl.load(share + 2)
    high = tl.load(share + 3)
    # The first segment's record comes with the share; that of the next is asked for early.
    begin, old, holder, first_block, pieces, new_page, first_page, second_born = load_segment(share + 4)

    query_ids = tl.arange(0, QUERY_ROWS)
    dims = tl.arange(0, D_PADDED)
    token_ids = tl.arange(0, TILE)
    real = dims < D
    query_real = (query_ids < RATIO)[:, None] & real[None, :]
    for segment in tl.range(first_segment, end_segment, num_stages=1):
        row = tl.cast(segment // HEADS, tl.int64)
        head = segment % HEADS

        tiles = (old + TILE - 1) // TILE
        first_tile = tl.maximum(low - begin, 0)
        end_tile = tl.minimum(high - begin, tiles)
        slot, kept, tail, table, group, column = holder
        newest = (high - begin >= tiles) & (slot >= 0)
        flat_row = flat + slot.to(tl.int64) * flat_stride
        positions_row = positions + table * positions_table_stride + group * positions_group_stride
        if BLOCK >= TILE:
            page, born = first_page, second_born
        else:
            blocks = tile_blocks(first_tile, TILE, BLOCK)
            page = page_ids(flat_row, positions_row, blocks, kept, tail, group, num_groups, blocks * BLOCK < old)
            blocks = tile_blocks(first_tile + 1, TILE, BLOCK)
            born = born_places(positions_row, blocks, kept, blocks * BLOCK < old)

        queries = query + row * query_stride + head * RATIO * query_head_stride
        queries += query_ids[:, None] * query_head_stride + dims[None, :]
        q = tl.load(queries, mask=query_real, other=0.0)  # for the new token; the loop loads its own
        new_wanted = dims < tl.where(newest, D, 0)  # the interpreter cannot mask with a broadcast scalar condition
        new_key = tl.load(key + row * key_stride + head * key_head_stride + dims, mask=new_wanted, other=0.0)
        new_value = tl.load(value + row * value_stride + head * value_head_stride + dims, mask=new_wanted, other=0.0)

        top = tl.full([QUERY_ROWS], -float("inf"), tl.float32)
        # One sum per lane of the tile, added up after the loop: no exchange between warps in it.
        sums = tl.zeros([QUERY_ROWS, TILE], tl.float32)
        acc = tl.zeros([QUERY_ROWS, D_PADDED], tl.float32)

        member = pool + column * (BLOCK * 2 * D)
        following = load_segment(segments + tl.minimum(segment + 1, end_segment - 1) * SEGMENT)
        for tile in range(first_tile, end_tile):
            in_page = ((tile * TILE) % BLOCK if BLOCK >= TILE else 0) + token_ids % BLOCK
            tokens_of_tile = member + page.to(tl.int64) * page_stride + in_page * (2 * D)
            places = tokens_of_tile[:, None] + dims[None, :]
            held = tile * TILE + token_ids < old
            held_real = held[:, None] & real[None, :]
            k = tl.load(places, mask=held_real, other=0.0)
            v = tl.load(places + D, mask=held_real, other=0.0)
            # Once more with every tile, by a mask that the compiler cannot know: a query that the loop must have before
            # it begins holds back the first tiles until it has arrived.
            asked = (query_ids < tl.where(tile < end_tile, RATIO, 0))[:, None] & real[None, :]
            tile_q = tl.load(queries, mask=asked, other=0.0)
            # A page is found through two loads. The first is asked for a tile ahead, so that the second need not wait
            # for it: a thread that waits issues nothing else.
            blocks = tile_blocks(tile + 1, TILE, BLOCK)
            page = page_ids_at(flat_row, born, blocks, kept, tail, group, num_groups, blocks * BLOCK < old)
            blocks = tile_blocks(tile + 2, TILE, BLOCK)
            born = born_places(positions_row, blocks, kept, blocks * BLOCK < old)
            scores = tl.dot(tile_q, tl.trans(k), input_precision="ieee") * scale_log2
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

        begin, old, holder, next_block, next_pieces, new_page, first_page, second_born = following
        total = tl.sum(sums, 1)
        if newest:  # last, for it would hold back the first tiles, too
            new_score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale_log2
            new_top = tl.maximum(top, new_score)
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(new_score - new_top)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
            top = new_top
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
                    FAN,
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
                            FAN,
                        )
                        tl.store(output_rows, whole, mask=joined_real)
        first_block, pieces = next_block, next_pieces
