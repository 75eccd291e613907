# SPDX-License-Identifier: Apache-2.0
"""Two ranks on this machine (vLLM's worker processes or Ray's, gloo) against one, and against the dense reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.compression.documents import random_scores
from tests.compression.gates import untrained_gate
from tests.engine.drive import Answer, Engine
from tests.engine.ray_cluster import ray_cluster
from tests.models import make_checkpoint

from vllm_tangram import LLM
from vllm_tangram.budget import PROFILE_RETENTIONS, RetentionPlan, RetentionProfile
from vllm_tangram.compression import get_scorer, select_tokens
from vllm_tangram.compression.competition import compete
from vllm_tangram.compression.document import DocumentScores
from vllm_tangram.compression.gate import Gate
from vllm_tangram.engine.profiling import profile_model
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.state import DenseState

pytestmark = pytest.mark.engine

CHUNK, WINDOW, NEW = 256, 16, 8
MODEL = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 8, "head_dim": 32}
GIB = 0.01  # of host memory, for sessions
PAGE = 2 * 32 * 2 * 32 * 4  # bytes on a rank
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 2 * CHUNK + 4,
}


def record_kept(worker: Any) -> None:
    """Remember from now on which tokens of every row the heads of this worker keep; None: all."""
    from vllm_tangram.engine.cpu import attention

    kept: dict[tuple[int, int], list[list[int]] | None] = {}
    prefill, select = attention.HeadGroupCPUAttention._prefill, attention.select_tokens
    now = []

    def _prefill(self: Any, row: Any, *args: Any) -> None:
        now[:] = [(self.index, row.position)]
        kept[now[0]] = None
        prefill(self, row, *args)

    def select_tokens(scores: torch.Tensor, keep: Sequence[int], **protected: int) -> torch.Tensor:
        indices = select(scores, keep, **protected)
        kept[now[0]] = [own.tolist() for own in torch.split(indices, list(keep))]
        return indices

    attention.HeadGroupCPUAttention._prefill = _prefill
    attention.select_tokens = select_tokens
    worker.recorded = kept


def take_kept(worker: Any) -> tuple[int, dict[tuple[int, int], list[list[int]] | None]]:
    """The worker's rank, and {(layer, position of the row): tokens kept by head} since the last call."""
    kept = dict(worker.recorded)
    worker.recorded.clear()
    return worker.rank, kept


def host_bytes(worker: Any) -> int:
    return worker.model_runner.host.pages.numel()


def fail_copies(worker: Any, rank: int) -> None:
    """Copies between pool and host memory fail on one rank, from now on."""

    def run(copies: Any) -> None:
        raise RuntimeError("the bus is gone")

    if worker.rank == rank:
        worker.model_runner.host.run = run


@dataclass
class Served:
    """Two ranks of a model, and what they are compared with."""

    engine: Engine
    checkpoint: Path
    dense: DenseModel
    plan: RetentionPlan
    document: DocumentScores

    @classmethod
    def start(cls, folder: Path, scorer: str, num_kv_heads: int, **vllms: Any) -> Served:
        checkpoint = make_checkpoint(folder / "model", num_key_value_heads=num_kv_heads, **MODEL)
        dense = DenseModel.load(checkpoint, dtype=torch.float32)
        gate = untrained_gate(dense.fingerprint) if scorer == "fastkvzip" else None
        files: dict[str, Any] = {"profile": str(folder / "profile.safetensors")}
        if gate is not None:
            files["gate"] = str(folder / "gate.safetensors")
            gate.save(Path(files["gate"]))
        shape = (2, 3, dense.num_layers, dense.num_kv_heads)  # heads that keep from a hundredth to nearly everything
        taste = np.random.default_rng(3).uniform(0.2, 3, shape[2:])
        levels = np.array([0.1, 0.25, 0.5])
        kept = np.broadcast_to(levels[:, None, None] ** (1 / taste), shape).astype(np.float32)
        digest = None if gate is None else gate.digest()
        RetentionProfile(
            levels, kept, scorer, dense.fingerprint, sinks=4, window=WINDOW, chunk_size=CHUNK, gate=digest
        ).save(Path(files["profile"]))
        document = random_scores(*prompts(2 * CHUNK + 1), dense.fingerprint)
        document.save(folder / "document")
        files["document_scores"] = [str(folder / "document")]
        ours = {"retention": 0.25, "scorer": scorer, "page_group_size": 2, "chunk_size": CHUNK, "window": WINDOW}
        llm = LLM(str(checkpoint), **OPTIONS, **ours, **files, **vllms)
        llm.collective_rpc(record_kept)
        engine = Engine(llm)
        return cls(engine, checkpoint, dense, engine.scheduler.plan, document)

    def reference(self, prompt: list[int], retention: float = 0.25) -> DenseState:
        """What one rank would keep that is given the budgets of two."""
        config, copies = self.plan.config, self.plan.sharding.copies
        groups = SimpleNamespace(group=self.plan.groups.group[:, ::copies])
        scorer = get_scorer(config.scorer, None if config.gate is None else Gate.load(config.gate))
        one_rank: Any = SimpleNamespace(config=config, groups=groups)
        return self.dense.prefill(prompt, scorer, one_rank, self.plan.schedule(retention))

    def check_kept(self, state: DenseState) -> int:
        """The ranks kept in their last prompt, of every head, what the reference keeps: returns the rows compared."""
        ranks = self.engine.llm.collective_rpc(take_kept)
        assert sorted(rank for rank, _ in ranks) == [0, 1]
        compared = 0
        for rank, rows in ranks:
            layers, heads = self.plan.sharding.part(rank)
            for (index, position), kept in rows.items():
                layer = layers.start + index
                end = min(position + CHUNK, state.num_tokens)
                for place, head in enumerate(range(self.dense.num_kv_heads)[heads]):
                    expected = state.retained[layer, head, position:end].nonzero()[:, 0].tolist()
                    assert expected == (list(range(end - position)) if kept is None else kept[place])
                    compared += 1
        return compared

    def check_failing_copies(self, rank: int) -> None:
        """Where they fail on one rank, what the others copied does not count either."""
        prompt, *others = prompts(611, 815, 816, 817)
        (first,) = self.engine.ask([prompt], NEW)
        for other in others:  # two fill the pool
            self.engine.ask([other], NEW, retention=1.0)
        spilled = self.engine.llm.tangram_stats()
        self.engine.llm.collective_rpc(fail_copies, args=(rank,))
        (again,) = self.engine.ask([prompt], NEW)
        stats = self.engine.llm.tangram_stats()
        assert stats["sessions_restored"] == spilled["sessions_restored"] + 1, "it was to come from the host"
        assert (again.cached, stats["sessions_spilled"], stats["host_pages_in_use"]) == (0, 0, 0)
        assert again.tokens == first.tokens == self.dense.generate(self.reference(prompt), NEW)
        assert self.engine.free_pages == self.engine.total_pages
        (then,) = self.engine.ask([prompt], NEW)
        assert (then.cached, then.tokens) == (2 * CHUNK, first.tokens)

    def check_document(self) -> int:
        """The ranks keep of a document what its scores of their own heads say: returns the rows compared."""
        self.engine.llm.collective_rpc(take_kept)
        prompt = [*self.document.ids.tolist(), *range(30)]
        self.engine.ask([prompt], 1, skip_reading_prefix_cache=True)
        schedule, copies, compared = self.plan.schedule(0.25), self.plan.sharding.copies, 0
        for rank, rows in self.engine.llm.collective_rpc(take_kept):
            layers, heads = self.plan.sharding.part(rank)
            for index, start in ((index, start) for index, start in rows if start < 2 * CHUNK):
                layer, held = layers.start + index, slice(start, start + CHUNK)
                lengths = schedule.lengths(held.stop, len(prompt)) - schedule.lengths(start, len(prompt))
                keep = lengths[self.plan.groups.group[layer, ::copies][heads]].tolist()
                scores = self.document.scores[layer, heads, held].float()
                best = select_tokens(scores, keep, protect_head=max(0, 4 - start), protect_tail=WINDOW)
                kept = rows[index, start]
                assert kept is not None
                assert kept == [own.tolist() for own in torch.split(best, keep)]
                compared += len(kept)
        return compared


@pytest.fixture(
    scope="module",
    params=["processes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ray", "ray, compiled graph"))],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """4 KV heads, two a rank; a pool of about 230 pages, and host memory behind it."""
    options: dict[str, Any] = {"kv_cache_memory_bytes": 256 * PAGE, "session_spill_gib": GIB}
    with contextlib.ExitStack() as stack:
        if request.param != "processes":
            stack.enter_context(ray_cluster(num_ranks=2, compiled_graph="compiled" in request.param))
            options["distributed_executor_backend"] = "ray"
        served = Served.start(tmp_path_factory.mktemp("ranks"), "fastkvzip", 4, tensor_parallel_size=2, **options)
        stack.callback(served.engine.close)
        yield served


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(length).integers(0, 256, length).tolist() for length in lengths]


def test_retention_one_answers_as_one_rank_of_stock(served: Served) -> None:
    import vllm

    asked = prompts(5, 131, 600)
    stock = Engine(vllm.LLM(str(served.checkpoint), kv_cache_memory_bytes=64 << 20, **OPTIONS))
    try:
        expected = stock.ask(asked, NEW)
    finally:
        stock.close()
    for ours, theirs in zip(served.engine.ask(asked, NEW, retention=1.0), expected, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-3)


def test_ranks_keep_what_one_would(served: Served) -> None:
    """Also of a last chunk that ends inside a block; each head by its group's budget, the largest of both ranks."""
    plan = served.plan
    assert plan.groups.group.shape == (5, 4)
    assert len(set(plan.schedule(0.25).kept[-1].tolist())) > 1, "groups must differ for this to say anything"
    for prompt in prompts(512, 801):
        served.engine.llm.collective_rpc(take_kept)
        (answer,) = served.engine.ask([prompt], NEW, skip_reading_prefix_cache=True)
        state = served.reference(prompt)
        assert state.retained.float().mean() < 0.5
        assert served.check_kept(state) == 5 * 4 * -(-len(prompt) // CHUNK)
        assert answer.tokens == served.dense.generate(state, NEW)


def test_ranks_select_a_document_by_the_scores_of_their_heads(served: Served) -> None:
    assert served.check_document() == 5 * 4 * 2


def test_memory_is_that_of_all_ranks(served: Served) -> None:
    memory = served.engine.llm.tangram_memory(600, 1, 1.0)
    assert memory["full_kv_bytes"] == memory["bytes"] == 5 * 4 * 19 * PAGE // 2  # 19 blocks of 20 members
    assert served.engine.llm.tangram_memory(600)["bytes"] < 0.5 * memory["bytes"]
    per_rank = served.engine.llm.collective_rpc(host_bytes)
    assert per_rank[0] == per_rank[1]
    assert 0.99 * GIB * 2**30 < sum(per_rank) <= GIB * 2**30


def test_sessions_come_back_from_the_host_of_every_rank(served: Served) -> None:
    engine = served.engine
    (prompt,) = prompts(610)

    def ask(retention: float, *asked: list[int]) -> list[Answer]:
        return [engine.ask([each], NEW, retention=retention)[0] for each in asked]

    (first,) = ask(0.25, prompt)
    assert first.cached == 0
    ask(1.0, *prompts(811, 812, 813, 814))  # two fill the pool
    before = engine.llm.tangram_stats()
    assert before["sessions_spilled"] > 0
    (again,) = ask(0.25, prompt)
    assert again.cached == 2 * CHUNK
    assert engine.llm.tangram_stats()["sessions_restored"] == before["sessions_restored"] + 1
    assert again.tokens == first.tokens == served.dense.generate(served.reference(prompt), NEW)
    stats = engine.llm.tangram_stats()
    assert stats["page_bytes"] == 2 * PAGE
    assert stats["pages_reclaimed"] == 0
    assert engine.llm.tangram_sessions()[0]["bytes"] % stats["page_bytes"] == 0


def test_copies_that_fail_on_the_rank_whose_output_nobody_reads(served: Served) -> None:
    served.check_failing_copies(rank=1)


def test_a_profile_is_that_of_the_whole_model(served: Served) -> None:
    """Heads compete over the ranks, as the reference's do; samples of one chunk, which nothing before it changes."""
    asked = prompts(100, 128)
    profile = profile_model(served.engine.llm, asked, domains=("a", "b"), source="test")
    assert profile.model == served.dense.fingerprint
    scorer, empty = get_scorer("fastkvzip", Gate.load(served.plan.config.gate or "")), served.dense.empty()
    for number, ids in enumerate(asked):
        read = served.dense.read(ids, [scorer], sinks=4, window=WINDOW, after=empty)
        counts = compete(read.scores[scorer.name], PROFILE_RETENTIONS, protect_head=4, protect_tail=WINDOW)
        np.testing.assert_allclose(profile.kept[number] * len(ids), counts, atol=1.01)  # two scores may be nearly equal
        assert np.abs(profile.kept[number] * len(ids) - counts.numpy()).mean() < 0.01


@pytest.mark.slow  # an engine each
@pytest.mark.parametrize(
    ("scorer", "num_kv_heads", "parallel", "num_rows"),
    [
        # Each rank serves half of the only head's queries, and a scorer that mixes heads sees all of them.
        ("tova", 1, {"tensor_parallel_size": 2}, 2 * 5 * 4),
        # Stages of three layers and two; the gate of a layer is found wherever it is.
        ("fastkvzip", 2, {"pipeline_parallel_size": 2}, 2 * 5 * 4),
    ],
    ids=["copies of a head", "stages"],
)
def test_other_ranks(tmp_path: Path, scorer: str, num_kv_heads: int, parallel: dict[str, int], num_rows: int) -> None:
    served = Served.start(tmp_path, scorer, num_kv_heads, kv_cache_memory_bytes=64 << 20, **parallel)
    try:
        assert served.plan.groups.num_ranks == 2
        for prompt in prompts(801, 5):
            (full,) = served.engine.ask([prompt], NEW, retention=1.0)
            assert full.tokens == served.dense.generate(served.reference(prompt, 1.0), NEW)
        served.engine.llm.collective_rpc(take_kept)
        (prompt,) = prompts(802)
        (answer,) = served.engine.ask([prompt], NEW)
        state = served.reference(prompt)
        assert state.retained.float().mean() < 0.5
        assert served.check_kept(state) == num_rows
        assert answer.tokens == served.dense.generate(state, NEW)
        assert served.check_document() == num_rows // 4 * 2
        together = [each.tokens for each in served.engine.ask(prompts(802, 803, 804), NEW)]
        assert together == [served.dense.generate(served.reference(each), NEW) for each in prompts(802, 803, 804)]
    finally:
        served.engine.close()


@pytest.mark.slow  # an engine
def test_copies_that_fail_in_the_first_stage(tmp_path: Path) -> None:
    options = {"pipeline_parallel_size": 2, "kv_cache_memory_bytes": 256 * PAGE, "session_spill_gib": GIB}
    served = Served.start(tmp_path, "fastkvzip", 4, **options)
    try:
        served.check_failing_copies(rank=0)
    finally:
        served.engine.close()
