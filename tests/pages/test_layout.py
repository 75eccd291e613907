# SPDX-License-Identifier: Apache-2.0
"""Sizes of pages, of full KV and of staging."""

from dataclasses import replace

import pytest

from vllm_tangram.pages import PageLayout

LAYOUT = PageLayout(group_size=4, block_size=32, head_dim=64, dtype_size=2, num_groups=23, num_members=90)


def test_page_bytes() -> None:
    assert LAYOUT.page_bytes == 4 * 32 * 128 * 2


def test_ranks_hold_a_page_each() -> None:
    ranks = replace(LAYOUT, num_groups=12, num_members=90, num_ranks=2)
    assert ranks.page_bytes == LAYOUT.page_bytes
    assert [layout.bytes_of(5) for layout in (LAYOUT, ranks)] == [5 * LAYOUT.page_bytes, 10 * LAYOUT.page_bytes]
    assert ranks.full_kv_bytes(33) == LAYOUT.full_kv_bytes(33)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2), (4096, 128)])
def test_full_kv_counts_real_members_and_whole_blocks(tokens: int, blocks: int) -> None:
    assert LAYOUT.full_kv_bytes(tokens) == 90 * blocks * 32 * 128 * 2


@pytest.mark.parametrize(
    ("tokens", "heads", "pages"), [(0, 3, 0), (1, 3, 1), (64, 3, 2), (96, 3, 3), (2048, 3, 48), (32, 8, 2), (33, 1, 1)]
)
def test_staging_pages(tokens: int, heads: int, pages: int) -> None:
    assert LAYOUT.staging_pages(tokens, heads) == pages
