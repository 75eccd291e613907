# SPDX-License-Identifier: Apache-2.0
"""A layer's prefill chunks around FlashAttention: choose tokens, write them to pages, read what was retained.

A step may hold chunks of several requests. Row p covers tokens ``first[p] .. first[p] + num_tokens[p]`` of the batch.
No function here waits for the device, and what they allocate does not depend on its data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from vllm_tangram.attention import prefill_kernels as kernels
from vllm_tangram.pages.device import DevicePages

#: Tokens that one program of `select` holds in registers; longer chunks are looped over in pieces of the last size.
SELECT_BLOCKS = (1024, 8192)
_TOKENS = 32  # of a program that copies or merges
_PAGES = 256  # of a program that lists pages


@dataclass(frozen=True)
class LayerHeads:
    """Where the KV heads of a layer live.

    Attributes:
        group: ``[H]`` int32 on the device, head group.
        column: ``[H]`` int32 on the device, column in the group's pages.

    """

    group: Tensor
    column: Tensor


@dataclass(frozen=True)
class PrefillRows:
    """The prefill chunks of a step, on the device; made once per step, read by every layer.

    A row whose request is -1 or that has no tokens is skipped. The tensors may be columns of one, which came to the
    device in one copy: all of shape ``[P]`` have one stride, and so have both of shape ``[P, N]``, whose last dimension
    is contiguous.

    Attributes:
        first: ``[P]`` int32, first token of the row in the batch.
        num_tokens: ``[P]`` int32, tokens of its chunk.
        requests: ``[P]`` int32, slot of its request, or -1.
        before: ``[P, N]`` int32, tokens that each group holds of the request before the chunk.
        keep: ``[P, N]`` int32, tokens of the chunk that each group keeps; ``num_tokens`` means all. From the protected
            tokens of the row to ``num_tokens``.
        protect_head: ``[P]`` int32, first tokens of the chunk that are always kept.
        protect_tail: ``[P]`` int32, last tokens of the chunk that are always kept.
        max_tokens: at least the largest ``num_tokens``; sizes grids.

    """

    first: Tensor
    num_tokens: Tensor
    requests: Tensor
    before: Tensor
    keep: Tensor
    protect_head: Tensor
    protect_tail: Tensor
    max_tokens: int

    def __post_init__(self) -> None:
        per_row = (self.first, self.num_tokens, self.requests, self.protect_head, self.protect_tail)
        assert all(tensor.dtype == torch.int32 for tensor in (*per_row, self.before, self.keep))
        if len(self.first) > 1:
            assert len({tensor.stride(0) for tensor in per_row}) == 1
            assert self.before.stride(0) == self.keep.stride(0)
        _check_last_contiguous(self.before, self.keep)

    @property
    def strides(self) -> tuple[int, int]:
        """Numbers from one row to the next in the tensors of shape ``[P]`` and in those of shape ``[P, N]``."""
        return self.first.stride(0), self.before.stride(0)


def sizes_to_compile(most_tokens: int) -> list[int]:
    """Chunk sizes of which each compiles another variant of `select`, for chunks of up to ``most_tokens``."""
    return [size for size in (1, *(block + 1 for block in SELECT_BLOCKS)) if size <= most_tokens]


def select(scores: Tensor, dest: Tensor, *, rows: PrefillRows, heads: LayerHeads) -> None:
    """Choose the tokens that each head keeps: exactly those of `compression.select_tokens`, in one launch.

    Protected tokens come first, then the highest scores; of equal scores the later token wins; NaN is the lowest score
    and -0.0 equals 0.0. Where a group keeps all tokens of a row, the scores of the row are not read. Compiles once
    for ``max_tokens`` up to each of `SELECT_BLOCKS` and once for more: three variants for a warm-up to touch.

    Args:
        scores: ``[H, T]`` float32 over all tokens of the batch, last dimension contiguous.
        dest: ``[H, T]`` int32, written for the tokens of rows only: index of the token in its member after the chunk
            (``before`` + rank by position among the kept), or -1 where it is evicted.
        rows: the chunks.
        heads: groups of the layer's KV heads.

    """
    num_heads, num_rows = len(heads.group), len(rows.first)
    assert scores.dtype == torch.float32
    assert dest.dtype == torch.int32
    assert scores.shape == dest.shape == (num_heads, scores.shape[1])
    _check_last_contiguous(scores, dest)
    block = next((block for block in SELECT_BLOCKS if rows.max_tokens <= block), SELECT_BLOCKS[-1])
    kernels.select_kernel[(num_heads, num_rows)](
        *(scores, dest, rows.first, rows.num_tokens, rows.requests, rows.before, rows.keep),
        *(rows.protect_head, rows.protect_tail, heads.group),
        *(*rows.strides, scores.stride(0), dest.stride(0)),
        BLOCK=block,
        TILED=rows.max_tokens > block,
        num_warps=max(4, block // 512),
    )


def write_tokens(
    key: Tensor,
    value: Tensor,
    dest: Tensor,
    pool: Tensor,
    *,
    rows: PrefillRows,
    flat: Tensor,
    pages: DevicePages,
    heads: LayerHeads,
) -> None:
    """Store the tokens with ``dest >= 0`` to the pages of their members.

    Args:
        key: ``[T, H, D]`` over all tokens of the batch, last dimension contiguous.
        value: ``[T, H, D]``, likewise.
        dest: ``[H, T]`` int32, from `select`.
        pool: ``[num_pages, G, B, 2 * D]`` contiguous, of the type of the keys.
        rows: the chunks.
        flat: ``[S, W]`` int32, vLLM's block table.
        pages: what finds pages in it.
        heads: groups and columns of the layer's KV heads.

    """
    num_tokens, num_heads, head_dim = key.shape
    _, group_size, block_size, width = pool.shape
    assert value.shape == key.shape
    assert dest.shape == (num_heads, num_tokens)
    assert (block_size, width) == (pages.block_size, 2 * head_dim)
    assert pool.dtype == key.dtype == value.dtype
    assert pool.is_contiguous()
    _check_last_contiguous(key, value, dest, flat)
    kernels.write_kernel[(triton.cdiv(rows.max_tokens, _TOKENS), num_heads, len(rows.first))](
        *(key, value, dest, pool, flat, pages.rows, pages.positions),
        *(rows.first, rows.num_tokens, rows.requests, heads.group, heads.column),
        *(rows.strides[0], *key.stride()[:2], *value.stride()[:2], dest.stride(0)),
        *(flat.stride(0), pages.positions.shape[2], pages.num_groups),
        G=group_size,
        PAGE=block_size,
        D=head_dim,
        D_PADDED=triton.next_power_of_2(head_dim),
        TOKENS=_TOKENS,
    )


def retained_blocks(
    out: Tensor,
    lengths: Tensor,
    *,
    rows: PrefillRows,
    flat: Tensor,
    pages: DevicePages,
    heads: LayerHeads,
    group_size: int,
) -> None:
    """Block table of a paged kernel over what each row retained, the pool seen as ``num_pages * G`` blocks of one head.

    Sequence ``h * P + p`` is head h of row p.

    Args:
        out: ``[H * P, J']`` int32, last dimension contiguous: ``page * G + column`` of the first
            ``ceil(before / block_size)`` pages, then 0.
        lengths: ``[H * P]`` int32 contiguous: ``before``.
        rows: the chunks; a skipped row gives zeros.
        flat: ``[S, W]`` int32, vLLM's block table.
        pages: what finds pages in it.
        heads: groups and columns of the KV heads of a layer, or of several one after another.
        group_size: columns of a page, G.

    """
    num_heads, num_rows = len(heads.group), len(rows.first)
    assert out.dtype == lengths.dtype == torch.int32
    assert len(out) == len(lengths) == num_heads * num_rows
    assert lengths.is_contiguous()
    _check_last_contiguous(out, flat)
    kernels.retained_blocks_kernel[(num_heads, triton.cdiv(out.shape[1], _PAGES), num_rows)](
        *(out, lengths, flat, pages.rows, pages.positions, rows.requests, rows.before, heads.group, heads.column),
        *(*rows.strides, out.stride(0), out.shape[1]),
        *(flat.stride(0), pages.positions.shape[2], pages.num_groups),
        G=group_size,
        PAGE=pages.block_size,
        PAGES=_PAGES,
    )


def merge_retained(
    output: Tensor,
    lse: Tensor,
    retained: Tensor,
    retained_lse: Tensor,
    first: int,
    *,
    rows: PrefillRows,
    heads: LayerHeads,
) -> None:
    """Join attention over chunks with attention over what their rows retained before, in place.

    Both are softmax averages; each weighs as much as the exponentials that it sums (natural logarithm of the sum: lse).
    Of heads that hold nothing before a chunk, ``retained`` and ``retained_lse`` are not read and the output stays.

    Args:
        output: ``[T, Hq, D]`` of the batch's tokens from ``first`` on, last dimension contiguous: attention over each
            one's chunk; overwritten.
        lse: ``[Hq, T]`` float32, of the chunks, last dimension contiguous.
        retained: ``[H, T, q, D]`` contiguous: attention over the retained tokens.
        retained_lse: ``[q, H * T]`` float32 contiguous; column ``h * T + t``.
        first: token of the batch that all these begin with.
        rows: the chunks.
        heads: groups of the layer's KV heads.

    """
    num_heads, num_tokens, ratio, head_dim = retained.shape
    assert output.shape == (num_tokens, num_heads * ratio, head_dim)
    assert lse.shape == (num_heads * ratio, num_tokens)
    assert retained_lse.shape == (ratio, num_heads * num_tokens)
    assert lse.dtype == retained_lse.dtype == torch.float32
    assert retained.is_contiguous()
    assert retained_lse.is_contiguous()
    _check_last_contiguous(output, lse)
    kernels.merge_kernel[(triton.cdiv(rows.max_tokens, _TOKENS), num_heads * ratio, len(rows.first))](
        *(output, lse, retained, retained_lse),
        *(rows.first, rows.num_tokens, rows.requests, rows.before, heads.group),
        *(first, *rows.strides, num_tokens, num_heads),
        *(*output.stride()[:2], lse.stride(0)),
        RATIO=ratio,
        D=head_dim,
        D_PADDED=triton.next_power_of_2(head_dim),
        TOKENS=_TOKENS,
    )


def _check_last_contiguous(*tensors: Tensor) -> None:
    assert all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)
