# SPDX-License-Identifier: Apache-2.0
"""Into how many pieces the decode attention of each head is cut, planned before the first request (paper, Algorithm 1).

Heads of a layer hold different fractions of the context, so equal cuts leave multiprocessors waiting for the longest
head. The budgets say beforehand how lengths relate, so the map is made once per layer and batch size; at run time a
kernel only divides each request's own length by it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from vllm_tangram.errors import TangramError

#: Numbers of a work item: head, piece, pieces of the head, slots of the heads before it, group, column, slots of the
#: head, and 1 where a part of a piece counts as a whole one.
WORK_ITEM = 8
#: Pieces per request and head below which whole numbers of them fit lengths badly.
_FEW_PIECES = 6
_MOST_WAVES = 2.0


def default_waves(num_rows: int, num_heads: int, resident: int) -> float:
    """Thread blocks of a layer as a multiple of those that run at once.

    One wave, in which all pieces start and end together, if that leaves enough pieces to follow the lengths of
    requests; else two, in which short pieces even out what is left. Measured on an H200: docs/performance.md.
    """
    return 1.0 if resident >= _FEW_PIECES * num_rows * num_heads else _MOST_WAVES


def split_map(shares: ArrayLike, num_rows: int, resident: int, waves: float) -> NDArray[np.int32]:
    """Cut every layer into pieces so that its longest piece is as short as the number of thread blocks allows.

    Args:
        shares: ``[L, H]``, fraction of a long context that each member is expected to hold; only the ratios
            within a layer matter.
        num_rows: requests of the batch, each of which is cut alike.
        resident: thread blocks that the device runs at once.
        waves: thread blocks wanted, as a multiple of ``resident``.

    Returns:
        ``[L, H]`` int32, at least 1; ``num_rows`` times the sum of a layer stays within ``waves * resident`` unless
        one piece per head already exceeds it. Equal shares of a layer get equal pieces, so all members of a group do.

    Raises:
        ValueError: a share is negative or not finite, or a count is not positive.

    """
    fractions = np.asarray(shares, np.float64)
    if fractions.ndim != 2 or not np.isfinite(fractions).all() or (fractions < 0).any():
        raise ValueError("shares must be [layers, heads], finite and not negative")
    if num_rows < 1 or resident < 1 or not waves > 0:
        raise ValueError(f"cannot plan {num_rows} rows on {resident} thread blocks in {waves} waves")
    num_heads = fractions.shape[1]
    spare = max(0, int(waves * resident / num_rows) - num_heads)  # pieces beyond one per head
    # With k pieces a head's piece is share / k long. Cutting the longest piece again and again cuts, in that order, at
    # the largest of these numbers; the first one not cut any more is the length of the longest piece left.
    lengths = fractions[:, :, None] / np.arange(1, spare + 2)
    descending = np.sort(lengths.reshape(len(fractions), -1), axis=1)[:, ::-1]
    longest = descending[:, spare]
    return (1 + (lengths > longest[:, None, None]).sum(axis=2)).astype(np.int32)


def work_list(
    pieces: ArrayLike,
    shares: ArrayLike,
    group: ArrayLike,
    column: ArrayLike,
    *,
    num_rows: int,
    round_up: bool = False,
) -> NDArray[np.int32]:
    """Thread blocks of one layer and one request, those with the longest pieces first.

    In a batch every head has half as many slots more than pieces, so that the kernel can cut a request further that is
    longer than the mean; what a shorter one leaves unused ends at once. The device starts thread blocks in order, so
    what starts last, and may end alone, is short; the slots that only longer requests use come after all others.

    Args:
        pieces: ``[H]``, the layer's row of the split map: of a request of mean length.
        shares: ``[H]``, the layer's row of the shares.
        group: ``[H]``, head group of each head.
        column: ``[H]``, column of each head in the pages of its group.
        num_rows: requests of the batch; a single one is its own mean.
        round_up: whether a request that would get a part of a piece gets a whole one, or none.

    Returns:
        ``[W, 8]`` int32 (`WORK_ITEM`), W the sum of the slots.

    """
    count, fractions = np.asarray(pieces, np.int32), np.asarray(shares, np.float64)
    slots = count if num_rows == 1 else count + (count + round_up) // 2
    head = np.repeat(np.arange(len(count)), slots)
    piece = np.concatenate([np.arange(n) for n in slots])
    order = np.lexsort((piece, -(fractions / count)[head], piece >= count[head]))
    head = head[order]
    work = np.zeros((len(head), WORK_ITEM), np.int32)
    work[:, 0], work[:, 1], work[:, 7] = head, piece[order], round_up
    before = np.cumsum(slots) - slots
    for place, values in enumerate((count, before, np.asarray(group), np.asarray(column), slots), start=2):
        work[:, place] = values[head]
    return work


def plan_work(
    shares: ArrayLike, groups: ArrayLike, columns: ArrayLike, num_rows: int, resident: int
) -> list[NDArray[np.int32]]:
    """Work lists of all layers for one batch size: `split_map` in as many waves as suit it.

    Args:
        shares: ``[L, H]``, fraction of a long context that each member is expected to hold.
        groups: ``[L, H]``, head group of each member.
        columns: ``[L, H]``, column of each member in the pages of its group.
        num_rows: requests of the batch.
        resident: thread blocks that the device runs at once.

    """
    waves = default_waves(num_rows, np.shape(shares)[1], resident)
    pieces = split_map(shares, num_rows, resident, waves)
    return [
        # In one wave there must not be more pieces than run at once; in two, more and shorter ones balance better.
        work_list(*layer, num_rows=num_rows, round_up=waves > 1)
        for layer in zip(pieces, np.asarray(shares), np.asarray(groups), np.asarray(columns), strict=True)
    ]


def resident_blocks(kernel: Any, device: torch.device) -> int:
    """Thread blocks of a compiled Triton kernel that run on ``device`` at once, asked of the CUDA driver.

    Args:
        kernel: what launching or warming up a Triton kernel returns; its device must be the current one.
        device: a CUDA device.

    Raises:
        TangramError: the driver cannot be loaded, refuses, or says that not even one block fits.

    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TangramError(f"the CUDA driver library cannot be loaded: {error}") from error
    kernel._init_handles()  # loads the code onto the device if nothing has yet
    blocks = ctypes.c_int()
    code = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks),
        ctypes.c_void_p(kernel.function),
        ctypes.c_int(kernel.metadata.num_warps * 32),
        ctypes.c_size_t(kernel.metadata.shared),
    )
    if code or blocks.value < 1:
        raise TangramError(
            f"the CUDA driver cannot tell how many blocks of {kernel.metadata.num_warps} warps and "
            f"{kernel.metadata.shared} bytes of shared memory fit a multiprocessor "
            f"(cuOccupancyMaxActiveBlocksPerMultiprocessor: error {code}, {blocks.value} blocks)"
        )
    return blocks.value * torch.cuda.get_device_properties(device).multi_processor_count
