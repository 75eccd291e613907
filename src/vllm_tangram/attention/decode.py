# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one layer over pages of head groups, read in place, in one kernel that also writes the new token.

Words: R rows of the batch, H KV heads, Hq query heads, q query heads of a KV head, D head size, B tokens of a block,
S request slots, C thread blocks of a layer (`SplitPlan`). Nothing here waits for the device, and all sizes are known on
the host, so calls can be captured in CUDA graphs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from vllm_tangram.attention.decode_kernel import QUERY_ROWS, decode_kernel
from vllm_tangram.attention.partition import SEGMENT, SHARE, SplitPlan
from vllm_tangram.pages.device import DevicePages

_TILE_BYTES = 32 * 1024  # keys and values of a tile


@dataclass(frozen=True)
class DecodeBatch:
    """Who decodes in a step; the same for all layers.

    Attributes:
        requests: ``[R]`` int32, slot of each row's request; -1 where there is none.
        seq_lens: ``[R]`` int32, tokens of each request, the new one included; 0 where there is none.
        flat: ``[S, W']`` int32, vLLM's page list of every slot, which must already hold the new token's pages.
        pages: what finds pages in ``flat``. Every request must be at or past the end of its prompt.

    """

    requests: Tensor
    seq_lens: Tensor
    flat: Tensor
    pages: DevicePages


@dataclass(frozen=True)
class Tuning:
    """How the kernel is built; results agree up to rounding.

    Attributes:
        tile: tokens taken in at once, a power of two from 16.
        warps: warps of a thread block.
        stages: tiles under way, the one being worked on included.
        fan: pieces that a block combines at once, a power of two from 2.

    """

    tile: int
    warps: int = 4
    stages: int = 3
    fan: int = 8

    @classmethod
    def default(cls, head_dim: int, dtype: torch.dtype) -> Tuning:
        """Tiles of at most 64 tokens and 32 KiB."""
        fitting = _TILE_BYTES // (2 * triton.next_power_of_2(head_dim) * dtype.itemsize)
        return cls(tile=max(16, min(64, fitting)))

    def constants(self, num_heads: int, ratio: int, head_dim: int, block_size: int) -> dict[str, int]:
        """What the kernel is compiled for, by the names of its parameters."""
        return {
            "SEGMENT": SEGMENT,
            "SHARE": SHARE,
            "HEADS": num_heads,
            "RATIO": ratio,
            "RATIO_PADDED": triton.next_power_of_2(ratio),
            "D": head_dim,
            "D_PADDED": triton.next_power_of_2(head_dim),
            "BLOCK": block_size,
            "TILE": self.tile,
            "FAN": self.fan,
        }


class SplitScratch:
    """Partial results of pieces, shared by all layers of a stream: two places for each thread block.

    Attributes:
        partial: ``[2 * C, q, D]`` float32, the attention over one piece.
        log_sums: ``[2 * C, q]`` float32, base-2 logarithm of the sum of exponentials over one piece.
        arrived: ``[2 * C]`` int32, pieces done so far, at the place of one of them; zero between launches.

    """

    def __init__(self, num_blocks: int, ratio: int, head_dim: int, device: torch.device) -> None:
        """Room for the pieces of ``num_blocks`` thread blocks."""
        self.partial = torch.empty(2 * num_blocks, ratio, head_dim, dtype=torch.float32, device=device)
        self.log_sums = torch.empty(2 * num_blocks, ratio, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(2 * num_blocks, dtype=torch.int32, device=device)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    output: Tensor,
    *,
    batch: DecodeBatch,
    plan: SplitPlan,
    layer: int,
    scratch: SplitScratch,
    scale: float,
    tuning: Tuning | None = None,
) -> Any:
    """Attend from one new token per row to what each KV head holds, and write the new token to its page.

    Args:
        query: ``[R, Hq, D]``; query heads of one KV head are neighbours. Only the last dimension must be contiguous.
        key: ``[R, H, D]``, of the new token; as ``query``.
        value: ``[R, H, D]``; as ``query``.
        pool: ``[num_pages, G, B, 2 * D]``, contiguous, of the dtype of ``query``; the new token is written to it.
        output: ``[R, Hq, D]``, written; zeros in rows without a request.
        batch: who decodes.
        plan: of this very batch (`SplitPlan.make`).
        layer: which of the plan's layers this is.
        scratch: room for as many thread blocks as the plan has.
        scale: factor of the logits.
        tuning: None for the default.

    Returns:
        The compiled kernel, which `resident_blocks` takes; None in Triton's interpreter.

    Raises:
        ValueError: shapes, strides or sizes that the kernel cannot take.

    """
    num_rows, num_query_heads, head_dim = query.shape
    num_heads, block_size = key.shape[1], pool.shape[2]
    ratio = num_query_heads // num_heads
    tuning = tuning or Tuning.default(head_dim, pool.dtype)
    if num_query_heads % num_heads or not 1 <= ratio <= QUERY_ROWS.value:
        raise ValueError(
            f"{num_query_heads} query heads on {num_heads} KV heads: the ratio must be 1 to {QUERY_ROWS.value}"
        )
    if pool.shape[3] != 2 * head_dim or not pool.is_contiguous() or block_size != batch.pages.block_size:
        raise ValueError(
            f"pool {tuple(pool.shape)} does not fit head size {head_dim} and blocks of {batch.pages.block_size}"
        )
    if block_size & (block_size - 1):
        raise ValueError(f"blocks of {block_size} tokens: the kernel needs a power of two")
    if any(tensor.stride(2) != 1 for tensor in (query, key, value, output)):
        raise ValueError("the last dimension of query, key, value and output must be contiguous")
    if 2 * plan.num_blocks > len(scratch.arrived) or scratch.partial.shape[1:] != (ratio, head_dim):
        raise ValueError(f"no scratch for {plan.num_blocks} thread blocks with pieces of {ratio} x {head_dim}")
    if plan.num_rows != num_rows or plan.members.shape[1] != num_heads:
        raise ValueError(
            f"the plan is for {plan.num_rows} rows of {plan.members.shape[1]} heads, not {num_rows} of {num_heads}"
        )
    if plan.tile != tuning.tile:
        raise ValueError(f"the plan counts tiles of {plan.tile} tokens, the kernel of {tuning.tile}")
    pages = batch.pages
    return decode_kernel[(plan.num_blocks,)](
        *(query, key, value, pool, output, batch.flat, pages.positions),
        *(plan.segments[layer], plan.shares[layer], scratch.partial, scratch.log_sums, scratch.arrived),
        scale * math.log2(math.e),
        *(stride for tensor in (query, key, value, output) for stride in tensor.stride()[:2]),
        *(pool.stride(0), batch.flat.stride(0), *pages.positions.stride()[:2], pages.num_groups),
        **tuning.constants(num_heads, ratio, head_dim, block_size),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
