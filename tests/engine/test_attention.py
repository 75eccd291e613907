# SPDX-License-Identifier: Apache-2.0
"""The attention path of the CPU against a dense float64 reference on the same kept set, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_tangram.attention.reference import ragged_attention
from vllm_tangram.compression import get_scorer
from vllm_tangram.config import TangramConfig
from vllm_tangram.engine.cpu import attention
from vllm_tangram.engine.cpu.metadata import DecodeRows, HeadGroupMetadata, PrefillRow
from vllm_tangram.engine.scoring import LayerScorer
from vllm_tangram.pages.table import PageTable

BLOCK, CHUNK, SINKS, WINDOW = 32, 128, 4, 16
LAYERS, HEADS, QUERIES_PER_HEAD = 2, 3, 3


class Request:
    """One request: what the engine would know of it, and the dense truth."""

    def __init__(self, slot: int, prompt_len: int, kept: np.ndarray, rng: np.random.Generator) -> None:
        self.slot, self.prompt_len, self.kept_table, self.rng = slot, prompt_len, kept, rng
        self.tokens = 0
        self.pages: list[int] = []
        # per layer and head: everything that was ever kept, in order
        self.keys: list[list[list[torch.Tensor]]] = [[[] for _ in range(HEADS)] for _ in range(LAYERS)]
        self.values: list[list[list[torch.Tensor]]] = [[[] for _ in range(HEADS)] for _ in range(LAYERS)]

    def next_tokens(self) -> int:
        if self.tokens < self.prompt_len:
            return min((self.tokens // CHUNK + 1) * CHUNK, self.prompt_len) - self.tokens
        return 1

    def lengths(self, tokens: int) -> np.ndarray:
        whole = min(tokens, self.prompt_len) // BLOCK
        return tokens - BLOCK * (whole - self.kept_table[whole].astype(np.int64))

    def num_pages(self, tokens: int) -> int:
        return int((-(-self.lengths(tokens) // BLOCK)).sum())


def random_kept(num_groups: int, max_blocks: int, rng: np.random.Generator) -> np.ndarray:
    """A valid table: steps of 0 or 1, and every chunk keeps its protected blocks."""
    kept = np.zeros((max_blocks + 1, num_groups), np.int32)
    share = rng.uniform(0, 1, num_groups)
    for n in range(1, max_blocks + 1):
        forced = (n - 1) % (CHUNK // BLOCK) == 0
        kept[n] = kept[n - 1] + (forced | (rng.uniform(size=num_groups) < share))
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ragged_pages(dtype: torch.dtype, group_size: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed steps of several requests: prefill of whole and short chunks, decode; head groups mix layers at random."""
    rng = np.random.default_rng(group_size * 1000 + head_dim)
    torch.manual_seed(group_size)
    num_members = LAYERS * HEADS
    num_groups = -(-num_members // group_size)
    places = rng.permutation(num_members)
    group = (places // group_size).reshape(LAYERS, HEADS)
    column = (places % group_size).reshape(LAYERS, HEADS)
    scale = head_dim**-0.5
    config = TangramConfig(
        retention=0.5, budgets="uniform", chunk_size=CHUNK, sinks=SINKS, window=WINDOW, page_group_size=group_size
    )
    stock = SimpleNamespace(
        num_heads=HEADS * QUERIES_PER_HEAD,
        head_size=head_dim,
        scale=scale,
        num_kv_heads=HEADS,
        num_queries_per_kv=QUERIES_PER_HEAD,
        kv_cache_dtype="auto",
    )
    layers = [
        attention.HeadGroupCPUAttention(
            stock,  # type: ignore[arg-type]
            index=index,
            group=group[index],
            column=column[index],
            block_size=BLOCK,
            dtype=dtype,
            config=config,
            scorer=LayerScorer(get_scorer("knorm"), config, index, scale),
        )
        for index in range(LAYERS)
    ]
    selected: list[tuple[torch.Tensor, list[int]]] = []

    def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
        indices = select(*args, **kwargs)
        selected.append((indices, list(args[1])))
        return indices

    select = attention.select_tokens
    monkeypatch.setattr(attention, "select_tokens", recording)

    num_pages, staging = 400, 4 * CHUNK // BLOCK * HEADS
    pool = torch.zeros(num_pages + -(-staging // group_size), group_size, BLOCK, 2 * head_dim, dtype=dtype)
    free = list(rng.permutation(np.arange(1, num_pages)))
    table = PageTable(4, num_groups, 40, block_size=BLOCK, group_size=group_size)
    requests = []
    for slot, prompt_len in enumerate((300, 128, 17, 420)):
        request = Request(slot, prompt_len, random_kept(num_groups, 16, rng), rng)
        table.open(slot, prompt_len, request.kept_table)
        requests.append(request)

    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    staged_chunks = 0
    for step in range(9):
        active = [r for r in requests if step >= r.slot]  # they join one after the other
        active.sort(key=lambda r: r.next_tokens() != 1)  # decodes first, as vLLM's runner orders them
        counts = [r.next_tokens() for r in active]
        for request, count in zip(active, counts, strict=True):
            need = request.num_pages(request.tokens + count)
            while len(request.pages) < need:
                request.pages.append(int(free.pop()))
            table.ingest(request.slot, np.array(request.pages, np.int32), len(request.pages))
        starts = np.cumsum([0, *counts])
        num_decodes = counts.count(1) if 1 in counts else 0
        decodes = None
        if num_decodes:
            lengths = np.stack([r.lengths(r.tokens + 1) for r in active[:num_decodes]]).astype(np.int32)
            decodes = DecodeRows(np.array([r.slot for r in active[:num_decodes]], np.int32), lengths)
        prefills, block = [], num_pages * group_size
        for number in range(num_decodes, len(active)):
            request, count = active[number], counts[number]
            before, after = request.lengths(request.tokens), request.lengths(request.tokens + count)
            staged = bool((after - before < count).any())
            prefills.append(
                PrefillRow(
                    first=int(starts[number]),
                    num_tokens=count,
                    position=request.tokens,
                    slot=request.slot,
                    before=before.astype(np.int32),
                    after=after.astype(np.int32),
                    staging_block=block if staged else -1,
                    request=number,
                )
            )
            block += -(-count // BLOCK) * HEADS if staged else 0
        metadata = HeadGroupMetadata(table, decodes, tuple(prefills), None)

        for index, layer in enumerate(layers):
            total = int(starts[-1])
            query = torch.randn(total, HEADS * QUERIES_PER_HEAD, head_dim).to(dtype)
            # K and V as the model gives them: slices of one projection, not contiguous
            both = torch.randn(total, 2 * HEADS * head_dim).to(dtype)
            key, value = (part.view(total, HEADS, head_dim) for part in both.chunk(2, dim=1))
            output = torch.full_like(query, float("nan"))
            selected.clear()
            layer.forward(None, query, key, value, pool, metadata, output)
            chosen = iter(selected)
            for number, (request, count) in enumerate(zip(active, counts, strict=True)):
                tokens = slice(int(starts[number]), int(starts[number]) + count)
                all_keys, all_values = [], []
                for head in range(HEADS):
                    mine = [*request.keys[index][head], *key[tokens, head]]
                    all_keys.append(torch.stack(mine))
                    all_values.append(torch.stack([*request.values[index][head], *value[tokens, head]]))
                expected = ragged_attention(query[tokens], all_keys, all_values, scale)
                torch.testing.assert_close(output[tokens].double(), expected, atol=tolerance, rtol=tolerance)
                kept_rows = [list(range(count))] * HEADS
                if number >= num_decodes and not prefills[number - num_decodes].direct:
                    staged_chunks += 1
                    indices, per_head = next(chosen)
                    kept_rows = [part.tolist() for part in indices.split(per_head)]
                for head in range(HEADS):
                    request.keys[index][head].extend(key[tokens, head][row] for row in kept_rows[head])
                    request.values[index][head].extend(value[tokens, head][row] for row in kept_rows[head])
        for request, count in zip(active, counts, strict=True):
            request.tokens += count
            for index in range(LAYERS):
                for head in range(HEADS):
                    held = request.lengths(request.tokens)[group[index, head]]
                    assert len(request.keys[index][head]) == held
    assert staged_chunks >= 4 * LAYERS
