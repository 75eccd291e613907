# SPDX-License-Identifier: Apache-2.0
"""Scorers in the engine are given what the dense reference gives them, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.engine.drive import SMALL, Engine
from torch import Tensor, nn
from vllm.config import CUDAGraphMode

from vllm_tangram.budget import RetentionPlan
from vllm_tangram.compression import ChunkContext, Scorer
from vllm_tangram.compression.scorers import registry
from vllm_tangram.engine import inputs
from vllm_tangram.engine.inputs import HiddenStates, parent_of, rope_of
from vllm_tangram.engine.setup import config_of
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.dense import DenseModel

PROMPT_TOKENS = (3 * 128, 200)


class Recorder(Scorer):
    """Keeps the newest tokens, and remembers what it was shown: by layer and position of the chunk."""

    name = "recorder"
    paper = "none"
    needs = frozenset({"rope", "hidden"})
    seen: ClassVar[list[tuple[int, int, Tensor, Tensor]]] = []

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        assert context.rope is not None
        assert context.hidden is not None
        before = context.rope.unrotate(query, context.start)
        self.seen.append((context.layer, context.start, before, context.hidden.float().clone()))
        return torch.zeros(key.shape[1], len(key))


def taken() -> list[tuple[int, int, Tensor, Tensor]]:
    """What was seen since the last call."""
    seen = list(Recorder.seen)
    Recorder.seen.clear()
    return seen


@pytest.mark.engine
@pytest.mark.parametrize(
    "compiled", [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.slow)]
)
def test_same_inputs_as_the_dense_model(
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
    make_engine: Callable[..., Engine],
    embedded: Path,
    token_ids: list[int],
) -> None:
    monkeypatch.setitem(registry, "recorder", Recorder)
    options = SMALL | {"scorer": "recorder", "budgets": "uniform", "enforce_eager": not compiled}
    engine = make_engine(**(options | {"max_num_batched_tokens": 600}))  # a step takes all chunks of both prompts
    prompts = [token_ids[start : start + count] for start, count in zip((0, 1000), PROMPT_TOKENS, strict=True)]
    engine.ask(prompts, 4)
    shown = taken()

    dense = DenseModel.load(embedded, dtype=torch.float32)
    config = config_of(engine.llm.llm_engine.vllm_config)
    plan = RetentionPlan(
        config, None, num_layers=dense.num_layers, num_kv_heads=dense.num_kv_heads, block_size=32, max_tokens=1024
    )
    for prompt in prompts:
        dense.prefill(prompt, Recorder(), plan, plan.schedule(config.retention))
    expected = taken()
    assert len(shown) == len(expected) == dense.num_layers * 5
    for layer, start, query, hidden in shown:
        # Both prompts have a first chunk of the same size: it must be one of the two, and no other.
        candidates = [seen[2:] for seen in expected if seen[:2] == (layer, start) and len(seen[2]) == len(query)]
        close = [
            torch.allclose(query, other, rtol=1e-3, atol=2e-3) and torch.allclose(hidden, its, rtol=1e-3, atol=2e-3)
            for other, its in candidates
        ]
        assert close.count(True) == 1, (layer, start, [(query - other).abs().max() for other, _ in candidates])


class Block(nn.Module):
    """An attention block as far as scorers look at it."""

    def __init__(self, *ropes: nn.Module, projection: bool = True) -> None:
        super().__init__()
        self.attn = nn.Identity()
        for index, rope in enumerate(ropes):
            self.add_module(f"rotary_{index}", rope)
        if projection:
            self.qkv_proj = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def rotary(**options: Any) -> nn.Module:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    options = {"rotary_dim": 16, "is_neox_style": True} | options
    with set_current_vllm_config(VllmConfig()):
        return RotaryEmbedding(16, max_position_embeddings=128, base=10000, dtype=torch.float32, **options)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rope_is_what_vllm_applies(rotary_dim: int, interleaved: bool) -> None:
    module = rotary(rotary_dim=rotary_dim, is_neox_style=not interleaved)
    own, shared = Block(module), nn.Sequential(Block(), Block(), module)
    query = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(0))
    rotated, _ = module.forward_native(torch.arange(70, 120), query.reshape(50, -1).clone())
    ropes: dict[int, Any] = {}
    for model, block in ((own, own), (shared, shared[1])):
        rope = rope_of(model, parent_of(model, block.attn), ropes)
        torch.testing.assert_close(rope.unrotate(rotated.view(50, 3, 16), 70), query, rtol=1e-5, atol=1e-5)
    assert len(ropes) == 1  # one module, one table


def test_refuses_unclear_ropes() -> None:
    none = Block()
    with pytest.raises(TangramError, match="no rotary embedding"):
        rope_of(none, none, {})
    two = Block(rotary(), rotary())
    with pytest.raises(TangramError, match="2 rotary embeddings"):
        rope_of(two, two, {})
    elsewhere = nn.Sequential(Block(), Block(rotary()), Block(rotary()))
    with pytest.raises(TangramError, match="2 rotary embeddings"):
        rope_of(elsewhere, elsewhere[0], {})
    odd = rotary()
    odd.cos_sin_cache = torch.randn(128, 16)
    with pytest.raises(TangramError, match="RotaryEmbedding: the table"):
        rope_of(Block(odd), Block(odd), {})


def test_refuses_blocks_whose_input_is_unknown() -> None:
    holder = HiddenStates.__new__(HiddenStates)
    with pytest.raises(TangramError, match="neither qkv_proj nor an input hidden_states"):
        holder.tap(Block(projection=False))


@pytest.fixture
def holder() -> HiddenStates:
    """A buffer of six tokens."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_hidden_size=lambda: 8, dtype=torch.float32),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=6),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    return HiddenStates(config, "cpu")  # type: ignore[arg-type]


def step(mode: CUDAGraphMode, *, prefill: bool | None) -> Any:
    """A step's context; ``prefill`` None: the model is warmed up."""
    metadata = None if prefill is None else {"layer": SimpleNamespace(has_prefill=prefill)}
    return SimpleNamespace(cudagraph_runtime_mode=mode, attn_metadata=metadata)


@pytest.mark.parametrize(
    ("mode", "prefill", "copied"),
    [
        (CUDAGraphMode.NONE, True, True),
        (CUDAGraphMode.NONE, False, False),
        (CUDAGraphMode.NONE, None, True),
        (CUDAGraphMode.FULL, False, False),  # captured once, replayed for steps that decode
        (CUDAGraphMode.PIECEWISE, False, True),  # captured once, replayed for any step
        (CUDAGraphMode.PIECEWISE, None, True),
    ],
)
def test_copies_unless_nothing_will_be_scored(
    holder: HiddenStates, mode: CUDAGraphMode, prefill: bool | None, copied: bool
) -> None:
    hidden = torch.ones(4, 8)
    holder.keep(hidden, step(mode, prefill=prefill))
    assert torch.equal(holder.buffer[:4], hidden if copied else torch.zeros(4, 8))
    assert not holder.buffer[4:].any()


def test_notices_a_projection_that_is_not_called_as_a_module(
    holder: HiddenStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = step(CUDAGraphMode.NONE, prefill=True)
    monkeypatch.setattr(inputs, "get_forward_context", lambda: eager)
    for _ in range(2):
        holder.keep(torch.ones(4, 8), eager)
        holder.expect()
    with pytest.raises(TangramError, match="cannot see its hidden states"):
        holder.expect()
