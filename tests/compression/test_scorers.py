# SPDX-License-Identifier: Apache-2.0
"""Every scorer against a loop in float64 written from its formula, and one matrix of what all scorers must do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_tangram.compression import ChunkContext, get_scorer, scorer_names
from vllm_tangram.errors import TangramError

NUM_HEADS = 2
Reference = Callable[[Tensor, Tensor, ChunkContext], Tensor]


def chunk(num_tokens: int, group: int, head_dim: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, ChunkContext]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_tokens, NUM_HEADS * group, head_dim, generator=generator)
    key = torch.randn(num_tokens, NUM_HEADS, head_dim, generator=generator) + 0.3
    value = torch.randn(num_tokens, NUM_HEADS, head_dim, generator=generator)
    return query, key, value, ChunkContext(sinks=4, window=64, scale=head_dim**-0.5, start=2048)


def streaming(query: Tensor, key: Tensor, context: ChunkContext) -> Tensor:
    return torch.tensor([[context.start + t for t in range(len(key))]] * key.shape[1]).double()


def knorm(query: Tensor, key: Tensor, context: ChunkContext) -> Tensor:
    norms = torch.tensor([[math.hypot(*key[t, h].tolist()) for t in range(len(key))] for h in range(key.shape[1])])
    return -norms / (norms.sum(1, keepdim=True) / len(key))


def keydiff(query: Tensor, key: Tensor, context: ChunkContext) -> Tensor:
    out = torch.zeros(key.shape[1], len(key), dtype=torch.float64)
    for h in range(key.shape[1]):
        mean = sum(key[t, h] / key[t, h].norm() for t in range(len(key))) / len(key)
        for t in range(len(key)):
            out[h, t] = -(key[t, h] @ mean) / (key[t, h].norm() * mean.norm())
    return out


def snapkv(query: Tensor, key: Tensor, context: ChunkContext) -> Tensor:
    num_tokens, num_heads = key.shape[:2]
    group = query.shape[1] // num_heads
    past = max(0, num_tokens - context.window)
    attention = torch.zeros(num_heads, past, dtype=torch.float64)
    for h in range(num_heads):
        rows = []
        for i in range(past, num_tokens):
            for query_head in range(h * group, (h + 1) * group):
                logits = context.scale * (key[: i + 1, h] @ query[i, query_head])
                rows.append(logits.softmax(0)[:past])
        attention[h] = torch.stack(rows).mean(0)
    out = torch.ones(num_heads, num_tokens, dtype=torch.float64)
    for j in range(past):
        out[:, j] = attention[:, max(0, j - 2) : min(past, j + 3)].mean(1)
    return out


REFERENCES: dict[str, Reference] = {"streaming": streaming, "knorm": knorm, "keydiff": keydiff, "snapkv": snapkv}


def test_every_scorer_has_a_reference() -> None:
    assert set(REFERENCES) == set(scorer_names())


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 63, 64, 65, 300])
@pytest.mark.parametrize("name", scorer_names())
def test_scores_equal_the_reference(name: str, num_tokens: int, group: int, head_dim: int) -> None:
    query, key, value, context = chunk(num_tokens, group, head_dim)
    scores = get_scorer(name).score(query, key, value, context)
    expected = REFERENCES[name](query.double(), key.double(), context)
    torch.testing.assert_close(scores.double(), expected.double(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 65, 130])
@pytest.mark.parametrize("name", scorer_names())
class TestEveryScorer:
    def test_shape_type_and_finiteness(self, name: str, num_tokens: int, dtype: torch.dtype) -> None:
        query, key, value, context = chunk(num_tokens, 3, 16)
        scores = get_scorer(name).score(query.to(dtype), key.to(dtype), value.to(dtype), context)
        assert scores.shape == (NUM_HEADS, num_tokens)
        assert scores.dtype == torch.float32
        assert scores.isfinite().all()

    def test_computes_in_float32(self, name: str, num_tokens: int, dtype: torch.dtype) -> None:
        """The type of the inputs costs their own rounding and nothing more."""
        query, key, value, context = chunk(num_tokens, 3, 16)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        scorer = get_scorer(name)
        scores = scorer.score(query, key, value, context)
        assert torch.equal(scores, scorer.score(query.float(), key.float(), value.float(), context))

    def test_zero_inputs_are_finite(self, name: str, num_tokens: int, dtype: torch.dtype) -> None:
        query, key, value, context = chunk(num_tokens, 3, 16)
        query, key, value = (torch.zeros_like(x, dtype=dtype) for x in (query, key, value))
        assert get_scorer(name).score(query, key, value, context).isfinite().all()

    def test_neighbours_in_the_batch_change_nothing(self, name: str, num_tokens: int, dtype: torch.dtype) -> None:
        """A chunk scores the same as a slice of a batch as it does alone, bit for bit, and inputs stay as they are."""
        mine, other = chunk(num_tokens, 3, 16, seed=1), chunk(77, 3, 16, seed=2)
        scorer, context = get_scorer(name), mine[3]
        alone = scorer.score(*(x.to(dtype) for x in mine[:3]), context)
        batch = [torch.cat([a, b, a]).to(dtype) for a, b in zip(other[:3], mine[:3], strict=True)]
        before = [x.clone() for x in batch]
        within = scorer.score(*(x[77 : 77 + num_tokens] for x in batch), context)
        assert torch.equal(within, alone)
        assert all(torch.equal(a, b) for a, b in zip(before, batch, strict=True))


def test_unknown_scorer_names_the_known_ones() -> None:
    with pytest.raises(TangramError, match="snapkv"):
        get_scorer("nope")


@pytest.mark.parametrize("name", scorer_names())
def test_scorer_says_where_it_comes_from(name: str) -> None:
    scorer = get_scorer(name)
    assert scorer.name == name
    assert scorer.paper.startswith("https://arxiv.org/abs/")
