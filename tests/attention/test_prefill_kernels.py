# SPDX-License-Identifier: Apache-2.0
"""Selection, writing and merging of prefill chunks against the CPU path and float64 attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.budget.strategies import Case, skewed_curve
from torch import Tensor

from vllm_tangram.attention import prefill, ragged_attention
from vllm_tangram.attention.prefill import (
    LayerHeads,
    PrefillRows,
    merge_retained,
    retained_blocks,
    select,
    write_tokens,
)
from vllm_tangram.budget import EvictionSchedule, HeadGroups, group_members
from vllm_tangram.compression import select_tokens
from vllm_tangram.pages.device import DevicePages
from vllm_tangram.pages.table import PageTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNTOUCHED = -77


def ints(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, np.int32)).to(DEVICE)


def make_rows(
    first: Any, num_tokens: Any, requests: Any, before: Any, keep: Any, protect_head: Any, protect_tail: Any
) -> PrefillRows:
    """Now tensors of their own, now columns of one."""
    fields = [first, num_tokens, requests, before, keep, protect_head, protect_tail]
    columns = [np.reshape(field, (len(first), -1)) for field in fields]
    packed = ints(np.concatenate([*columns, np.full((len(first), 3), -9)], axis=1))
    tensors = packed.split([column.shape[1] for column in columns] + [3], dim=1)[:-1]
    tensors = [t if np.ndim(field) == 2 else t[:, 0] for t, field in zip(tensors, fields, strict=True)]
    if np.random.default_rng().random() < 0.5:
        tensors = [tensor.contiguous() for tensor in tensors]
    return PrefillRows(*tensors, max_tokens=int(np.max(num_tokens)))


def make_heads(group: Any, column: Any) -> LayerHeads:
    return LayerHeads(ints(group), ints(column))


def check_selection(
    scores: Tensor, lengths: list[int], protect: list[tuple[int, int]], keep: np.ndarray, group: list[int]
) -> None:
    """Rows lie one after another behind three tokens of others; row 0 of the grid is a row without a request."""
    num_rows, num_groups = keep.shape
    first = 3 + np.cumsum([0, *lengths[:-1]])
    before = np.random.default_rng(len(lengths)).integers(0, 1000, (num_rows + 1, num_groups))
    rows = make_rows(
        [0, *first],
        [3, *lengths],
        [-1, *range(num_rows)],
        before,
        np.vstack([np.zeros(num_groups), keep]),
        [0, *(head for head, _ in protect)],
        [0, *(tail for _, tail in protect)],
    )
    expected = torch.full(scores.shape, UNTOUCHED, dtype=torch.int32)
    for p, (start, n) in enumerate(zip(first.tolist(), lengths, strict=True)):
        for h, g in enumerate(group):
            chunk, count = scores[h : h + 1, start : start + n], int(keep[p, g])
            chosen = select_tokens(chunk, [count], protect_head=protect[p][0], protect_tail=protect[p][1])
            expected[h, start : start + n] = -1
            expected[h, start + chosen] = torch.arange(count, dtype=torch.int32) + int(before[p + 1, g])
    dest = torch.full_like(expected, UNTOUCHED).to(DEVICE)
    select(scores.to(DEVICE), dest, rows=rows, heads=make_heads(group, [0] * len(group)))
    torch.testing.assert_close(dest.cpu(), expected, rtol=0, atol=0)


def random_scores(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> Tensor:
    if kind == "bits":  # every kind of float, NaN with any payload
        return torch.from_numpy(rng.integers(-(2**31), 2**31, shape).astype(np.int32).view(np.float32))
    if kind == "ties":
        special = [0.0, -0.0, 1.0, 1.5, -1.0, -2.5, 1e-45, -1e-45, math.inf, -math.inf, math.nan, -math.nan]
        return torch.from_numpy(rng.choice(np.array(special, np.float32), shape))
    if kind == "nan":
        return torch.full(shape, math.nan)
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("blocks", [prefill.SELECT_BLOCKS, (16, 32)], ids=["one tile", "tiles"])
@pytest.mark.parametrize("kind", ["normal", "ties", "bits", "nan"])
def test_selection_equals_that_of_the_cpu_path(
    kind: str, blocks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "SELECT_BLOCKS", blocks)
    rng = np.random.default_rng()
    for _ in range(6):
        num_rows, num_groups = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        lengths = rng.choice([1, 2, 31, 32, 33, 63, 150], num_rows).tolist()
        # Sinks and window may overlap, and be more than the chunk has.
        protect = [(int(rng.choice([0, 4])), int(rng.choice([0, 5, 30, 64]))) for _ in lengths]
        least = np.minimum(lengths, np.sum(protect, axis=1))
        keep = np.stack([rng.integers(a, n + 1, num_groups) for a, n in zip(least, lengths, strict=True)])
        keep[rng.random(keep.shape) < 0.15] = 0
        keep = np.maximum(keep, least[:, None])
        group = rng.integers(0, num_groups, int(rng.integers(1, 4))).tolist()
        check_selection(random_scores(rng, kind, (len(group), 3 + sum(lengths) + 2)), lengths, protect, keep, group)


@pytest.mark.parametrize("num_tokens", [1025, 8192, 8193, 20000])
def test_selection_from_long_chunks(num_tokens: int) -> None:
    rng = np.random.default_rng()
    scores = torch.from_numpy(rng.integers(0, 400, (2, 3 + num_tokens)).astype(np.float32))  # ties in every tile
    keep = rng.integers(68, num_tokens, (1, 2))
    check_selection(scores, [num_tokens], [(4, 64)], keep, [0, 1])


def test_a_head_that_keeps_all_or_nothing() -> None:
    scores = torch.full((2, 11), math.nan)
    check_selection(scores, [7], [(0, 0)], np.array([[0, 7]]), [1, 0])


def test_scores_may_be_a_slice() -> None:
    wide = torch.randn(4, 50, device=DEVICE)
    rows = make_rows([0], [20], [0], [[0]], [[7]], [1], [2])
    sliced, whole = (torch.full((2, 20), UNTOUCHED, dtype=torch.int32, device=DEVICE) for _ in range(2))
    heads = make_heads([0, 0], [0, 1])
    select(wide[1::2, 13:33], sliced, rows=rows, heads=heads)
    select(wide[1::2, 13:33].contiguous(), whole, rows=rows, heads=heads)
    assert torch.equal(sliced, whole)
    assert (whole >= 0).sum() == 14


class Engine:
    """Requests whose pages are known twice: to the CPU's page table and, from the same flat lists, to the device."""

    def __init__(self, rng: np.random.Generator, groups: HeadGroups, block_size: int, n_max: int) -> None:
        self.rng, self.groups, self.block_size = rng, groups, block_size
        slots, blocks = 6, n_max + 4
        self.table = PageTable(slots, groups.num_groups, blocks, block_size, groups.size)
        self.pages = DevicePages(slots, groups.num_groups, n_max, block_size, 2, DEVICE)
        self.width = groups.num_groups * blocks
        self.flat = np.zeros((slots, self.width), np.int32)
        self.unused = rng.permutation(np.arange(1, slots * self.width + 1)).astype(np.int32)
        self.schedules: dict[int, tuple[EvictionSchedule, int]] = {}

    def open(self, slot: int, schedule: EvictionSchedule, prompt_len: int) -> None:
        self.table.open(slot, prompt_len, schedule.kept)
        self.pages.open(slot, prompt_len, schedule)
        self.schedules[slot] = schedule, prompt_len

    def grow(self, slot: int, tokens: int) -> np.ndarray:
        """Give the request pages for ``tokens`` tokens; ``[N]`` lengths of its groups then."""
        schedule, prompt_len = self.schedules[slot]
        count = schedule.num_pages(tokens, prompt_len)
        held = int(np.count_nonzero(self.flat[slot]))
        self.flat[slot, held:count], self.unused = self.unused[: count - held], self.unused[count - held :]
        self.table.ingest(slot, self.flat[slot], count)
        return schedule.lengths(tokens, prompt_len)

    @property
    def pool_pages(self) -> int:
        return self.flat.size + 1


@pytest.mark.parametrize(
    ("block_size", "head_dim", "group_size", "dtype"),
    [
        (16, 64, 3, torch.float32),
        (32, 96, 2, torch.float16),
        (64, 128, 8, torch.float32),
        (128, 256, 1, torch.bfloat16),
    ],
)
def test_what_is_written_is_where_the_page_table_says(
    block_size: int, head_dim: int, group_size: int, dtype: torch.dtype
) -> None:
    """Chunks of several requests at two retentions, then tokens beyond the prompt; every step in a random batch."""
    rng = np.random.default_rng()
    layers, num_heads, chunk_blocks, n_max = 2, 3, 3, 10
    curve = skewed_curve(layers * num_heads)
    groups = group_members(curve.at(0.3), (layers, num_heads), min(group_size, layers * num_heads), "global")
    case = Case(curve, groups, 0.3, block_size, chunk_blocks, sinks=2, window=block_size // 2, n_max=n_max)
    schedules = [case.build(), replace(case, retention=0.7).build()]
    chunk = chunk_blocks * block_size

    engine = Engine(rng, groups, block_size, n_max)
    prompts = rng.integers(1, n_max * block_size, 4)
    prompts[0] = 3 * chunk + 5
    slots = rng.permutation(6)[:4]
    for i, slot in enumerate(slots.tolist()):
        engine.open(slot, schedules[i % 2], int(prompts[i]))
    pool = torch.full((engine.pool_pages, groups.size, block_size, 2 * head_dim), math.nan, dtype=dtype, device=DEVICE)
    expected = pool.cpu().clone()

    done = np.zeros(4, np.int64)
    steps = 0
    while (pending := np.flatnonzero(done <= prompts)).size:
        steps += 1
        batch = rng.permutation(pending)[: int(rng.integers(1, 3))].tolist()
        # A prompt goes in chunks; then come 1 to 40 tokens of which nothing is evicted.
        left, beyond = (prompts - done)[batch], rng.integers(1, 41, len(batch))
        lengths = np.where(left > 0, np.minimum(left, chunk), beyond).tolist()
        ends = done[batch] + lengths
        first = 2 + np.cumsum([0, *lengths[:-1]])  # behind two decode tokens
        before = np.stack([engine.grow(int(slots[i]), int(done[i])) for i in batch])
        after = np.stack([engine.grow(int(slots[i]), int(end)) for i, end in zip(batch, ends, strict=True)])
        requests = slots[batch]
        protect_head = [int(max(0, min(case.sinks - done[i], n))) for i, n in zip(batch, lengths, strict=True)]
        protect_tail = [min(case.window, n) for n in lengths]
        rows = make_rows(first, lengths, requests, before, after - before, protect_head, protect_tail)
        flat = torch.from_numpy(engine.flat).to(DEVICE)

        # K and V as slices of a fused projection.
        total = 2 + sum(lengths)
        fused = torch.randn(total, 2 * num_heads * head_dim + 16, device=DEVICE).to(dtype)
        key = fused[:, : num_heads * head_dim].view(total, num_heads, head_dim)
        value = fused[:, num_heads * head_dim + 16 :].view(total, num_heads, head_dim)
        scores = torch.randn(num_heads, total, device=DEVICE)
        dest = torch.full((num_heads, total), UNTOUCHED, dtype=torch.int32, device=DEVICE)
        for layer in range(layers):
            group, column = groups.group[layer], groups.column[layer]
            heads = make_heads(group, column)
            select(scores, dest, rows=rows, heads=heads)
            write_tokens(key + layer, value, dest, pool, rows=rows, flat=flat, pages=engine.pages, heads=heads)

            cells = expected.view(-1, 2 * head_dim)
            for p, slot in enumerate(requests.tolist()):
                tokens = slice(int(first[p]), int(first[p]) + lengths[p])
                keep = (after - before)[p, group]
                chosen = select_tokens(
                    scores[:, tokens].cpu(), keep.tolist(), protect_head=protect_head[p], protect_tail=protect_tail[p]
                )
                places = np.empty(int(keep.sum()), np.int64)
                engine.table.member_slots(
                    slot, group, column, before[p, group].astype(np.int64), keep.astype(np.int64), places
                )
                head = np.repeat(np.arange(num_heads), keep)
                cells[places, :head_dim] = (key + layer)[tokens][chosen, head].cpu()
                cells[places, head_dim:] = value[tokens][chosen, head].cpu()

            # What earlier chunks retained, as FlashAttention will be told; written in this step or before.
            counts = -(-before[:, group] // block_size)  # [P, H]
            width = max(1, int(counts.max()) + int(rng.integers(2)))
            sequences = num_heads * len(batch)
            blocks = torch.full((sequences, width), UNTOUCHED, dtype=torch.int32, device=DEVICE)
            held = torch.full((sequences,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
            retained_blocks(blocks, held, rows=rows, flat=flat, pages=engine.pages, heads=heads, group_size=groups.size)
            np.testing.assert_array_equal(held.cpu().numpy(), before[:, group].T.ravel())
            for p, slot in enumerate(requests.tolist()):
                told = np.zeros((num_heads, width), np.int32)
                engine.table.member_blocks(np.array([slot], np.int32), group, column, counts[p].astype(np.int32), told)
                np.testing.assert_array_equal(blocks.cpu().numpy()[p :: len(batch)], told)
        done[batch] = ends
    assert steps >= 5
    assert torch.equal(pool.cpu().view(-1).isnan(), expected.view(-1).isnan())
    torch.testing.assert_close(pool.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_rows_without_a_request_and_tables_of_zeros_are_tolerated() -> None:
    """What a warm-up or a padded batch looks like: a request of zeros keeps to page 0."""
    pages = DevicePages(2, 3, 4, 16, 1, DEVICE)
    flat = torch.zeros(2, 40, dtype=torch.int32, device=DEVICE)
    pool = torch.full((4, 2, 16, 128), math.nan, device=DEVICE)
    rows = make_rows([0, 5], [5, 9], [-1, 0], np.zeros((2, 3)), [[2] * 3, [4] * 3], [0, 0], [1, 1])
    heads = make_heads([0, 2], [1, 0])
    dest = torch.full((2, 14), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    select(torch.randn(2, 14, device=DEVICE), dest, rows=rows, heads=heads)
    assert (dest[:, :5] == UNTOUCHED).all()
    dest[:, :5] = 7  # not to be read either
    key = torch.randn(14, 2, 64, device=DEVICE)
    write_tokens(key, key, dest, pool, rows=rows, flat=flat, pages=pages, heads=heads)
    assert pool[1:].isnan().all()
    assert (~pool[0, :, :, 0].isnan()).sum(dim=1).tolist() == [4, 4]
    blocks = torch.full((4, 3), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    held = torch.full((4,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    retained_blocks(blocks, held, rows=rows, flat=flat, pages=pages, heads=heads, group_size=2)
    assert blocks.eq(0).all()
    assert held.eq(0).all()


def softmax_parts(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """``[T, d]`` and ``[T]`` float64: softmax average and natural log of the sum, of one query head."""
    logits = scale * (query.double() @ keys.double().T)
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
    return logits.softmax(dim=1) @ values.double(), logits.logsumexp(dim=1)


@pytest.mark.parametrize(
    ("num_tokens", "ratio", "head_dim", "dtype"),
    [
        (1, 1, 64, torch.float32),
        (33, 4, 96, torch.float32),
        (70, 3, 128, torch.bfloat16),
        (5, 16, 256, torch.float16),
    ],
)
def test_merging_equals_attention_over_both_parts(
    num_tokens: int, ratio: int, head_dim: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng()
    held = [0, 50, 1, int(rng.integers(2, 90))]  # per group; heads 1 and 3 are of the group that holds nothing
    group = [1, 0, 3, 0, 2]
    num_heads, scale = len(group), head_dim**-0.5
    query = 3 * torch.randn(num_tokens, num_heads * ratio, head_dim)
    keys = [torch.randn(held[g] + num_tokens, head_dim) for g in group]
    values = [torch.randn(held[g] + num_tokens, head_dim) for g in group]
    keys[0] *= 20  # logits of some hundreds: one part outweighs the other beyond what exp can say

    # Behind the tokens of another row, all of them behind two decode tokens.
    others = int(rng.choice([1, 40]))
    total, own_tokens = others + num_tokens, slice(others, None)
    chunk = torch.full((total, num_heads * ratio, head_dim + 8), math.nan, dtype=dtype)
    lse = torch.full((num_heads * ratio, total), math.nan)
    # Heads without a past: FlashAttention may leave anything there.
    garbage = rng.choice([math.nan, math.inf, -math.inf])
    retained = torch.full((num_heads, total, ratio, head_dim), garbage, dtype=dtype)
    retained_lse = torch.full((ratio, num_heads, total), garbage)
    chunk[:others] = 7
    for h, g in enumerate(group):
        past = held[g]
        for i in range(ratio):
            q = query[:, h * ratio + i]
            out, own = softmax_parts(q, keys[h][past:], values[h][past:], scale, causal=True)
            chunk[own_tokens, h * ratio + i, :head_dim], lse[h * ratio + i, own_tokens] = out.to(dtype), own.float()
            if past:
                out, own = softmax_parts(q, keys[h][:past], values[h][:past], scale, causal=False)
                retained[h, own_tokens, i] = out.to(dtype)
                retained_lse[i, h, own_tokens] = own.float()

    rows = make_rows([2, 2 + others], [others, num_tokens], [1, 0], [[0] * 4, held], [[1] * 4] * 2, [0, 0], [0, 0])
    chunk = chunk.to(DEVICE)
    output, untouched = chunk[..., :head_dim], chunk[own_tokens, ratio : 2 * ratio, :head_dim].clone()
    merge_retained(
        output,
        lse.to(DEVICE),
        retained.to(DEVICE),
        retained_lse.flatten(1).to(DEVICE),
        2,
        rows=rows,
        heads=make_heads(group, [0] * num_heads),
    )
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    expected = ragged_attention(query, keys, values, scale)
    torch.testing.assert_close(output[own_tokens].cpu().double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(output[own_tokens, ratio : 2 * ratio], untouched)
    assert (chunk[:others] == 7).all()
    assert chunk[own_tokens, :, head_dim:].isnan().all()


def test_merging_skips_rows_without_a_request() -> None:
    rows = make_rows([0], [3], [-1], [[4]], [[3]], [0], [0])
    output = torch.randn(3, 2, 64, device=DEVICE)
    poison = torch.full((1, 3, 2, 64), math.nan, device=DEVICE)
    expected = output.clone()
    zeros = torch.zeros(2, 3, device=DEVICE)
    merge_retained(output, zeros, poison, zeros, 0, rows=rows, heads=make_heads([0], [0]))
    assert torch.equal(output, expected)
