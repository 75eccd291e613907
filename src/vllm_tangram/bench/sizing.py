# SPDX-License-Identifier: Apache-2.0
"""What a benchmark's engine needs to know of its model before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_tangram.bench.shapes import HeadShape, model_folder, shape_names
from vllm_tangram.budget import model_fingerprint
from vllm_tangram.config import MIXED_GRAPHS
from vllm_tangram.embedded import embedded_model
from vllm_tangram.errors import TangramError

EMBEDDED = "embedded"
_CARD_BYTES = 79.6 * 2**30  # of an "80 GB" card
_CARD_SHARE = 0.9  # vLLM's default --gpu-memory-utilization
_CARD_WORKSPACE = 3 * 2**30  # activations and graphs
_GRAPHS = [1, 2, 4, *range(8, 64, 8), *range(64, 1024, 16)]  # rows of a decode step; padded rows cost little


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Tokens of CUDA graphs: what decode steps of this many requests need, and no more, to start fast; and mixed ones.

    For all engines alike.
    """
    return sorted({size for size in _GRAPHS if size < max_num_seqs} | {max_num_seqs, *MIXED_GRAPHS})


def model_options(model: str) -> tuple[str, dict[str, Any]]:
    """Path or name that the engine takes, and the options that a folder without weights needs."""
    if model == EMBEDDED:
        return str(embedded_model()), {}
    folder = model_folder(model) if model in shape_names() else Path(model)
    if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        return str(folder), {"load_format": "dummy", "skip_tokenizer_init": True}
    return model, {}


def card_kv_bytes(model: str, num_ranks: int = 1) -> int:
    """KV memory that vLLM finds on an 80 GB card beside its part of this model's bfloat16 weights.

    Raises:
        TangramError: the model has no folder to read its sizes from, or nothing is left.

    """
    config = _config(model)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    layer = hidden * (2 * head_dim * (heads + kv_heads) + 3 * config["intermediate_size"])
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    weights = 2 * (config["num_hidden_layers"] * layer + embeddings) / num_ranks
    left = _CARD_SHARE * _CARD_BYTES - weights - _CARD_WORKSPACE
    if left <= 0:
        raise TangramError(f"--kv-gib: must be given for {model}, whose weights leave nothing of an 80 GB card")
    return int(left)


def kv_bytes_per_token(model: str) -> int:
    """Full KV of a token, in 16-bit numbers.

    Raises:
        TangramError: the model has no folder to read its sizes from.

    """
    shape = HeadShape.of(model_fingerprint(_config(model), None))
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * 2


def kv_heads(model: str) -> int:
    """KV heads of a layer.

    Raises:
        TangramError: the model has no folder to read them from.

    """
    return int(model_fingerprint(_config(model), None)["num_key_value_heads"])


def _config(model: str) -> dict[str, Any]:
    file = Path(model_options(model)[0]) / "config.json"
    if not file.is_file():
        raise TangramError(
            f"{model}: its sizes are not in a folder here; give the model's folder (or --kv-gib, if that is what was "
            "to be found from them)"
        )
    config: dict[str, Any] = json.loads(file.read_text())
    return config
