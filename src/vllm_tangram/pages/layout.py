# SPDX-License-Identifier: Apache-2.0
"""Sizes of the page pool ``[num_pages, G, block_size, 2 * head_dim]``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageLayout:
    """Shape of one page and of the model that it serves.

    Attributes:
        group_size: members per page, G.
        block_size: tokens per page.
        head_dim: width of one key, and of one value.
        dtype_size: bytes per number.
        num_groups: head groups of the model, N.
        num_members: KV heads over all layers, M; ``N * G >= M``, the difference is padding.

    """

    group_size: int
    block_size: int
    head_dim: int
    dtype_size: int
    num_groups: int
    num_members: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of ``block_size`` tokens of G members."""
        return self.group_size * self._member_block_bytes

    def full_kv_bytes(self, num_tokens: int) -> int:
        """Bytes that stock vLLM holds for one sequence: every member, whole blocks."""
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
