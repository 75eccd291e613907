# SPDX-License-Identifier: Apache-2.0
"""The engine answers as the dense reference does: same tokens, same probabilities."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from tests.compression.gates import untrained_gate

from vllm_tangram import LLM, RetentionProfile, TangramConfig
from vllm_tangram.budget import RetentionPlan
from vllm_tangram.compression import get_scorer, needs_gate
from vllm_tangram.compression.gate import Gate
from vllm_tangram.embedded import embedded_model
from vllm_tangram.eval.dense import DenseModel

pytestmark = pytest.mark.engine

NEW_TOKENS = 16
PROMPT_TOKENS = (1536, 1391)  # whole chunks, and a last chunk that ends inside a block


@pytest.fixture(scope="module")
def dense() -> DenseModel:
    return DenseModel.load(embedded_model(), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(dense: DenseModel) -> list[list[int]]:
    ids = dense.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))[:30_000])
    return [ids[start : start + count] for start, count in zip((0, 2000), PROMPT_TOKENS, strict=True)]


def skewed_profile(dense: DenseModel, scorer: str, gate: Gate | None) -> RetentionProfile:
    """Heads that keep from 2 % to nearly everything, in no order of layers."""
    levels = np.array([0.1, 0.25, 0.5])
    taste = np.random.default_rng(7).uniform(0.2, 4.0, (dense.num_layers, dense.num_kv_heads))
    kept = levels[None, :, None, None] ** (1 / taste) * np.array([0.95, 1.0])[:, None, None, None]
    digest = None if gate is None else gate.digest()
    return RetentionProfile(levels, kept, scorer, dense.fingerprint, sinks=4, window=64, chunk_size=512, gate=digest)


@pytest.fixture(params=["snapkv", "keydiff", "expected_attention", "fastkvzip"])
def config(request: pytest.FixtureRequest, dense: DenseModel, tmp_path: Path) -> TangramConfig:
    files, gate = {"profile": str(tmp_path / "profile.safetensors")}, None
    if needs_gate(request.param):
        gate = untrained_gate(dense.fingerprint)
        gate.save(tmp_path / "gate.safetensors")
        files["gate"] = str(tmp_path / "gate.safetensors")
    skewed_profile(dense, request.param, gate).save(Path(files["profile"]))
    return TangramConfig(retention=0.25, scorer=request.param, page_group_size=4, chunk_size=512, **files)


def test_same_answers(config: TangramConfig, dense: DenseModel, prompts: list[list[int]]) -> None:
    from vllm import SamplingParams

    llm = LLM(
        str(embedded_model()),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=2,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        **config.model_dump(exclude={"budgets"}),
    )
    try:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()

    assert config.profile is not None
    plan = RetentionPlan(
        config,
        RetentionProfile.load(config.profile),
        num_layers=dense.num_layers,
        num_kv_heads=dense.num_kv_heads,
        block_size=32,
        max_tokens=2048,
    )
    for ids, output in zip(prompts, outputs, strict=True):
        scorer = get_scorer(config.scorer, None if config.gate is None else Gate.load(config.gate))
        state = dense.prefill(ids, scorer, plan, plan.schedule(config.retention))
        assert state.retained.float().mean() < 0.3
        completion = output.outputs[0]
        generated = list(completion.token_ids)
        assert dense.generate(state, NEW_TOKENS) == generated
        (expected,), _ = dense.score_answer([state], [], generated)
        got = [step[token].logprob for step, token in zip(completion.logprobs, generated, strict=True)]
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-3, rtol=0)
