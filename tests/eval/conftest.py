# SPDX-License-Identifier: Apache-2.0
"""A model small enough to be made for the tests: random weights, one token per byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_tangram.budget import RetentionProfile
from vllm_tangram.eval.dense import DenseModel

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of two KV heads."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,  # large enough that heads attend to few tokens
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def dense(checkpoint: Path) -> DenseModel:
    return DenseModel.load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="session")
def skewed(dense: DenseModel) -> RetentionProfile:
    """A profile whose heads keep from a tenth to nine tenths at one half."""
    kept = np.array([0.1, 0.3, 0.9, 0.5, 0.7, 0.5]).reshape(1, 1, 3, 2)
    return RetentionProfile([0.5], kept, "snapkv", dense.fingerprint, sinks=4, window=64, chunk_size=2048)
