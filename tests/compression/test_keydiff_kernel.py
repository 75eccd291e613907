# SPDX-License-Identifier: Apache-2.0
"""KeyDiff's kernel against its scores by torch and in float64; without a GPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from vllm_tangram.compression import ChunkContext
from vllm_tangram.compression.keydiff_kernel import keydiff_scores
from vllm_tangram.compression.scorers.keydiff import KeyDiff

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.bfloat16, torch.float16, torch.float32]
ALONE = ChunkContext(sinks=0, window=0, scale=1.0, start=0)


def random_keys(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[T, H, d] of all sizes about a direction of each head, in rows that hold queries and values, too."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * torch.randn(4 * num_heads, head_dim, generator=generator)
    rows = rows + torch.randn(num_tokens, 4 * num_heads, head_dim, generator=generator)
    rows *= 0.05 + 10 * torch.rand(num_tokens, 1, 1, generator=generator)
    return rows.to(DEVICE, dtype)[:, 2 * num_heads : 3 * num_heads]


def scored(key: Tensor, first: list[int], num_tokens: list[int]) -> Tensor:
    """By the kernel; NaN where it wrote nothing. What tells the chunks are columns of one table."""
    table = torch.tensor([first, num_tokens, [-1] * len(first)], dtype=torch.int32, device=DEVICE).T.contiguous()
    scores = torch.full((key.shape[1], len(key)), float("nan"), device=DEVICE)
    keydiff_scores(key, scores, table[:, 0], table[:, 1])
    return scores


def in_float64(key: Tensor) -> Tensor:
    directions = key.double() / key.double().norm(dim=-1, keepdim=True)
    return -torch.cosine_similarity(directions, directions.mean(0, keepdim=True), dim=-1).T


def check(key: Tensor, first: list[int], num_tokens: list[int]) -> None:
    scores = scored(key, first, num_tokens)
    outside = torch.ones(len(key), dtype=torch.bool, device=DEVICE)
    for start, n in zip(first, num_tokens, strict=True):
        tokens = slice(start, start + n)
        outside[tokens] = False
        if n:
            torch.testing.assert_close(
                scores[:, tokens], KeyDiff().score(key[tokens], key[tokens], key[tokens], ALONE), rtol=0, atol=2e-6
            )
            torch.testing.assert_close(scores[:, tokens].double(), in_float64(key[tokens]), rtol=0, atol=1e-6)
    assert scores[:, outside].isnan().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("lengths", [(1,), (17,), (1024,), (17, 1024, 1, 1500)], ids=str)
def test_scores_are_those_of_torch(lengths: tuple[int, ...], head_dim: int, dtype: torch.dtype) -> None:
    """Of chunks one after another, behind decoded tokens and before padding."""
    first = [3 + sum(lengths[:row]) for row in range(len(lengths))]
    check(random_keys(3 + sum(lengths) + 5, 2, head_dim, dtype), first, list(lengths))


def test_a_long_chunk() -> None:
    check(random_keys(8192, 1, 128, torch.bfloat16), [0], [8192])


@settings(max_examples=25)
@given(data=st.data(), dtype=st.sampled_from(TYPES), head_dim=st.sampled_from([8, 16, 80]))
def test_chunks_anywhere(data: st.DataObject, dtype: torch.dtype, head_dim: int) -> None:
    """With gaps between them, in any order, and rows without tokens."""
    pieces = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 600)), min_size=1, max_size=5))
    rows, end = [], 0
    for gap, n in pieces:
        rows.append((end + gap, n))
        end += gap + n
    rows = data.draw(st.permutations(rows))
    key = random_keys(end + 2, data.draw(st.integers(1, 3)), head_dim, dtype, seed=data.draw(st.integers(0, 2**31)))
    check(key, [start for start, _ in rows], [n for _, n in rows])


def test_chunks_of_the_same_step_change_nothing() -> None:
    """Bit for bit, though fewer programs share what each chunk takes."""
    key = random_keys(3000, 4, 128, torch.bfloat16)
    together = scored(key, [0, 700, 2300], [700, 1600, 700])
    assert torch.equal(scored(key, [700], [1600])[:, 700:2300], together[:, 700:2300])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_keys_of_zeros_score_zero(dtype: torch.dtype) -> None:
    key = random_keys(40, 2, 64, dtype)
    key[:20] = 0
    key[25] = 0
    scores = scored(key, [0, 20], [20, 20])
    assert (scores[:, :20] == 0).all()
    assert (scores[:, 25] == 0).all()
    expected = KeyDiff().score(key[20:], key[20:], key[20:], ALONE)
    torch.testing.assert_close(scores[:, 20:], expected, rtol=0, atol=2e-6)


def test_where_a_scorer_has_no_kernel() -> None:
    key, scores = torch.ones(3, 2, 8), torch.zeros(2, 3)
    first, num_tokens = torch.zeros(1, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
    assert not KeyDiff().score_rows(key, scores, first, num_tokens)  # not on a GPU
    assert (scores == 0).all()
