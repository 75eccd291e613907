# SPDX-License-Identifier: Apache-2.0
"""An engine that knows a document keeps of it what the dense reference keeps by KVzip's scores, and no other prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from tests.compression.gates import untrained_gate
from tests.engine.drive import Engine
from tests.engine.test_tensor_parallel import record_kept, take_kept
from tests.models import make_checkpoint
from torch import Tensor

from vllm_tangram import LLM, RetentionProfile
from vllm_tangram.compression import get_scorer, select_tokens
from vllm_tangram.compression.document import DocumentScores
from vllm_tangram.compression.gate import Gate
from vllm_tangram.engine.cpu import attention
from vllm_tangram.eval.dense import DenseChunk, DenseModel, DenseState
from vllm_tangram.gates.documents import document_ids, score_document

pytestmark = pytest.mark.engine

CHUNK, WINDOW, SINKS, NEW = 128, 16, 4, 4
RULES = topics["assert"].strip()[:330]  # ends within the third chunk
SYSTEM = [{"role": "system", "content": RULES}]


@dataclass
class Served:
    """An engine that knows one document, and what it is compared with."""

    engine: Engine
    dense: DenseModel
    gate: Gate
    document: DocumentScores

    def prompt(self, question: str, rules: str = RULES) -> list[int]:
        """As vLLM makes it of a chat."""
        chat: Any = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
        output, *_ = self.engine.llm.chat([chat], Engine.sampling(1), use_tqdm=False)
        return list(output.prompt_token_ids)

    def kept(self, prompt: list[int], **params: Any) -> tuple[dict[tuple[int, int], Any], list[int], int]:
        """What every chunk that is computed keeps, the answer, and the tokens that are not computed."""
        self.engine.llm.collective_rpc(take_kept)
        (answer,) = self.engine.ask([prompt], NEW, **params)
        ((_, kept),) = self.engine.llm.collective_rpc(take_kept)
        return {key: rows for key, rows in kept.items() if key[1] < len(prompt)}, answer.tokens, answer.cached

    def reference(self, prompt: list[int], *, known: bool) -> DenseState:
        """Chunk by chunk; a chunk within the document by its scores, one that it ends in by both."""
        plan, scorer, state = self.engine.scheduler.plan, get_scorer("fastkvzip", self.gate), self.dense.empty()
        schedule = plan.schedule(plan.config.retention)
        for start in range(0, len(prompt), CHUNK):
            ids = prompt[start : start + CHUNK]
            read = self.dense.read(ids, [scorer], sinks=SINKS, window=WINDOW, after=state)
            scores = read.scores["fastkvzip"]
            own = self.document.scores[..., start : start + len(ids)].float()
            if known and own.shape[-1] == len(ids):
                scores = own
            elif known and own.shape[-1]:
                lengths = schedule.lengths(start + len(ids), len(prompt)) - schedule.lengths(start, len(prompt))
                scores = both(scores, own, lengths[plan.groups.group], start)
            state = DenseChunk(read.state, start, {"x": scores}).compress("x", plan, schedule, len(prompt))
        return state


def both(scores: Tensor, known: Tensor, keep: np.ndarray, start: int) -> Tensor:
    """1 for the tokens to keep: of the document as many as the scorer would, but the best by its own scores."""
    chosen = torch.zeros_like(scores)
    for layer, head in np.ndindex(keep.shape):
        plain = select_tokens(
            scores[layer, head][None],
            [int(keep[layer, head])],
            protect_head=max(0, SINKS - start),
            protect_tail=WINDOW,
        ).tolist()
        first, last = max(0, SINKS - start), min(known.shape[-1], scores.shape[-1] - WINDOW)
        inside = [token for token in plain if first <= token < last]
        ranked = sorted(range(first, last), key=lambda token: (float(known[layer, head, token]), token))
        tokens = set(plain) - set(inside) | set(ranked[len(ranked) - len(inside) :])
        chosen[layer, head, sorted(tokens)] = 1
    return chosen


def assert_kept(rows: dict[tuple[int, int], Any], state: DenseState) -> None:
    for (layer, position), kept in rows.items():
        end = min(position + CHUNK, state.num_tokens)
        for head in range(state.retained.shape[1]):
            expected = state.retained[layer, head, position:end].nonzero()[:, 0].tolist()
            assert expected == (list(range(end - position)) if kept is None else kept[head]), (layer, position, head)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("known")
    checkpoint = make_checkpoint(
        folder / "model", num_hidden_layers=3, num_key_value_heads=4, hidden_size=64, head_dim=32
    )
    dense = DenseModel.load(checkpoint, dtype=torch.float32)
    files = {name: str(folder / f"{name}.safetensors") for name in ("gate", "profile")}
    gate = untrained_gate(dense.fingerprint)
    gate.save(Path(files["gate"]))
    levels, taste = np.array([0.1, 0.25, 0.5]), np.random.default_rng(3).uniform(0.2, 3, (3, 4))
    kept = np.broadcast_to(levels[:, None, None] ** (1 / taste), (2, 3, 3, 4)).astype(np.float32)
    RetentionProfile(
        levels, kept, "fastkvzip", dense.fingerprint, sinks=SINKS, window=WINDOW, chunk_size=CHUNK, gate=gate.digest()
    ).save(Path(files["profile"]))
    document = score_document(dense, document_ids(dense.tokenizer, SYSTEM), {})
    document.save(folder / "document")
    llm = LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=2 * CHUNK + 4,
        kv_cache_memory_bytes=16 << 20,
        scorer="fastkvzip",
        page_group_size=2,
        chunk_size=CHUNK,
        window=WINDOW,
        document_scores=[str(folder / "document")],
        **files,
    )
    originals = attention.HeadGroupCPUAttention._prefill, attention.select_tokens
    llm.collective_rpc(record_kept)
    engine = Engine(llm)
    yield Served(engine, dense, gate, document)
    engine.close()
    attention.HeadGroupCPUAttention._prefill, attention.select_tokens = originals  # type: ignore[method-assign]


def chunks(prompt: Sequence[int]) -> set[int]:
    return set(range(0, len(prompt), CHUNK))


def test_chats_begin_with_the_documents_tokens(served: Served) -> None:
    ids = served.document.ids.tolist()
    assert 2 * CHUNK < len(ids) < 3 * CHUNK
    assert served.prompt("Why?")[: len(ids)] == ids


@pytest.mark.parametrize("length", [20, 300])
def test_keeps_what_the_reference_keeps_by_kvzips_scores(served: Served, length: int) -> None:
    """The question ends in the document's last chunk, or goes on for two more, which the gate scores."""
    prompt = served.prompt("abcdefghij" * (length // 10))
    rows, tokens, cached = served.kept(prompt, skip_reading_prefix_cache=True)
    state = served.reference(prompt, known=True)
    assert cached == 0
    assert {position for _, position in rows} == chunks(prompt)
    assert state.retained.float().mean() < 0.5
    assert_kept(rows, state)
    assert tokens == served.dense.generate(state, NEW)
    for start in range(0, 3 * CHUNK, CHUNK):  # or else nothing above tells the gate's choice from the document's
        part = slice(start, start + CHUNK)
        without = served.reference(prompt, known=False)
        assert not torch.equal(state.retained[..., part], without.retained[..., part])


def test_another_turn_begins_with_the_documents_pages(served: Served) -> None:
    first, second = served.prompt("What is assert?"), served.prompt("And what is __debug__? " * 9)
    served.engine.llm.tangram_drop_sessions()
    served.kept(first)
    rows, tokens, cached = served.kept(second)
    assert cached == 2 * CHUNK
    assert {position for _, position in rows} == chunks(second) - {0, CHUNK}
    state = served.reference(second, known=True)
    assert_kept(rows, state)
    assert tokens == served.dense.generate(state, NEW)


@pytest.mark.parametrize(("place", "own_chunks"), [(40, 0), (200, 1)])
def test_another_document_is_scored_by_the_gate(served: Served, place: int, own_chunks: int) -> None:
    """From the chunk on that has another token; what was before is the same for both and selected by the scores."""
    prompt = served.prompt("Why?", RULES[:place] + "#" + RULES[place + 1 :])
    document = served.document.ids.tolist()
    assert sum(a != b for a, b in zip(prompt, document, strict=False)) == 1
    rows, _, _ = served.kept(prompt, skip_reading_prefix_cache=True)
    if own_chunks == 0:
        assert_kept(rows, served.reference(prompt, known=False))
    before = {key: kept for key, kept in rows.items() if key[1] < own_chunks * CHUNK}
    assert len(before) == own_chunks * served.dense.num_layers
    assert_kept(before, served.reference(prompt, known=True))
