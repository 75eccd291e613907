# SPDX-License-Identifier: Apache-2.0
"""The kernel behind `SplitPlan`. Words and records: attention/partition.py."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_tangram.pages.device import born_places, page_ids


@triton.jit
def _old_tokens(
    requests,
    seq_lens,
    rows,
    members,
    segment,
    wanted,
    num_heads,
    rows_stride,
    ROW_HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens that each segment holds without the new one, and where its request's row and its group are."""
    row = segment // num_heads
    slot = tl.load(requests + row, mask=wanted, other=-1)
    tokens = tl.load(seq_lens + row, mask=wanted, other=0)
    slot = tl.where(tokens > 0, slot, -1)
    present = wanted & (slot >= 0)
    request = rows + slot.to(tl.int64) * rows_stride
    group = tl.load(members + (segment % num_heads) * 2, mask=wanted, other=0)
    prompt_blocks = tl.load(request, mask=present, other=0) // BLOCK
    kept = tl.load(request + ROW_HEADER + group, mask=present, other=0)
    old = tl.maximum(tokens - BLOCK * (prompt_blocks - kept) - 1, 0)
    return tl.where(present, old, 0), slot, present, request, group, kept


@triton.jit
def _tiles(old, TILE: tl.constexpr):
    """Tiles of a segment; the new token alone counts as one."""
    return tl.maximum((old + TILE - 1) // TILE, 1)


@triton.jit
def _store_ahead(
    target,
    inside,
    flat_row,
    positions_row,
    tile,
    old,
    kept,
    tail,
    group,
    num_groups,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The page of a tile, and where that of the next was born; 0 beyond ``old``, which is 0 without a request."""
    block = tile * TILE // BLOCK
    page = page_ids(flat_row, positions_row, block, kept, tail, group, num_groups, block * BLOCK < old)
    tl.store(target, page, mask=inside)
    block = (tile + 1) * TILE // BLOCK
    born = born_places(positions_row, block, kept, block * BLOCK < old)
    tl.store(target + 1, born, mask=inside)


@triton.jit
def _count_before(segments, target, count, LOG: tl.constexpr, SEGMENT: tl.constexpr):
    """How many segments have their first tile before ``target``; first tiles rise."""
    found = tl.zeros_like(target)
    for bit in tl.static_range(LOG):
        candidate = found + (1 << (LOG - 1 - bit))
        inside = candidate <= count
        first = tl.load(segments + (candidate - 1) * SEGMENT, mask=inside, other=0)
        found = tl.where(inside & (first < target), candidate, found)
    return found


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_blocks",
        "num_groups",
        "rows_stride",
        "flat_stride",
        "positions_table_stride",
        "positions_group_stride",
        "segments_stride",
        "shares_stride",
    ]
)
def plan_kernel(
    requests,
    seq_lens,
    rows,
    flat,
    positions,
    members,
    segments,
    shares,
    num_rows,
    num_heads,
    num_blocks,
    num_groups,
    rows_stride,
    flat_stride,
    positions_table_stride,
    positions_group_stride,
    segments_stride,
    shares_stride,
    EVEN: tl.constexpr,
    ROW_HEADER: tl.constexpr,
    SEGMENT: tl.constexpr,
    SHARE: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SWITCH: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG: tl.constexpr,
):
    """One program: one layer."""
    layer = tl.program_id(0)
    members += layer * num_heads * 2
    segments += layer * segments_stride
    shares += layer * shares_stride
    count = num_rows * num_heads
    ids = tl.arange(0, CHUNK)

    total = 0
    for start in range(0, count, CHUNK):
        segment = start + ids
        wanted = segment < count
        old, _, _, _, _, _ = _old_tokens(
            requests, seq_lens, rows, members, segment, wanted, num_heads, rows_stride, ROW_HEADER, BLOCK
        )
        total += tl.sum(tl.where(wanted, _tiles(old, TILE) + SWITCH, 0), 0)
    length = tl.maximum((total + num_blocks - 1) // num_blocks, MIN_TILES)
    cuts = tl.maximum(num_blocks // count, 1)

    before = 0
    for start in range(0, count, CHUNK):
        segment = start + ids
        wanted = segment < count
        old, slot, present, request, group, kept = _old_tokens(
            requests, seq_lens, rows, members, segment, wanted, num_heads, rows_stride, ROW_HEADER, BLOCK
        )
        tiles = _tiles(old, TILE)
        cost = tl.where(wanted, tiles + SWITCH, 0)
        end = before + tl.cumsum(cost, 0)
        first = end - tiles
        if EVEN:
            first_block = segment * cuts
            own = tl.maximum((tiles + cuts - 1) // cuts, MIN_TILES)
            pieces = (tiles + own - 1) // own
        else:
            first_block = first // length
            pieces = (end - 1) // length - first_block + 1
        tail = tl.load(request + 1, mask=present, other=0)
        table = tl.load(request + 2, mask=present, other=0)
        flat_row = flat + slot.to(tl.int64) * flat_stride
        positions_row = positions + table * positions_table_stride + group * positions_group_stride
        new_page = page_ids(flat_row, positions_row, old // BLOCK, kept, tail, group, num_groups, present)
        place = segments + segment * SEGMENT
        tl.store(place, first, mask=wanted)
        tl.store(place + 1, old, mask=wanted)
        tl.store(place + 2, slot, mask=wanted)
        tl.store(place + 3, kept, mask=wanted)
        tl.store(place + 4, tail, mask=wanted)
        tl.store(place + 5, table, mask=wanted)
        tl.store(place + 6, group, mask=wanted)
        tl.store(place + 7, tl.load(members + (segment % num_heads) * 2 + 1, mask=wanted, other=0), mask=wanted)
        tl.store(place + 8, first_block, mask=wanted)
        tl.store(place + 9, pieces, mask=wanted)
        tl.store(place + 10, new_page, mask=wanted)
        _store_ahead(
            place + AHEAD,
            wanted,
            flat_row,
            positions_row,
            tl.zeros_like(old),
            old,
            kept,
            tail,
            group,
            num_groups,
            TILE,
            BLOCK,
        )
        before += tl.sum(cost, 0)
    tl.debug_barrier()  # what follows reads what other threads wrote

    for start in range(0, num_blocks, CHUNK):
        block = start + ids
        if EVEN:
            first = tl.minimum(block // cuts, count - 1)
            begin = tl.load(segments + first * SEGMENT)
            tiles = _tiles(tl.load(segments + first * SEGMENT + 1), TILE)
            own = tl.maximum((tiles + cuts - 1) // cuts, MIN_TILES)
            low = begin + (block % cuts) * own
            high = tl.minimum(low + own, begin + tiles)
            end = tl.where((block < count * cuts) & (low < high), first + 1, first)
        else:
            low = block * length
            high = low + length
            end = _count_before(segments, high, count, LOG, SEGMENT)
            # The last segment that begins before this share, if it reaches into it; else the next one.
            last = tl.maximum(_count_before(segments, low + 1, count, LOG, SEGMENT) - 1, 0)
            begin = tl.load(segments + last * SEGMENT)
            tiles = _tiles(tl.load(segments + last * SEGMENT + 1), TILE)
            first = tl.where(begin + tiles > low, last, last + 1)
            end = tl.maximum(end, first)
        busy = (block < num_blocks) & (first < end)
        place = shares + block * SHARE
        inside = block < num_blocks
        tl.store(place, first, mask=inside)
        tl.store(place + 1, end, mask=inside)
        tl.store(place + 2, low, mask=inside)
        tl.store(place + 3, high, mask=inside)
        record = segments + first * SEGMENT
        for field in tl.static_range(AHEAD):
            tl.store(place + 4 + field, tl.load(record + field, mask=busy, other=0), mask=inside)
        slot = tl.load(record + 2, mask=busy, other=0)
        group = tl.load(record + 6, mask=busy, other=0)
        table = tl.load(record + 5, mask=busy, other=0)
        _store_ahead(
            place + 4 + AHEAD,
            inside,
            flat + slot.to(tl.int64) * flat_stride,
            positions + table * positions_table_stride + group * positions_group_stride,
            tl.maximum(low - tl.load(record, mask=busy, other=0), 0),
            tl.load(record + 1, mask=busy, other=0),
            tl.load(record + 3, mask=busy, other=0),
            tl.load(record + 4, mask=busy, other=0),
            group,
            num_groups,
            TILE,
            BLOCK,
        )
