# SPDX-License-Identifier: Apache-2.0
"""KVzip, https://arxiv.org/abs/2505.23416: tokens matter that a model looks at when it repeats the text.

The text is read once. Then, for each of its chunks, the model is asked to repeat it and is fed the right answer. With
queries i of the pass (instruction, chunk) and all query heads g of KV head h:

    a[g, i, j] = softmax_j(scale * q[g, i] . k[h, j])      over [sinks | the chunk as it was read | the pass, causal]
    score[h, j] = max over g and i of a[g, i, j]           for the tokens j of the chunk; sinks score 1

What the layers compute is attention to the whole text; only the scores leave the other chunks out. Two passes over the
text, so this is for evaluation and for training gates. Logits are float32 and made a block of queries at a time:
``_BLOCK`` numbers at most, beside the KV of the text and of one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_tangram.eval.chat import chat_frame
from vllm_tangram.eval.dense import DenseModel, DenseState

REPEAT_CHUNK = 2048
_NAMED = 8  # first tokens of a chunk by which the instruction names it
_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 28}  # numbers: 4 MiB, which caches hold, and 1 GiB
_FIRST = "\n\nRepeat the text above exactly."
_LATER = "\n\nRepeat exactly the part of the text above that starts with: "


def kvzip_scores(
    model: DenseModel,
    ids: Sequence[int],
    *,
    sinks: int = 4,
    chunk: int = REPEAT_CHUNK,
    state: DenseState | None = None,
) -> Tensor:
    """Score a text by KVzip.

    Args:
        model: the model.
        ids: tokens of the text, T of them; what the chat template puts before it may be part of it.
        sinks: first tokens that every query of a pass sees, whatever chunk it repeats; they score 1.
        chunk: tokens that are repeated in one pass.
        state: the text as it was read, all of it retained, if it was read already.

    Returns:
        ``[L, H, T]`` float32 in [0, 1], on the model's device.

    """
    if state is None:
        state = model.read(ids, sinks=sinks, window=0, after=model.empty()).state
    scores = torch.ones(model.num_layers, model.num_kv_heads, len(ids), device=model.device)
    for start in range(min(sinks, len(ids)), len(ids), chunk):
        end = min(start + chunk, len(ids))
        repeat = _Repeat(state, scores, sinks, start, end)
        model.run(repeat_ids(model.tokenizer, ids[start:end], first=start <= sinks), repeat.attend, start=len(ids))
    return scores


def repeat_ids(tokenizer: object, chunk: Sequence[int], *, first: bool) -> list[int]:
    """Instruction and answer of one pass."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[attr-defined]

    named = [] if first else list(chunk[:_NAMED])
    return [*encode(_FIRST if first else _LATER), *named, *encode(chat_frame(tokenizer)[1]), *chunk]


class _Repeat:
    """One pass: an attention that fills ``scores[:, :, start:end]`` on its way."""

    def __init__(self, state: DenseState, scores: Tensor, sinks: int, start: int, end: int) -> None:
        self.state, self.scores = state, scores
        self.sinks, self.start, self.end = sinks, start, end

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend to the whole text and, causally, to the pass, see `Attention`."""
        keys = torch.cat([self.state.keys[layer], key], dim=1).float()  # [H, t + T, d]
        values = torch.cat([self.state.values[layer], value], dim=1).float()
        queries = torch.unflatten(query, 0, (len(key), -1)).float() * scale  # [H, group, T, d]
        num_heads, group, num_queries, _ = queries.shape
        past = keys.shape[1] - num_queries
        partial = self.end - self.start + self.sinks < past
        largest = keys.new_zeros(num_heads, self.end - self.start)
        outputs = []
        rows = max(1, _BLOCK.get(keys.device.type, _BLOCK["cpu"]) // (num_heads * group * keys.shape[1]))
        for first in range(0, num_queries, rows):
            last = min(first + rows, num_queries)
            seen = past + last  # keys that any of these queries sees
            own = queries[:, :, first:last]
            logits = (own.flatten(1, 2) @ keys[:, :seen].mT).view(num_heads, group, last - first, seen)
            future = torch.ones(last - first, last - first, dtype=torch.bool, device=keys.device).triu_(1)
            logits[..., past + first :].masked_fill_(future, float("-inf"))
            weights = logits.softmax(dim=-1)
            outputs.append((weights.flatten(1, 2) @ values[:, :seen]).view_as(own))
            repeated = weights[..., self.start : self.end]
            if partial:  # a softmax over fewer keys is the same weights over their sum
                total = weights[..., : self.sinks].sum(-1) + repeated.sum(-1) + weights[..., past:].sum(-1)
                repeated = repeated / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
            largest = torch.maximum(largest, repeated.amax(dim=(1, 2)))
        self.scores[layer, :, self.start : self.end] = largest
        return torch.cat(outputs, dim=2).flatten(0, 1).to(query.dtype)
