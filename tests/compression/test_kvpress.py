# SPDX-License-Identifier: Apache-2.0
"""Every scorer against its counterpart in kvpress (https://github.com/NVIDIA/kvpress), on the same tensors.

Where ours differs on purpose (the scorer's docstring says why), the difference is taken out here, exactly.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.compression.gates import untrained_gate
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from vllm_tangram.budget import model_fingerprint
from vllm_tangram.compression import ChunkContext, Scorer, get_scorer, select_tokens
from vllm_tangram.eval.dense import DenseModel

if (_found := importlib.util.find_spec("kvpress")) is None:
    pytest.skip("kvpress is not installed: pip install --no-deps kvpress==0.5.5", allow_module_level=True)
elif "kvpress" not in sys.modules:
    # Its __init__ patches transformers and imports libraries for data sets; its modules need neither.
    _package = ModuleType("kvpress")
    _package.__path__ = list(_found.submodule_search_locations or ())
    sys.modules["kvpress"] = _package

from kvpress.presses.expected_attention_press import ExpectedAttentionPress
from kvpress.presses.fastkvzip_press import FastKVzipGate
from kvpress.presses.keydiff_press import KeyDiffPress
from kvpress.presses.knorm_press import KnormPress
from kvpress.presses.snapkv_press import SnapKVPress
from kvpress.presses.streaming_llm_press import StreamingLLMPress
from kvpress.presses.tova_press import TOVAPress

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # large enough that heads attend to few tokens
    "pad_token_id": 0,
}
CONFIGS: list[PretrainedConfig] = [
    LlamaConfig(**SIZES),
    Qwen2Config(**SIZES),
    Qwen3Config(**SIZES),
    MistralConfig(**SIZES, sliding_window=None),
]
NUM_TOKENS, SINKS, WINDOW = 200, 4, 64


class Recorder(Scorer):
    """Remembers what each layer's scorer is shown."""

    name = "recorder"
    paper = "none"
    needs = frozenset({"rope", "hidden"})

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor, Tensor, ChunkContext]] = []

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        self.layers.append((query, key, value, context))
        return torch.zeros(key.shape[1], len(key))


@dataclass
class Layer:
    """One layer's tensors for ours and for kvpress."""

    module: Any
    position_embeddings: tuple[Tensor, Tensor]
    shown: tuple[Tensor, Tensor, Tensor, ChunkContext]

    @property
    def key(self) -> Tensor:
        return self.shown[1]

    def ours(self, name: str) -> Tensor:
        return get_scorer(name).score(*self.shown)

    def theirs(self, press: Any) -> Tensor:
        """[H, T]."""
        _, key, value, context = self.shown
        assert context.hidden is not None
        batched = (x.transpose(0, 1)[None] for x in (key, value))
        kwargs = {"position_embeddings": self.position_embeddings}
        return press.score(self.module, context.hidden[None], *batched, None, kwargs)[0]


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config.model_type)
def layers(request: pytest.FixtureRequest) -> list[Layer]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(request.param, attn_implementation="tangram_dense", dtype=torch.float32)
    dense = DenseModel(model, None, model_fingerprint(request.param.to_dict(), None))
    recorder = Recorder()
    tokens = torch.randint(128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    dense.read(tokens, [recorder], sinks=SINKS, window=WINDOW, after=dense.empty())
    rotary = model.model.rotary_emb
    positions = rotary(torch.empty(0), torch.arange(NUM_TOKENS)[None])
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = rotary  # as kvpress does
    blocks = [layer.self_attn for layer in model.model.layers]
    return [Layer(block, positions, shown) for block, shown in zip(blocks, recorder.layers, strict=True)]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@torch.inference_mode()
def test_keydiff(layers: list[Layer]) -> None:
    for layer in layers:
        torch.testing.assert_close(layer.ours("keydiff"), layer.theirs(KeyDiffPress()), rtol=1e-4, atol=1e-6)


@torch.inference_mode()
def test_knorm_is_relative_to_the_head(layers: list[Layer]) -> None:
    for layer in layers:
        close(layer.ours("knorm") * layer.key.norm(dim=-1).mean(0)[:, None], layer.theirs(KnormPress()))


@torch.inference_mode()
def test_snapkv_pools_over_neighbours_that_exist(layers: list[Layer]) -> None:
    past = NUM_TOKENS - WINDOW
    neighbours = torch.tensor([3, 4, *[5] * (past - 4), 4, 3])  # kvpress divides by 5 everywhere
    for layer in layers:
        close(layer.ours("snapkv")[:, :past] * neighbours / 5, layer.theirs(SnapKVPress())[:, :past])


@torch.inference_mode()
def test_tova(layers: list[Layer]) -> None:
    for layer in layers:
        close(layer.ours("tova")[:, :-1], layer.theirs(TOVAPress())[:, :-1])


@torch.inference_mode()
def test_expected_attention(layers: list[Layer]) -> None:
    press = ExpectedAttentionPress(epsilon=0.01, n_sink=SINKS)
    for layer in layers:
        ours, theirs = layer.ours("expected_attention"), layer.theirs(press)
        close(ours[:, SINKS:], theirs[:, SINKS:])
        for scores in (ours, theirs):
            assert scores[:, :SINKS].min() > scores[:, SINKS:].max()


@torch.inference_mode()
def test_fastkvzip(layers: list[Layer]) -> None:
    """The same weights in both; what kvpress then protects (sinks, a window) is for every scorer's selection here."""
    shape = {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_attention_heads": 6, "hidden_size": 96}
    gate = untrained_gate(shape)
    for index, layer in enumerate(layers):
        theirs = FastKVzipGate(index, input_dim=96, nhead=2, ngroup=3, dtype=torch.float32)
        weights = gate.layer(index)
        published = {
            "q_proj.weight": weights.q_weight,
            "q_proj.bias": weights.q_bias,
            "k_proj.weight": weights.k_weight,
            "q_norm.weight": weights.q_norm,
            "k_norm.weight": weights.k_norm,
            "k_base": weights.k_base[:, None],
            "b": weights.bias[:, None],
        }
        theirs.load_state_dict(published)
        hidden = layer.shown[3].hidden
        assert hidden is not None
        close(get_scorer("fastkvzip", gate).score(*layer.shown), theirs(hidden[None])[0])


@torch.inference_mode()
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9])
def test_streaming_keeps_the_same_tokens(layers: list[Layer], ratio: float) -> None:
    theirs = layers[0].theirs(StreamingLLMPress(compression_ratio=ratio, n_sink=SINKS))
    count = int(theirs[0].sum())
    kept = select_tokens(layers[0].ours("streaming"), [count] * 2, protect_head=SINKS, protect_tail=1)
    assert kept.view(2, -1)[0].tolist() == theirs[0].nonzero()[:, 0].tolist()
