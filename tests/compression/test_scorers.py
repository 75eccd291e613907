# SPDX-License-Identifier: Apache-2.0
"""Every scorer against a loop in float64 written from its formula, and one matrix of what all scorers must do."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from tests.compression import test_gate
from tests.compression.rotations import rotation, table
from torch import Tensor

from vllm_tangram.compression import ChunkContext, Scorer, get_scorer, scorer_names
from vllm_tangram.compression.base import Packing
from vllm_tangram.compression.rope import Rope
from vllm_tangram.errors import TangramError

NUM_HEADS = 2
FULLY_ROTATED = 64  # heads of this size; smaller ones are turned by half, in neighbouring pairs
Reference = Callable[[Tensor, Tensor, Tensor, ChunkContext], Tensor]


def rope_shape(head_dim: int) -> tuple[int, bool]:
    """(rotary_dim, interleaved)."""
    return (head_dim, False) if head_dim == FULLY_ROTATED else (head_dim // 2, True)


def chunk(
    num_tokens: int, group: int, head_dim: int, seed: int = 0, start: int = 2048
) -> tuple[Tensor, Tensor, Tensor, ChunkContext]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_tokens, NUM_HEADS * group, head_dim, generator=generator)
    key = torch.randn(num_tokens, NUM_HEADS, head_dim, generator=generator) + 0.3
    value = torch.randn(num_tokens, NUM_HEADS, head_dim, generator=generator)
    rotary_dim, interleaved = rope_shape(head_dim)
    hidden = torch.randn(num_tokens, test_gate.HIDDEN, generator=generator)
    rope = Rope(table(start + num_tokens + 1, rotary_dim), interleaved=interleaved)
    context = ChunkContext(4, 64, scale=head_dim**-0.5, start=start, layer=1, rope=rope, hidden=hidden)
    return query, key, value, context


def make(name: str) -> Scorer:
    return get_scorer(name, test_gate.random_gate())


def converted(context: ChunkContext, dtype: torch.dtype) -> ChunkContext:
    assert context.hidden is not None
    return replace(context, hidden=context.hidden.to(dtype))


def streaming(query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
    return torch.tensor([[context.start + t for t in range(len(key))]] * key.shape[1]).double()


def knorm(query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
    norms = torch.tensor([[math.hypot(*key[t, h].tolist()) for t in range(len(key))] for h in range(key.shape[1])])
    return -norms / (norms.sum(1, keepdim=True) / len(key))


def keydiff(query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
    out = torch.zeros(key.shape[1], len(key), dtype=torch.float64)
    for h in range(key.shape[1]):
        mean = sum(key[t, h] / key[t, h].norm() for t in range(len(key))) / len(key)
        for t in range(len(key)):
            out[h, t] = -(key[t, h] @ mean) / (key[t, h].norm() * mean.norm())
    return out


def snapkv(query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
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


def tova(query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
    num_tokens, num_heads = key.shape[:2]
    group = query.shape[1] // num_heads
    rows = [(context.scale * (key[:, i // group] @ query[-1, i])).softmax(0) for i in range(query.shape[1])]
    mean = sum(rows) / len(rows)
    mean[num_tokens - 1] = 1
    return torch.stack([mean] * num_heads)


def expected_attention(query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
    num_tokens, num_heads, head_dim = key.shape
    group = query.shape[1] // num_heads
    first = min(num_tokens, max(0, context.sinks - context.start))
    out = torch.ones(num_heads, num_tokens, dtype=torch.float64)
    if first == num_tokens:
        return out
    turn = [rotation(context.start + t, head_dim, *rope_shape(head_dim)) for t in range(num_tokens + 512)]
    future = torch.stack(turn[num_tokens:]).mean(0)
    for h in range(num_heads):
        attention = torch.zeros(num_tokens - first, dtype=torch.float64)
        for query_head in range(h * group, (h + 1) * group):
            own = [turn[t].T @ query[t, query_head] for t in range(first, num_tokens)]
            mean = sum(own) / len(own)
            covariance = future @ (sum(torch.outer(q - mean, q - mean) for q in own) / len(own)) @ future.T
            logits = [
                context.scale * (future @ mean) @ key[t, h]
                + context.scale**2 / 2 * (key[t, h] @ covariance @ key[t, h])
                for t in range(first, num_tokens)
            ]
            attention += torch.stack(logits).softmax(0) / group
        out[h, first:] = (attention + 0.01) * value[first:, h].norm(dim=-1)
    out[:, :first] = out[:, first:].max() + 1
    return out


def fastkvzip(query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
    assert context.hidden is not None
    return test_gate.reference(test_gate.random_gate().weights, context.layer, context.hidden)


REFERENCES: dict[str, Reference] = {
    "streaming": streaming,
    "knorm": knorm,
    "keydiff": keydiff,
    "snapkv": snapkv,
    "tova": tova,
    "expected_attention": expected_attention,
    "fastkvzip": fastkvzip,
}


def test_every_scorer_has_a_reference() -> None:
    assert set(REFERENCES) == set(scorer_names())


@pytest.mark.parametrize("start", [0, 2048])
@pytest.mark.parametrize("head_dim", [16, FULLY_ROTATED])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 63, 64, 65, 300])
@pytest.mark.parametrize("name", scorer_names())
def test_scores_equal_the_reference(name: str, num_tokens: int, group: int, head_dim: int, start: int) -> None:
    query, key, value, context = chunk(num_tokens, group, head_dim, start=start)
    scores = make(name).score(query, key, value, context)
    expected = REFERENCES[name](query.double(), key.double(), value.double(), context)
    torch.testing.assert_close(scores.double(), expected.double(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [(5,), (1, 65, 3), (64, 64, 130, 1)])
@pytest.mark.parametrize("name", [name for name in scorer_names() if make(name).packs])
def test_packed_chunks_are_scored_like_single_ones(name: str, lengths: tuple[int, ...]) -> None:
    scorer = make(name)
    chunks = [chunk(length, 3, 16, seed, start=1000 * seed) for seed, length in enumerate(lengths)]
    expected = [scorer.score(*one) for one in chunks]
    query, key, value = (torch.cat(tensors) for tensors in list(zip(*chunks, strict=True))[:3])
    hidden = torch.cat([one[3].hidden for one in chunks if one[3].hidden is not None])
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    context = replace(chunks[0][3], hidden=hidden, packing=Packing.of(index, len(lengths)))
    scores = scorer.score(query, key, value, context)
    torch.testing.assert_close(scores, torch.cat(expected, dim=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 65, 130])
@pytest.mark.parametrize("name", scorer_names())
class TestEveryScorer:
    def test_shape_type_and_finiteness(self, name: str, num_tokens: int, dtype: torch.dtype) -> None:
        query, key, value, context = chunk(num_tokens, 3, 16)
        scores = make(name).score(query.to(dtype), key.to(dtype), value.to(dtype), converted(context, dtype))
        assert scores.shape == (NUM_HEADS, num_tokens)
        assert scores.dtype == torch.float32
        assert scores.isfinite().all()

    def test_computes_in_float32(self, name: str, num_tokens: int, dtype: torch.dtype) -> None:
        """The type of the inputs costs their own rounding and nothing more."""
        query, key, value, context = chunk(num_tokens, 3, 16)
        query, key, value, context = query.to(dtype), key.to(dtype), value.to(dtype), converted(context, dtype)
        scorer = make(name)
        scores = scorer.score(query, key, value, context)
        context = converted(context, torch.float32)
        assert torch.equal(scores, scorer.score(query.float(), key.float(), value.float(), context))

    def test_zero_inputs_are_finite(self, name: str, num_tokens: int, dtype: torch.dtype) -> None:
        query, key, value, context = chunk(num_tokens, 3, 16)
        query, key, value = (torch.zeros_like(x, dtype=dtype) for x in (query, key, value))
        assert context.hidden is not None
        context = replace(context, hidden=torch.zeros_like(context.hidden, dtype=dtype))
        assert make(name).score(query, key, value, context).isfinite().all()

    def test_neighbours_in_the_batch_change_nothing(self, name: str, num_tokens: int, dtype: torch.dtype) -> None:
        """A chunk scores the same as a slice of a batch as it does alone, bit for bit, and inputs stay as they are."""
        mine, other = chunk(num_tokens, 3, 16, seed=1), chunk(77, 3, 16, seed=2)
        scorer, context = make(name), converted(mine[3], dtype)
        alone = scorer.score(*(x.to(dtype) for x in mine[:3]), context)
        others = zip((*other[:3], other[3].hidden), (*mine[:3], context.hidden), strict=True)
        batch = [torch.cat([a, b, a]).to(dtype) for a, b in others]
        before = [x.clone() for x in batch]
        *inputs, hidden = (x[77 : 77 + num_tokens] for x in batch)
        within = scorer.score(*inputs, replace(context, hidden=hidden))
        assert torch.equal(within, alone)
        assert all(torch.equal(a, b) for a, b in zip(before, batch, strict=True))


def test_a_scorer_with_a_gate_is_not_made_without() -> None:
    with pytest.raises(TangramError, match=r"fastkvzip needs a gate .* --gate"):
        get_scorer("fastkvzip")


def test_unknown_scorer_names_the_known_ones() -> None:
    with pytest.raises(TangramError, match="snapkv"):
        get_scorer("nope")


@pytest.mark.parametrize("name", scorer_names())
def test_scorer_says_where_it_comes_from(name: str) -> None:
    scorer = make(name)
    assert scorer.name == name
    assert scorer.paper.startswith("https://arxiv.org/abs/")


@pytest.mark.parametrize("name", scorer_names())
def test_heads_may_be_on_several_ranks(name: str) -> None:
    """A rank that has one of the KV heads scores it as one that has all; what mixes heads asks the others."""
    group, timeout = 3, 60
    query, key, value, context = chunk(90, group, FULLY_ROTATED)
    together, given = Barrier(NUM_HEADS, timeout=timeout), [torch.empty(0)] * NUM_HEADS

    def score(rank: int) -> Tensor:
        def mean(values: Tensor) -> Tensor:
            given[rank] = values
            together.wait()
            result = torch.stack(given).mean(0)
            together.wait()
            return result

        gate = test_gate.random_gate().part(slice(0, 2), slice(rank, rank + 1))
        own, queries = slice(rank, rank + 1), slice(rank * group, (rank + 1) * group)
        seen = replace(context, mean_over_ranks=mean)
        return get_scorer(name, gate).score(query[:, queries], key[:, own], value[:, own], seen)

    with ThreadPoolExecutor(NUM_HEADS) as ranks:
        apart = torch.cat(list(ranks.map(score, range(NUM_HEADS))))
    torch.testing.assert_close(apart, make(name).score(query, key, value, context))
