# SPDX-License-Identifier: Apache-2.0
"""How a step's tokens of a request are cut into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm_tangram.engine.chunk import Chunk


@given(
    first=st.integers(0, 50),
    whole=st.integers(0, 9),
    num_tokens=st.integers(1, 400),
    prompt_len=st.integers(1, 600),
    chunk_size=st.sampled_from([32, 64, 96]),
)
def test_pieces_are_whole_chunks(first: int, whole: int, num_tokens: int, prompt_len: int, chunk_size: int) -> None:
    position = min(whole * chunk_size, prompt_len - 1) // chunk_size * chunk_size
    num_tokens = min(num_tokens, prompt_len - position)
    pieces = list(Chunk.split(first, num_tokens, position, 3, prompt_len=prompt_len, chunk_size=chunk_size))
    assert [token for piece in pieces for token in range(prompt_len + 50)[piece.tokens]] == list(
        range(first, first + num_tokens)
    )
    for piece in pieces:
        assert piece.first - first == piece.position - position
        assert piece.position % chunk_size == 0
        assert piece.num_tokens == chunk_size or piece is pieces[-1]
        assert 0 < piece.num_tokens <= chunk_size
        assert piece.request == 3


def test_replayed_tokens_are_one_piece() -> None:
    (piece,) = Chunk.split(5, 300, 130, 0, prompt_len=130, chunk_size=64)
    assert piece == Chunk(first=5, num_tokens=300, position=130, request=0)
