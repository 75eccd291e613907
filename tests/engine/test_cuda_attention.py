# SPDX-License-Identifier: Apache-2.0
"""The CUDA attention path on the CPU: kernels in Triton's interpreter, FlashAttention replaced by its definition.

Random steps of several requests, chunks and decodes mixed, against a dense reference that keeps every head's tokens in
plain lists.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.compression.documents import random_scores

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from vllm.v1.attention.backends import fa_utils

from vllm_tangram.attention import ragged_attention
from vllm_tangram.attention.prefill import LayerHeads
from vllm_tangram.budget import RetentionPlan
from vllm_tangram.compression import get_scorer, select_tokens
from vllm_tangram.compression.base import Packing
from vllm_tangram.compression.keydiff_kernel import keydiff_scores
from vllm_tangram.compression.rope import Rope
from vllm_tangram.compression.scorers.keydiff import KeyDiff
from vllm_tangram.config import TangramConfig
from vllm_tangram.engine.chunk import Chunk
from vllm_tangram.engine.cuda import splits
from vllm_tangram.engine.cuda.attention import HeadGroupCUDAAttention
from vllm_tangram.engine.cuda.metadata import HeadGroupMetadataBuilder
from vllm_tangram.engine.cuda.splits import DecodeSplits
from vllm_tangram.engine.known import KnownPrompts
from vllm_tangram.engine.scoring import LayerScorer
from vllm_tangram.pages.device import DevicePages

LAYERS, HEADS, RATIO, DIM, BLOCK, CHUNK, MAX_LEN = 2, 3, 2, 16, 16, 64, 256
SCALE = 0.3
SLOTS = 4


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a packed batch by definition; an empty sequence gives NaN, which must not be looked at."""
    result = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[1], len(q))
    for i in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        if block_table is None:
            assert cu_seqlens_k is not None
            part = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
            keys, values = k[part], v[part]
        else:
            assert seqused_k is not None
            length = int(seqused_k[i])
            blocks = block_table[i].long()[: -(-length // k.shape[1])]
            keys, values = k[blocks].flatten(0, 1)[:length], v[blocks].flatten(0, 1)[:length]
        group = q.shape[1] // k.shape[-2]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q[rows].double(), keys.double()) * softmax_scale
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
        lse[:, rows] = logits.logsumexp(-1).float()
        result[rows] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values.double()).to(q.dtype)
    return result, lse


class Request:
    """Its tokens' tensors, drawn beforehand, and what the reference keeps of them."""

    def __init__(
        self, slot: int, prompt_len: int, retention: float, generator: torch.Generator, chunks_per_step: int = 1
    ) -> None:
        self.slot, self.prompt_len, self.retention = slot, prompt_len, retention
        self.chunks_per_step = chunks_per_step
        self.replayed = 1  # tokens of a step after the prompt; more of them were generated before a preemption
        self.computed = 0
        self.pages = 0
        self.document: torch.Tensor | None = None  # [L, H, T] scores of what it begins with
        size = prompt_len + 80
        self.query = torch.randn(LAYERS, size, HEADS * RATIO, DIM, generator=generator)
        self.key = torch.randn(LAYERS, size, HEADS, DIM, generator=generator)
        self.value = torch.randn(LAYERS, size, HEADS, DIM, generator=generator)
        empty = torch.empty(0, DIM)
        self.kept = [[(empty, empty) for _ in range(HEADS)] for _ in range(LAYERS)]

    @property
    def next_tokens(self) -> int:
        if self.computed >= self.prompt_len:
            return self.replayed
        return min(self.chunks_per_step * CHUNK - self.computed % CHUNK, self.prompt_len - self.computed)


class Engine:
    """Page allocation and batching as vLLM does them, around two layers of the last of some ranks."""

    def __init__(self, group_size: int, scorer: str, num_ranks: int = 1) -> None:
        self.config = TangramConfig.parse(
            {"budgets": "uniform", "retention": 0.5, "chunk_size": CHUNK, "window": 8, "sinks": 2, "scorer": scorer}
            | {"page_group_size": group_size}
        )
        self.plan = RetentionPlan(
            self.config,
            None,
            num_layers=LAYERS,
            num_kv_heads=HEADS * num_ranks,
            block_size=BLOCK,
            max_tokens=MAX_LEN,
            tensor_parallel_size=num_ranks,
        )
        # Budgets are uniform without a profile; shuffled groups make heads of a layer live in different ones.
        self.groups = groups = self.plan.groups.of_rank(num_ranks - 1)
        order = np.random.default_rng(1).permutation(LAYERS * HEADS)
        groups.group[:] = (order // group_size).reshape(LAYERS, HEADS)
        groups.column[:] = (order % group_size).reshape(LAYERS, HEADS)
        num_groups, device = self.plan.num_groups, torch.device("cpu")
        self.pages = DevicePages(SLOTS, num_groups, MAX_LEN // BLOCK, BLOCK, 3, device)
        self.pool = torch.full((400, group_size, BLOCK, 2 * DIM), float("nan"))
        self.free = np.random.default_rng(2).permutation(np.arange(1, 400)).tolist()
        self.runner: Any = SimpleNamespace(
            plan=self.plan,
            groups=groups,
            heads=[
                LayerHeads(torch.from_numpy(g), torch.from_numpy(c))
                for g, c in zip(groups.group, groups.column, strict=True)
            ],
            all_heads=LayerHeads(torch.from_numpy(groups.group.ravel()), torch.from_numpy(groups.column.ravel())),
            pages=self.pages,
            flat=torch.zeros(SLOTS, 4 * num_groups * MAX_LEN // BLOCK, dtype=torch.int32),
            requests=torch.full((SLOTS,), -1, dtype=torch.int32),
            schedules={},
            observer=None,
            known=KnownPrompts([]),
            req_states=SimpleNamespace(
                num_computed_tokens_np=np.zeros(SLOTS, np.int32),
                prompt_len=SimpleNamespace(np=np.zeros(SLOTS, np.int32)),
            ),
            max_num_reqs=SLOTS,
            parallel_config=None,
            device=device,
            dtype=torch.float32,
            model_config=SimpleNamespace(
                get_num_attention_heads=lambda _: HEADS * RATIO,
                get_num_kv_heads=lambda _: HEADS,
                get_head_size=lambda: DIM,
            ),
        )
        self.runner.splits = DecodeSplits(self.runner, num_blocks=5)  # asked of the driver where there is one
        self.builder = HeadGroupMetadataBuilder.__new__(HeadGroupMetadataBuilder)
        self.builder.num_kv_heads, self.builder.device = HEADS, device
        self.builder.bind(self.runner)
        stock: Any = SimpleNamespace(
            num_heads=HEADS * RATIO, num_kv_heads=HEADS, head_size=DIM, scale=SCALE, vllm_flash_attn_version=3
        )
        self.scorer = get_scorer(scorer)
        self.layers = [
            HeadGroupCUDAAttention(
                stock,
                index=index,
                heads=self.runner.heads[index],
                scorer=LayerScorer(self.scorer, self.config, index, SCALE),
                longest_chunk=CHUNK,
            )
            for index in range(LAYERS)
        ]

    def admit(self, request: Request) -> None:
        slot = request.slot
        self.runner.schedules[slot] = self.plan.schedule(request.retention)
        self.runner.req_states.prompt_len.np[slot] = request.prompt_len
        self.pages.open(slot, request.prompt_len, self.runner.schedules[slot])

    def step(self, batch: list[Request], padding: int = 0) -> None:
        """One step of the requests, decodes first; checks every layer's output."""
        batch = sorted(batch, key=lambda request: (request.next_tokens != 1, request.next_tokens))
        lens = [request.next_tokens for request in batch]
        for request in batch:
            need = self.runner.schedules[request.slot].num_pages(
                request.computed + request.next_tokens, request.prompt_len
            )
            for place in range(request.pages, need):
                self.runner.flat[request.slot, place] = self.free.pop()
            request.pages = need
            self.runner.req_states.num_computed_tokens_np[request.slot] = request.computed
        self.runner.requests[:] = torch.tensor([r.slot for r in batch] + [-1] * (SLOTS - len(batch)))
        starts = torch.tensor(np.concatenate([[0], np.cumsum(lens), [sum(lens)] * padding]), dtype=torch.int32)
        seq_lens = [request.computed + n for request, n in zip(batch, lens, strict=True)]
        metadata = self.builder.build(
            0,
            SimpleNamespace(
                num_reqs=len(batch) + padding,
                max_query_len=max(lens),
                query_start_loc_cpu=starts,
                seq_lens=torch.tensor(seq_lens + [0] * padding, dtype=torch.int32),
                req_idx=np.array([request.slot for request in batch]),
                num_actual_tokens=sum(lens) + padding,
            ),
        )
        for layer, impl in enumerate(self.layers):
            parts = [
                torch.cat(
                    [getattr(r, name)[layer, r.computed : r.computed + n] for r, n in zip(batch, lens, strict=True)]
                    + [torch.zeros(padding, heads, DIM)]
                )
                for name, heads in (("query", HEADS * RATIO), ("key", HEADS), ("value", HEADS))
            ]
            output = torch.full((sum(lens) + padding, HEADS * RATIO, DIM), float("nan"))
            impl.forward(None, *parts, self.pool, metadata, output)
            for request, n, first in zip(batch, lens, starts.tolist(), strict=False):
                for done in range(0, n, CHUNK):  # steps begin at whole chunks, but for decodes
                    chunk = min(CHUNK, n - done)
                    self._check(layer, request, request.computed + done, chunk, output[first + done :][:chunk])
        for request, n in zip(batch, lens, strict=True):
            request.computed += n

    def _check(self, layer: int, request: Request, start: int, n: int, output: torch.Tensor) -> None:
        new = slice(start, start + n)
        query, key, value = request.query[layer, new], request.key[layer, new], request.value[layer, new]
        held = request.kept[layer]
        keys = [torch.cat([held[h][0], key[:, h]]) for h in range(HEADS)]
        values = [torch.cat([held[h][1], value[:, h]]) for h in range(HEADS)]
        expected = ragged_attention(query, keys, values, SCALE)
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
        schedule = self.runner.schedules[request.slot]
        lengths = schedule.lengths(start + n, request.prompt_len) - schedule.lengths(start, request.prompt_len)
        keep = lengths[self.groups.group[layer]]
        if (keep == n).all():
            chosen = torch.arange(n).repeat(HEADS)
        else:
            scores = self.scorer.score(query, key, value, context(self.config, start))
            if request.document is not None and start < request.document.shape[-1]:
                known = request.document[layer, :, start : start + n].float()
                assert known.shape[-1] == n, "the reference knows no chunk that the document ends in"
                scores = known
            chosen = select_tokens(
                scores,
                keep.tolist(),
                protect_head=max(0, min(self.config.sinks - start, n)),
                protect_tail=min(self.config.window, n),
            )
        for h, tokens in enumerate(chosen.split(keep.tolist())):
            request.kept[layer][h] = (
                torch.cat([held[h][0], key[tokens, h]]),
                torch.cat([held[h][1], value[tokens, h]]),
            )


def context(config: TangramConfig, start: int) -> Any:
    from vllm_tangram.compression import ChunkContext

    return ChunkContext(sinks=config.sinks, window=config.window, scale=SCALE, start=start)


@pytest.mark.parametrize(("group_size", "scorer"), [(1, "keydiff"), (4, "snapkv")])
def test_steps_equal_a_dense_reference(group_size: int, scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    generator = torch.Generator().manual_seed(group_size)
    engine = Engine(group_size, scorer)
    first = Request(2, 3 * CHUNK + 1, 0.5, generator)  # its last chunk is one token: a decode row
    second = Request(0, 90, 0.3, generator)
    third = Request(3, 40, 1.0, generator)
    engine.admit(first)
    engine.step([first])
    engine.admit(second)
    engine.step([first, second])
    engine.admit(third)
    for _ in range(3):
        engine.step([first, second, third])
    engine.step([first, third], padding=1)  # as in a CUDA graph for more rows
    for _ in range(BLOCK):  # over a page boundary
        engine.step([first, second, third])
    engine.runner.pages.close(third.slot)
    reused = Request(third.slot, 70, 0.4, generator)
    engine.admit(reused)
    engine.step([reused, first])
    engine.step([reused, first])


@pytest.fixture(params=["by_chunk_means", "by_kernel"])
def keydiff(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyDiff as torch computes it, and by its kernel as on a GPU, which takes nothing but the rows."""

    def by_kernel(self: KeyDiff, key: torch.Tensor, scores: torch.Tensor, *rows: torch.Tensor) -> bool:
        keydiff_scores(key, scores, *rows)
        return True

    def unneeded(*_: Any) -> Packing:
        raise AssertionError("a packing was made for a scorer that does without")

    if request.param == "by_kernel":
        monkeypatch.setattr(KeyDiff, "score_rows", by_kernel)
        monkeypatch.setattr(Packing, "of", unneeded)


@pytest.mark.usefixtures("keydiff")
def test_several_chunks_of_a_prompt_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second chunk attends to what the first kept, in the same step; requests have one, two and three of them."""
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    generator = torch.Generator().manual_seed(11)
    engine = Engine(4, "keydiff", num_ranks=2)
    most = Request(1, 2 * CHUNK + 1, 0.5, generator, chunks_per_step=3)  # its last chunk is one token
    two = Request(3, 4 * CHUNK - 9, 0.3, generator, chunks_per_step=2)
    one = Request(0, 2 * CHUNK, 0.5, generator)
    for request in (most, two, one):
        engine.admit(request)
    for _ in range(4):
        engine.step([most, two, one])
    assert [request.computed for request in (most, two, one)] == [2 * CHUNK + 4, 4 * CHUNK - 7, 2 * CHUNK + 2]


@pytest.mark.usefixtures("keydiff")
def test_replayed_tokens_beside_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They attend to what their prompt kept and to those before, in pieces that begin anywhere; all of them stay."""
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    generator = torch.Generator().manual_seed(13)
    engine = Engine(4, "keydiff")
    resumed, going_on = Request(2, 90, 0.3, generator), Request(0, 3 * CHUNK + 20, 0.5, generator)
    fresh = Request(1, 2 * CHUNK, 1.0, generator, chunks_per_step=2)
    engine.admit(resumed)
    engine.step([resumed])
    engine.step([resumed])
    for request in (going_on, fresh):
        engine.admit(request)
    for resumed.replayed in (37, 9, 1, 2):
        engine.step([resumed, going_on, fresh])
    assert (resumed.computed, going_on.computed) == (90 + 37 + 9 + 1 + 2, 3 * CHUNK + 20)


@pytest.mark.usefixtures("keydiff")
def test_a_document_is_selected_by_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the request that begins with it, and of no other in the batch; a slot's next request begins with another."""
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    generator = torch.Generator().manual_seed(3)
    engine = Engine(4, "keydiff")
    document = random_scores(range(2 * CHUNK), {"num_hidden_layers": LAYERS, "num_key_value_heads": HEADS})
    known = engine.runner.known = KnownPrompts([document])
    asked = Request(1, 3 * CHUNK - 5, 0.5, generator, chunks_per_step=2)
    other = Request(2, 3 * CHUNK, 0.5, generator, chunks_per_step=2)
    asked.document = document.scores
    known.open(asked.slot, range(asked.prompt_len), adapted=False)
    known.open(other.slot, range(1, 1 + other.prompt_len), adapted=False)
    for request in (asked, other):
        engine.admit(request)
    for _ in range(3):
        engine.step([asked, other])
    engine.runner.pages.close(asked.slot)
    adapted = Request(asked.slot, 2 * CHUNK, 0.5, generator)
    known.open(adapted.slot, range(adapted.prompt_len), adapted=True)
    engine.admit(adapted)
    for _ in range(3):
        engine.step([adapted, other])


@pytest.mark.usefixtures("keydiff")
def test_an_observer_sees_the_scores_of_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing is evicted; a decoding request beside them has none."""
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    generator = torch.Generator().manual_seed(17)
    engine = Engine(4, "keydiff")
    decoding, whole = Request(2, 20, 1.0, generator), Request(0, 2 * CHUNK + 9, 1.0, generator, chunks_per_step=3)
    engine.admit(decoding)
    engine.step([decoding])
    seen: list[tuple[int, int, int]] = []

    def observe(layer: int, chunk: Chunk, scores: torch.Tensor) -> None:
        tokens = slice(chunk.position, chunk.position + chunk.num_tokens)
        key = whole.key[layer, tokens]
        expected = KeyDiff().score(key, key, key, context(engine.config, chunk.position))
        torch.testing.assert_close(scores, expected, rtol=0, atol=2e-6)
        seen.append((layer, chunk.position, chunk.num_tokens))

    engine.runner.observer = SimpleNamespace(observe=observe)
    engine.admit(whole)
    engine.step([decoding, whole])
    assert seen == [(layer, at, min(CHUNK, whole.prompt_len - at)) for layer in (0, 1) for at in (0, CHUNK, 2 * CHUNK)]


def test_as_many_blocks_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the driver says of the kernel that all batches use."""
    monkeypatch.setattr(splits, "resident_blocks", lambda kernel, device: 5)
    engine = Engine(4, "keydiff")
    made = DecodeSplits(engine.runner)
    assert made.plan.num_blocks == 5
    assert len(made.scratch.arrived) == 10
    monkeypatch.setenv(splits.SWITCH, "0")
    made = DecodeSplits(engine.runner, num_blocks=5)
    assert len(made.scratch.arrived) == 2 * SLOTS * HEADS  # a block for each head of the largest batch


@pytest.mark.parametrize("scorer", ["keydiff", "expected_attention"])
def test_warming_up_touches_no_page(monkeypatch: pytest.MonkeyPatch, scorer: str) -> None:
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    engine = Engine(4, scorer)
    angles = torch.outer(torch.arange(40.0), 0.5 ** torch.arange(DIM // 2))
    rope = Rope(torch.cat([angles.cos(), angles.sin()], dim=1))
    engine.layers[0].scorer = replace(engine.layers[0].scorer, rope=rope)  # which knows no position past the longest
    engine.pool.fill_(1.0)
    engine.runner.pages.rows.fill_(1)
    for num_tokens in (1, 40):
        parts = [torch.randn(num_tokens, heads, DIM) for heads in (HEADS * RATIO, HEADS, HEADS)]
        output = torch.full((num_tokens, HEADS * RATIO, DIM), float("nan"))
        engine.layers[0].forward(None, *parts, engine.pool, engine.builder.nobodys_prefill(num_tokens), output)
        lists = [part.transpose(0, 1) for part in parts[1:]]
        torch.testing.assert_close(output.double(), ragged_attention(parts[0], *lists, SCALE), rtol=1e-4, atol=1e-5)
    assert (engine.pool == 1).all()


def test_a_fork_begins_with_the_pages_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request retained after whole chunks serves another one with the same prefix, both running on."""
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    generator = torch.Generator().manual_seed(5)
    engine = Engine(4, "keydiff")
    first, fork = Request(1, 180, 0.5, generator), Request(0, 150, 0.5, generator)
    for name in ("query", "key", "value"):
        getattr(fork, name)[:, : 2 * CHUNK] = getattr(first, name)[:, : 2 * CHUNK]
    engine.admit(first)
    engine.step([first])
    engine.step([first])
    engine.admit(fork)
    engine.runner.flat[fork.slot] = engine.runner.flat[first.slot]
    fork.computed, fork.pages = first.computed, first.pages
    fork.kept = [list(layer) for layer in first.kept]
    for _ in range(4):
        engine.step([first, fork])
