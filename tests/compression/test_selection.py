# SPDX-License-Identifier: Apache-2.0
"""Exact counts, protected tokens and ties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_tangram.compression import places, select_tokens


def expected(scores: Tensor, keep: list[int], head: int, tail: int) -> list[int]:
    """Sort one token at a time, by protection, score (NaN lowest) and position."""
    out = []
    num_tokens = scores.shape[1]
    for row, count in zip(scores.tolist(), keep, strict=True):

        def rank(t: int, row: list[float] = row) -> tuple[bool, bool, float, int]:
            number = not math.isnan(row[t])
            return (t < head or t >= num_tokens - tail, number, row[t] if number else 0.0, t)

        out += sorted(sorted(range(num_tokens), key=rank, reverse=True)[:count])
    return out


@st.composite
def selections(draw: st.DrawFn) -> tuple[Tensor, list[int], int, int]:
    num_heads, num_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    # Few distinct values, so that ties are the rule; every kind of float.
    number = st.sampled_from([0.0, -0.0, 1.0, 1.5, -1.0, -2.5, 1e-45, -1e-45, math.inf, -math.inf, math.nan])
    rows = st.lists(number, min_size=num_tokens, max_size=num_tokens)
    scores = torch.tensor(draw(st.lists(rows, min_size=num_heads, max_size=num_heads)), dtype=torch.float32)
    head, tail = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    keeps = st.integers(min(num_tokens, head + tail), num_tokens)
    return scores, draw(st.lists(keeps, min_size=num_heads, max_size=num_heads)), head, tail


@settings(max_examples=300, deadline=None)
@given(selections())
def test_selection_equals_a_sort_in_plain_python(case: tuple[Tensor, list[int], int, int]) -> None:
    scores, keep, head, tail = case
    before = scores.clone()
    chosen = select_tokens(scores, keep, protect_head=head, protect_tail=tail)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == expected(scores, keep, head, tail)
    torch.testing.assert_close(scores, before, equal_nan=True, rtol=0, atol=0)


@settings(max_examples=300, deadline=None)
@given(selections())
def test_places_are_the_selection_for_every_count(case: tuple[Tensor, list[int], int, int]) -> None:
    scores, keep, head, tail = case
    chosen = select_tokens(scores, keep, protect_head=head, protect_tail=tail)
    mask = places(scores, protect_head=head, protect_tail=tail) < torch.tensor(keep)[:, None]
    assert mask.nonzero()[:, 1].tolist() == chosen.tolist()
    flipped = places(torch.stack([scores, scores.flip(0)]), protect_head=head, protect_tail=tail)[1]
    assert torch.equal(flipped.flip(0) < torch.tensor(keep)[:, None], mask)  # any leading dimensions


@pytest.mark.parametrize("value", [0.0, -3.25, math.nan, math.inf, -math.inf])
def test_constant_scores_keep_exactly_the_latest(value: float) -> None:
    chosen = select_tokens(torch.full((2, 100), value), [10, 30], protect_head=4, protect_tail=2)
    assert chosen.tolist() == [*range(4), *range(94, 100), *range(4), *range(74, 100)]


def test_a_head_may_keep_nothing() -> None:
    scores = torch.arange(6.0).view(2, 3)
    assert select_tokens(scores, [0, 2], protect_head=0, protect_tail=0).tolist() == [1, 2]
    assert select_tokens(scores, [0, 0], protect_head=0, protect_tail=0).tolist() == []


def test_selection_does_not_depend_on_the_other_heads() -> None:
    scores = torch.randn(8, 500, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    keep = [70, 500, 100, 68, 250, 499, 90, 123]
    together = select_tokens(scores, keep, protect_head=4, protect_tail=64).split(keep)
    for head, count in enumerate(keep):
        alone = select_tokens(scores[head : head + 1], [count], protect_head=4, protect_tail=64)
        assert torch.equal(together[head], alone)


@pytest.mark.parametrize("keep", [[5, 11], [5, 2], [5], [5, -1]])
def test_impossible_counts_are_refused(keep: list[int]) -> None:
    with pytest.raises(ValueError, match="keep"):
        select_tokens(torch.zeros(2, 10), keep, protect_head=1, protect_tail=2)
