# SPDX-License-Identifier: Apache-2.0
"""The loops behind `PageTable`, compiled.

Shapes: S slots, N groups, J pages per group, K kept tables, R rows of the batch, H members asked about. Numba does
not check bounds, so every index that depends on the caller is checked here once per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tangram.pages.jit import jit

IntArray = npt.NDArray[np.integer[Any]]


@jit
def ingest_pages(
    pages: IntArray,  # [S, N, J]
    ingested: IntArray,  # [S] page ids read so far
    next_block: IntArray,  # [S] block n, from 1, whose pages are born next ...
    next_group: IntArray,  # [S] ... and the first group not yet looked at
    prompt_len: IntArray,  # [S]
    table: IntArray,  # [S] index into kept, -1: the slot is closed
    kept: IntArray,  # [K, n_max + 1, N]
    block_size: int,
    slots: IntArray,  # [R]
    rows: IntArray,  # [R]
    flat: IntArray,  # [max_reqs, W]
    counts: IntArray,  # [max_reqs]
) -> None:
    """Deal the new page ids of every row to its groups, in birth order."""
    num_groups, max_pages = pages.shape[1], pages.shape[2]
    for i in range(len(slots)):
        slot, row = slots[i], rows[i]
        done, count = ingested[slot], counts[row]
        if count == done:
            continue
        if table[slot] < 0:
            raise ValueError("pages were given for a slot that is not open")
        if count < done:
            raise ValueError("the page count of a request shrank; its slot must be opened again")
        if count > flat.shape[1]:
            raise ValueError("a page count exceeds the width of the flat page lists")
        births = kept[table[slot]]
        prompt_blocks = prompt_len[slot] // block_size
        n, g = next_block[slot], next_group[slot]
        while done < count:
            last = min(n, prompt_blocks)
            beyond = n - last  # blocks since the last whole prompt block: nothing is evicted any more
            while g < num_groups and done < count:
                if beyond > 0 or births[n, g] != births[n - 1, g]:
                    index = births[last, g] + beyond - 1
                    if index >= max_pages:
                        raise ValueError("a request holds more pages per group than the page table has room for")
                    pages[slot, g, index] = flat[row, done]
                    done += 1
                g += 1
            if g == num_groups:
                n += 1
                g = 0
        ingested[slot], next_block[slot], next_group[slot] = done, n, g


@jit
def group_lengths(
    prompt_len: IntArray,  # [S]
    table: IntArray,  # [S]
    kept: IntArray,  # [K, n_max + 1, N]
    block_size: int,
    slots: IntArray,  # [R]
    tokens: IntArray,  # [R]
    out: IntArray,  # [R, N]
) -> None:
    """``length_g(t, P) = t - block_size * (n - kept_g(n))`` with ``n = min(t, P) // block_size``."""
    for i in range(len(slots)):
        slot, t = slots[i], tokens[i]
        if table[slot] < 0 or t < 0:
            raise ValueError("lengths need an open slot and a token count that is not negative")
        n = min(t, prompt_len[slot]) // block_size
        births = kept[table[slot], n]
        base = t - block_size * n
        for g in range(out.shape[1]):
            out[i, g] = base + block_size * births[g]


@jit
def member_blocks(
    pages: IntArray,  # [S, N, J]
    group_size: int,
    slots: IntArray,  # [R]
    group: IntArray,  # [H]
    column: IntArray,  # [H]
    counts: IntArray,  # [R * H]
    out: IntArray,  # [R * H, J']
) -> None:
    """Virtual block ids ``page * G + column`` of the first ``counts`` pages of every (row, member)."""
    room = min(out.shape[1], pages.shape[2])
    i = 0
    for r in range(len(slots)):
        for h in range(len(group)):
            if counts[i] > room:
                raise ValueError("a member has more pages than the page table or the output has room for")
            for j in range(counts[i]):
                out[i, j] = pages[slots[r], group[h], j] * group_size + column[h]
            i += 1


@jit
def member_slots(
    pages: IntArray,  # [S, N, J]
    group_size: int,
    block_size: int,
    slot: int,
    group: IntArray,  # [H]
    column: IntArray,  # [H]
    starts: IntArray,  # [H]
    counts: IntArray,  # [H]
    out: IntArray,  # [sum counts]
) -> None:
    """Physical slots of ``counts[h]`` tokens appended to member h from index ``starts[h]``, members concatenated."""
    if counts.sum() != len(out):
        raise ValueError("the output must have one entry per appended token")
    i = 0
    for h in range(len(group)):
        end = starts[h] + counts[h]
        if end > pages.shape[2] * block_size:
            raise ValueError("a member has more tokens than the page table has room for")
        for index in range(starts[h], end):
            block = np.int64(pages[slot, group[h], index // block_size]) * group_size + column[h]
            out[i] = block * block_size + index % block_size
            i += 1


@jit
def decode_slots(
    pages: IntArray,  # [S, N, J]
    group_size: int,
    block_size: int,
    slots: IntArray,  # [R]
    group: IntArray,  # [H]
    column: IntArray,  # [H]
    lengths: IntArray,  # [R, N]
    out: IntArray,  # [R * H]
) -> None:
    """Physical slot of the last token of every (row, member); -1, vLLM's padding slot, where it has none."""
    i = 0
    for r in range(len(slots)):
        for h in range(len(group)):
            index = lengths[r, group[h]] - 1
            if index >= pages.shape[2] * block_size:
                raise ValueError("a member has more tokens than the page table has room for")
            if index < 0:
                out[i] = -1
            else:
                block = np.int64(pages[slots[r], group[h], index // block_size]) * group_size + column[h]
                out[i] = block * block_size + index % block_size
            i += 1
