# SPDX-License-Identifier: Apache-2.0
"""Models small enough to be made for the tests: random weights, one token per byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
OPTIONS = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,  # large enough that heads attend to few tokens
}

# What the configuration of models that are not served says beside that of a Llama.
SLIDING_WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 512}
LATENT_ATTENTION = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
}


def make_checkpoint(folder: Path, model_type: str = "llama", **options: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **OPTIONS | options)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def copy_without_weights(model: Path, folder: Path, **changes: Any) -> Path:
    """A model's files in a new folder, with changes to its config.json and no weights."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
