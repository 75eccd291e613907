# SPDX-License-Identifier: Apache-2.0
"""The global budget: exact totals, protection, ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_tangram.compression import compete

RETENTIONS = [0.0, 0.1, 0.25, 0.5, 0.77, 1.0]


def expected(scores: Tensor, retention: float, head: int, tail: int) -> list[list[int]]:
    """Sort all candidates of all members in plain Python."""
    num_layers, num_heads, num_tokens = scores.shape
    candidates = [
        (t < head or t >= num_tokens - tail, float(scores[layer, h, t]), t, -layer * num_heads - h, layer, h)
        for layer in range(num_layers)
        for h in range(num_heads)
        for t in range(num_tokens)
    ]
    protected = sum(candidate[0] for candidate in candidates)
    # A protected token's own score says nothing.
    candidates = [(p, 0.0 if p else s, *rest) for p, s, *rest in candidates]
    counts = [[0] * num_heads for _ in range(num_layers)]
    for *_, layer, h in sorted(candidates, reverse=True)[: max(protected, round(retention * len(candidates)))]:
        counts[layer][h] += 1
    return counts


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(0, 4), st.integers(0, 4), st.integers())
def test_competition_equals_a_sort_in_plain_python(
    num_layers: int, num_heads: int, num_tokens: int, head: int, tail: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    scores = torch.randn(num_layers, num_heads, num_tokens, generator=generator).round(decimals=0)  # many ties
    counts = compete(scores, RETENTIONS, protect_head=head, protect_tail=tail)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [expected(scores, x, head, tail) for x in RETENTIONS]
    protected = min(num_tokens, head + tail)
    assert counts.min() >= protected
    assert counts.sum(dim=(1, 2)).tolist() == [
        max(protected * num_layers * num_heads, round(x * scores.numel())) for x in RETENTIONS
    ]


def test_a_member_with_higher_scores_keeps_more() -> None:
    scores = torch.randn(2, 2, 400, generator=torch.Generator().manual_seed(0))
    scores[1, 0] += 1
    scores[0, 1] -= 1
    counts = compete(scores, [0.3], protect_head=4, protect_tail=16)[0]
    assert counts[1, 0] > max(counts[0, 0], counts[1, 1])
    assert counts[0, 1] < min(counts[0, 0], counts[1, 1])


@pytest.mark.parametrize("retention", [0.111, 0.25, 0.5, 0.999])
def test_scores_of_position_alone_treat_all_members_alike(retention: float) -> None:
    scores = torch.arange(301.0).expand(5, 3, 301)
    counts = compete(scores, [retention], protect_head=4, protect_tail=16)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("retention", [-0.1, 1.5, float("nan")])
def test_retention_out_of_range_is_refused(retention: float) -> None:
    with pytest.raises(ValueError, match="retentions"):
        compete(torch.zeros(1, 1, 4), [retention], protect_head=0, protect_tail=0)
