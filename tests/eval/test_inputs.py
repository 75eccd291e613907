# SPDX-License-Identifier: Apache-2.0
"""What scorers are given beside queries, keys and values, against what the model's own layers compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from vllm_tangram.budget import model_fingerprint
from vllm_tangram.compression import ChunkContext, Scorer
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.inputs import rope_of

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = [
    pytest.param(LlamaConfig(**SIZES), id="llama"),
    pytest.param(LlamaConfig(**SIZES, rope_parameters=YARN), id="llama-yarn"),
    pytest.param(Qwen2Config(**SIZES), id="qwen2"),
    pytest.param(Qwen3Config(**SIZES), id="qwen3"),  # normalises queries before it turns them
    pytest.param(MistralConfig(**SIZES, sliding_window=None), id="mistral"),
    pytest.param(GlmConfig(**SIZES), id="glm"),  # turns half of a head, in neighbouring pairs
]
CHUNKS = (40, 1, 23)


class Recorder(Scorer):
    """Scores nothing, and remembers what it was shown: per chunk and layer."""

    name = "recorder"
    paper = "none"
    needs = frozenset({"rope", "hidden"})

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, ChunkContext]] = []

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        self.seen.append((query, context))
        return torch.zeros(key.shape[1], len(key))


def random_model(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="tangram_dense", dtype=torch.float32).eval()


@pytest.mark.parametrize("config", CONFIGS)
def test_scorers_see_hidden_states_and_queries_before_rope(config: PretrainedConfig) -> None:
    model = random_model(config)
    dense = DenseModel(model, None, model_fingerprint(config.to_dict(), None))
    projected: list[Tensor] = []  # before RoPE and after a norm of queries, if there is one
    normed: list[Tensor] = []
    for layer in model.model.layers:
        source = getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj)
        source.register_forward_hook(lambda module, args, output: projected.append(output))
        layer.input_layernorm.register_forward_hook(lambda module, args, output: normed.append(output))

    recorder, state = Recorder(), dense.empty()
    tokens = torch.randint(128, (sum(CHUNKS),), generator=torch.Generator().manual_seed(1)).tolist()
    for count in CHUNKS:
        start = state.num_tokens
        state = dense.read(tokens[start : start + count], [recorder], sinks=4, window=8, after=state).state

    assert len(recorder.seen) == len(projected) == 2 * len(CHUNKS)
    for index, ((query, context), before, hidden) in enumerate(zip(recorder.seen, projected, normed, strict=True)):
        chunk, layer = divmod(index, 2)
        assert (context.layer, context.start) == (layer, sum(CHUNKS[:chunk]))
        assert context.hidden is not None
        assert torch.equal(context.hidden, hidden[0])
        assert context.rope is not None
        undone = context.rope.unrotate(query, context.start)
        torch.testing.assert_close(undone, before.view(CHUNKS[chunk], 4, 16), rtol=1e-5, atol=1e-5)


def test_nothing_is_captured_without_need() -> None:
    model = random_model(LlamaConfig(**SIZES))
    dense = DenseModel(model, None, model_fingerprint(model.config.to_dict(), None))
    recorder = Recorder()
    recorder.needs = frozenset()  # type: ignore[misc]
    dense.read([1, 2, 3], [recorder], sinks=4, window=8, after=dense.empty())
    assert [(context.rope, context.hidden) for _, context in recorder.seen] == [(None, None)] * 2
    assert not any(block.self_attn._forward_pre_hooks for block in model.model.layers)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "depend on the prompt's length",
            id="dynamic",
        ),
        pytest.param(SmolLM3Config(**SIZES, no_rope_layers=[1, 0]), "one rotary embedding for all layers", id="some"),
        pytest.param(
            GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}),
            "attention blocks",
            id="blocks",
        ),
    ],
)
def test_refuses_what_it_cannot_undo(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(TangramError, match=reason):
        rope_of(random_model(config))
