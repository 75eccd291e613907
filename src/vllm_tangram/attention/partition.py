# SPDX-License-Identifier: Apache-2.0
"""Which part of which head every thread block of a decode step attends to (paper, Algorithm 1, made exact).

Heads hold different fractions of the context and requests differ in length, so equal cuts leave multiprocessors waiting
for the longest head. The paper plans pieces per head from the budgets alone, for requests of equal length. But what a
head holds is a sum (docs/design.md, "The invariant"), so one small kernel per step can give every thread block of every
layer the same number of tiles:

    segment   one KV head of one row of the batch: its tiles, at least one
    share     a run of tiles of all segments, one after the other; block c takes tiles [c * n, (c + 1) * n), where the
              beginning of a segment counts as some tiles of its own, because it takes as long
    piece     the part of a segment that lies in one share

Shares begin and end anywhere, so at most two pieces of a block are not whole segments. Nothing is planned on the host
and nothing depends on what the batch looked like before.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_tangram.attention.partition_kernel import plan_kernel
from vllm_tangram.errors import TangramError
from vllm_tangram.pages.device import ROW_HEADER

if TYPE_CHECKING:
    from vllm_tangram.attention.decode import DecodeBatch

#: Numbers of a segment: first tile, old tokens, slot, kept blocks, tail, table, group, column, first block, pieces, the
#: page of the new token, that of the first tile and where that of the second was born (`pages.device.page_ids`). The
#: last two serve where a tile lies in one page; else the decode kernel looks for itself.
SEGMENT = 13
PIECES = 9  #: which of them says into how many pieces a segment is cut
AHEAD = 11  #: which of them begin to be about tiles instead of the segment
#: Numbers of a share: first segment, the one after the last, first tile, the one after the last, then the first segment
#: once more, but with the pages of the share's own first tiles: what a block needs first comes in one load.
SHARE = 4 + SEGMENT
_CHUNK = 1024  # segments that the kernel takes in at once
_MIN_TILES = 2  # of a share: shorter ones cost more to combine than they save
_SWITCH_TILES = 1  # as which the beginning of a segment counts


class SplitPlan:
    """Shares of all layers, written anew in every step; addresses never change, so graphs may hold them.

    Attributes:
        members: ``[L, H, 2]`` int32, group and column of each KV head.
        segments: ``[L, S, 13]`` int32 (`SEGMENT`), S the most rows times H.
        shares: ``[L, C, 17]`` int32 (`SHARE`).
        tile: tokens of a tile.
        num_rows: rows of the batch that was planned last.

    """

    def __init__(
        self,
        members: Tensor,
        max_rows: int,
        num_blocks: int,
        tile: int,
        *,
        min_tiles: int = _MIN_TILES,
        switch_tiles: int = _SWITCH_TILES,
        even: bool = False,
    ) -> None:
        """Plan for batches of up to ``max_rows`` rows.

        Args:
            members: ``[L, H, 2]`` int32 on the device, group and column of each KV head.
            max_rows: most rows.
            num_blocks: thread blocks of a layer: those that the device runs at once (`resident_blocks`).
            tile: tokens of a tile.
            min_tiles: tiles of a share, at least.
            switch_tiles: tiles as which the beginning of a segment counts.
            even: cut every head into as many pieces, however long it is; for measurements.

        """
        layers, heads, _ = members.shape
        device = members.device
        most = max(num_blocks, max_rows * heads) if even else num_blocks
        self.members = members
        self.segments = torch.zeros(layers, max_rows * heads, SEGMENT, dtype=torch.int32, device=device)
        self.shares = torch.zeros(layers, most, SHARE, dtype=torch.int32, device=device)
        self.tile = tile
        self.num_rows = 0
        self._num_blocks = num_blocks
        self._min_tiles = min_tiles
        self._switch_tiles = switch_tiles
        self._even = even

    @property
    def num_blocks(self) -> int:
        """Thread blocks of a layer for the batch that was planned last, C."""
        return max(self._num_blocks, self.num_rows * self.members.shape[1]) if self._even else self._num_blocks

    def make(self, batch: DecodeBatch) -> None:
        """Plan one step, for all layers; queued on the current stream.

        Raises:
            ValueError: more rows than there is room for.

        """
        num_layers, num_heads, _ = self.members.shape
        self.num_rows = len(batch.requests)
        if self.num_rows * num_heads > self.segments.shape[1]:
            raise ValueError(f"{self.num_rows} rows, but room for {self.segments.shape[1] // num_heads}")
        pages = batch.pages
        plan_kernel[(num_layers,)](
            *(batch.requests, batch.seq_lens, pages.rows, batch.flat, pages.positions),
            *(self.members, self.segments, self.shares),
            *(self.num_rows, num_heads, self.num_blocks, pages.num_groups),
            *(pages.rows.stride(0), batch.flat.stride(0), *pages.positions.stride()[:2]),
            *(self.segments.stride(0), self.shares.stride(0)),
            EVEN=self._even,
            ROW_HEADER=ROW_HEADER,
            SEGMENT=SEGMENT,
            SHARE=SHARE,
            AHEAD=AHEAD,
            BLOCK=pages.block_size,
            TILE=self.tile,
            MIN_TILES=self._min_tiles,
            SWITCH=self._switch_tiles,
            CHUNK=_CHUNK,
            LOG=self.segments.shape[1].bit_length(),
            num_warps=8,
        )


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
