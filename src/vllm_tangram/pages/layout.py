# SPDX-License-Identifier: Apache-2.0
"""Sizes of the page pool ``[num_pages, G, block_size, 2 * head_dim]``, of which every rank has one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageLayout:
    """Shape of one page and of the model that it serves.

    Attributes:
        group_size: members per page of a rank, G.
        block_size: tokens per page.
        head_dim: width of one key, and of one value.
        dtype_size: bytes per number.
        num_groups: head groups, N, on every rank.
        num_members: KV heads over all layers and ranks, M; ``N * G * num_ranks >= M``, the difference is padding.
        num_ranks: ranks; a page has the same id on all of them.

    """

    group_size: int
    block_size: int
    head_dim: int
    dtype_size: int
    num_groups: int
    num_members: int
    num_ranks: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one rank: keys and values of ``block_size`` tokens of G members."""
        return self.group_size * self._member_block_bytes

    def bytes_of(self, num_pages: int) -> int:
        """Bytes of pages on all ranks together."""
        return num_pages * self.num_ranks * self.page_bytes

    def full_kv_bytes(self, num_tokens: int) -> int:
        """Bytes that stock vLLM holds for one sequence on all ranks together: every member, whole blocks."""
        return self.num_members * -(-num_tokens // self.block_size) * self._member_block_bytes

    def staging_pages(self, num_tokens: int, num_kv_heads: int) -> int:
        """Pages that hold ``num_tokens`` tokens of one sequence for ``num_kv_heads`` heads of one layer.

        Members are laid out block by block across page boundaries, so only the last page can be partly used.
        Sequences do not share blocks: the caller sums over sequences.
        """
        return -(-(-(-num_tokens // self.block_size) * num_kv_heads) // self.group_size)

    @property
    def _member_block_bytes(self) -> int:
        return self.block_size * 2 * self.head_dim * self.dtype_size
