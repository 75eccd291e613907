# SPDX-License-Identifier: Apache-2.0
"""KVzip's scores against the attention weights that transformers itself returns."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.gates import targets
from vllm_tangram.gates.targets import kvzip_scores


def ids(count: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(256), k=count)


def reference(dense: DenseModel, checkpoint: Path, tokens: list[int], sinks: int, chunk: int) -> Tensor:
    """[L, H, T] from one plain pass per chunk over text, instruction and chunk, with all attention weights."""
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    scores = torch.ones(3, 2, len(tokens))
    for start in range(sinks, len(tokens), chunk):
        part = tokens[start : start + chunk]
        said = "\n\nRepeat the text above exactly."
        question = dense.tokenizer.encode(said)
        if start > sinks:
            said = "\n\nRepeat exactly the part of the text above that starts with: "
            question = dense.tokenizer.encode(said) + part[:8]
        repeat = question + dense.tokenizer.encode("<assistant>") + part
        with torch.inference_mode():
            attentions = plain(torch.tensor([tokens + repeat]), output_attentions=True).attentions
        seen = [*range(sinks), *range(start, start + len(part)), *range(len(tokens), len(tokens) + len(repeat))]
        for layer in range(3):
            for head in range(2):
                weights = attentions[layer][0, 2 * head : 2 * head + 2, len(tokens) :, seen]  # of both query heads
                own = (weights / weights.sum(-1, keepdim=True))[..., sinks : sinks + len(part)]
                scores[layer, head, start : start + len(part)] = own.amax(dim=(0, 1))
    return scores


@pytest.mark.parametrize(
    ("count", "sinks", "chunk"),
    [(1, 4, 16), (4, 4, 16), (5, 4, 16), (40, 4, 64), (40, 0, 64), (45, 4, 16)],
)
def test_equals_the_attention_weights_of_the_plain_model(
    dense: DenseModel, checkpoint: Path, count: int, sinks: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_BLOCK", {"cpu": 4 * 100 * 7})  # several blocks of queries
    tokens = ids(count)
    scores = kvzip_scores(dense, tokens, sinks=sinks, chunk=chunk)
    assert scores.shape == (3, 2, count)
    torch.testing.assert_close(scores, reference(dense, checkpoint, tokens, sinks, chunk), rtol=1e-3, atol=1e-5)
    if count > sinks:
        assert scores[..., sinks:].std() > 0.05  # heads do tell tokens apart


def test_a_text_that_was_read_need_not_be_read_again(dense: DenseModel) -> None:
    tokens = ids(30)
    state = dense.read(tokens, sinks=4, window=0, after=dense.empty()).state
    assert torch.equal(kvzip_scores(dense, tokens, state=state), kvzip_scores(dense, tokens))
    assert state.num_tokens == 30
