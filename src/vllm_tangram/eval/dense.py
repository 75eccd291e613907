# SPDX-License-Identifier: Apache-2.0
"""The method computed the obvious way: full KV and, per KV head, a mask of the tokens that it retained.

The engine's reference, and what quality is measured with. Hidden states are those of transformers; only attention is
replaced, through transformers' own registry of attention functions.

    [ what the head retained of earlier chunks | the chunk, causal ]       what a query of the chunk sees

Reading a chunk is told apart from compressing it: a context of one chunk is read once for all scorers, retentions and
budgets, and each of these costs no more than its question and answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from vllm_tangram.budget import EvictionSchedule, RetentionPlan, model_fingerprint
from vllm_tangram.compression import ChunkContext, Scorer
from vllm_tangram.compression.rope import Rope
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.inputs import attention_inputs, rope_of
from vllm_tangram.eval.state import DenseChunk, DenseState, Past

_ATTENTION = "tangram_dense"
# Not cuDNN's, which plans anew for every length; here each layer of each context has its own.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PASS_BYTES = 1 << 29  # of what a pass computes at once; on a GPU it may take the share below of all memory
_PASS_SHARE = 8

Attention = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Layer, queries ``[Hq, T, d]``, keys and values ``[H, T, d]`` after RoPE, factor of the logits -> ``[Hq, T, d]``."""


@dataclass(eq=False)
class _Pass:
    """One forward pass of a batch: row b continues ``states[b]``, which have read equally many tokens."""

    states: Sequence[DenseState]
    scorers: Sequence[Scorer] = ()
    sinks: int = 0
    window: int = 0
    rope: Rope | None = None
    inputs: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> hidden states [B, T, D], where needed
    attention: Attention | None = None
    keys: list[Tensor] = field(default_factory=list)  # per layer [B, H, T, d]
    values: list[Tensor] = field(default_factory=list)
    scores: list[list[Tensor]] = field(default_factory=list)  # per layer and scorer [H, T], of the only row

    @cached_property
    def past(self) -> list[Past]:
        """Neighbouring rows that read the same attend together."""
        return [Past(list(rows)) for _, rows in groupby(self.states, key=lambda state: id(state.keys))]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[B, Hq, T, d] of queries, [B, H, T, d] of keys and values -> [B, T, Hq, d]."""
        self.keys.append(key)
        self.values.append(value)
        if self.scorers:
            hidden = self.inputs[layer][0] if layer in self.inputs else None
            start = self.states[0].num_tokens
            context = ChunkContext(self.sinks, self.window, scale, start, layer, self.rope, hidden)
            q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
            self.scores.append([scorer.score(q, k, v, context) for scorer in self.scorers])
        if self.attention is not None:
            return self.attention(layer, query[0], key[0], value[0], scale)[None].transpose(1, 2)
        rows = [past.rows for past in self.past]
        parts = zip(self.past, *(torch.split(tensor, rows) for tensor in (query, key, value)), strict=True)
        return torch.cat([past.attend(layer, q, k, v, scale) for past, q, k, v in parts]).transpose(1, 2)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dense: _Pass,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if sliding_window is not None:
        raise TangramError("sliding-window attention has no reference here, as the engine does not serve it")
    return dense.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(_ATTENTION, _attention)


class DenseModel:
    """A causal language model of transformers whose KV heads forget as the engine's do; deterministic.

    Attributes:
        tokenizer: that of transformers.
        fingerprint: ``model_fingerprint`` of the checkpoint.
        num_layers: L.
        num_kv_heads: H.
        max_tokens: longest text that the model was made for, in tokens; None if its configuration does not say.
        vocab_size: logits per token.

    """

    def __init__(self, model: Any, tokenizer: Any, fingerprint: dict[str, Any]) -> None:
        self._model = model.eval()
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.num_layers = int(fingerprint["num_hidden_layers"])
        self.num_kv_heads = int(fingerprint["num_key_value_heads"])
        self.max_tokens: int | None = getattr(model.config, "max_position_embeddings", None)
        self.vocab_size = int(model.config.vocab_size)

    @classmethod
    def load(
        cls, path: str | Path, *, dtype: torch.dtype | Literal["auto"] = "auto", device: str = "cpu"
    ) -> DenseModel:
        """Read a checkpoint folder; "auto" computes in the type of its weights, as vLLM does.

        Raises:
            TangramError: it is none.

        """
        path = Path(path)
        if not (path / "config.json").is_file():
            raise TangramError(f"{path} is not a checkpoint folder: it has no config.json")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=_ATTENTION).to(device)
        fingerprint = model_fingerprint(model.config.to_dict(), path)
        return cls(model, AutoTokenizer.from_pretrained(path), fingerprint)

    @cached_property
    def rope(self) -> Rope:
        """Rotary embedding of all layers.

        Raises:
            TangramError: there is none that scorers could use.

        """
        return rope_of(self._model)

    def empty(self) -> DenseState:
        """No tokens read yet."""
        nothing = torch.empty(0, device=self._model.device)
        retained = nothing.bool().expand(self.num_layers, self.num_kv_heads, 0)
        return DenseState((), (), retained, nothing)

    def read(
        self, ids: Sequence[int], scorers: Sequence[Scorer] = (), *, sinks: int, window: int, after: DenseState
    ) -> DenseChunk:
        """Attend to one chunk and score it.

        Args:
            ids: tokens of the chunk.
            scorers: what to score it with.
            sinks: first tokens of a prompt that are always kept.
            window: last tokens of every chunk that are always kept.
            after: earlier chunks, compressed.

        Raises:
            TangramError: the model does not have what a scorer needs.

        """
        needs = frozenset[str]().union(*(scorer.needs for scorer in scorers))
        step = _Pass([after], scorers, sinks, window, self.rope if "rope" in needs else None)
        with ExitStack() as stack:
            if "hidden" in needs:
                step.inputs = stack.enter_context(attention_inputs(self._model))
            logits = self._forward(step, torch.tensor([list(ids)]), 1)[0, -1].float()
        names = [scorer.name for scorer in scorers]
        scores = {name: torch.stack([layer[i] for layer in step.scores]) for i, name in enumerate(names)}
        return DenseChunk(_extended(after, step, len(ids), logits), after.num_tokens, scores)

    def run(self, ids: Sequence[int], attention: Attention, *, start: int) -> None:
        """Put tokens through the model with another attention, for what that sees; nothing is retained.

        Args:
            ids: the tokens.
            attention: called for one layer after another.
            start: position of the first token.

        """
        self._forward(_Pass((), attention=attention), torch.tensor([list(ids)]), 1, start)

    @property
    def module(self) -> Any:
        """The model of transformers."""
        return self._model

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        """In what it computes: the type of its hidden states."""
        return self._model.dtype

    def prefill(
        self, ids: Sequence[int], scorer: Scorer, plan: RetentionPlan, schedule: EvictionSchedule
    ) -> DenseState:
        """Read a prompt chunk by chunk and compress each, as the engine does."""
        config, state = plan.config, self.empty()
        for start in range(0, len(ids), config.chunk_size):
            chunk = ids[start : start + config.chunk_size]
            read = self.read(chunk, [scorer], sinks=config.sinks, window=config.window, after=state)
            state = read.compress(scorer.name, plan, schedule, len(ids))
        return state

    def score_answer(
        self, states: Sequence[DenseState], question: Sequence[int], answer: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """`score_answers` of one question."""
        (result,) = self.score_answers(states, [(question, answer)])
        return result

    def score_answers(
        self, states: Sequence[DenseState], questions: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[Tensor, Tensor]]:
        """How likely the answers to questions are, each asked for itself; both retain all of their tokens.

        Args:
            states: what was read before, B of them, equally many tokens each; those of one context should be
                neighbours, as they attend together.
            questions: tokens of each question, maybe none, and of its answer, at least one.

        Returns:
            For every question ``[B, A]`` float32 log-probabilities of the answer's tokens, and ``[B, A]`` bool: is it
            the most likely token? If all are, greedy decoding gives this answer.

        """
        texts = [[*question, *answer[:-1]] for question, answer in questions]
        longest = max(map(len, texts))
        first = max(0, min(len(question) for question, _ in questions) - 1)  # whose next token is asked for
        logits = None
        if longest:
            # What fills up a shorter text comes after all that is asked of it.
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
            step = _Pass([state for state in states for _ in questions])
            logits = self._forward(step, ids.repeat(len(states), 1), longest - first)
            logits = torch.unflatten(logits, 0, (len(states), -1))  # [B, questions, longest - first, vocabulary]
        results = []
        for number, ((question, answer), text) in enumerate(zip(questions, texts, strict=True)):
            parts = [] if question else [torch.stack([state.logits for state in states])[:, None]]
            if text:
                assert logits is not None
                parts.append(logits[:, number, max(0, len(question) - 1) - first : len(text) - first])
            own = torch.cat(parts, dim=1).float()
            wanted = torch.tensor(answer, device=own.device).expand(len(states), -1)
            chosen = own.gather(-1, wanted[..., None])[..., 0]
            results.append((chosen - own.logsumexp(dim=-1), own.argmax(dim=-1) == wanted))
        return results

    def states_per_pass(self, past: int, questions: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
        """How many states `score_answers` may be given at once, at least one, so that memory stays in bounds.

        Args:
            past: tokens that the states have read.
            questions: see `score_answers`.

        """
        config, size = self._model.config.get_text_config(), self._model.dtype.itemsize
        new = max(len(question) + len(answer) for question, answer in questions)
        asked = new - min(len(question) for question, _ in questions)  # all answers lie within the last of these
        head_dim = int(self.fingerprint["head_dim"])
        row = asked * self.vocab_size * (size + 2 * 4)  # logits, and float32 copies of them
        # Of one layer, twice where they are put together: keys and values, and the mask, of bytes and then of numbers.
        row += self.num_kv_heads * (past + new) * (4 * head_dim * size + new * (1 + size))
        row += new * (self.num_layers * 2 * self.num_kv_heads * head_dim + 4 * config.intermediate_size) * size
        limit = _PASS_BYTES
        if self.device.type == "cuda":
            limit = torch.cuda.get_device_properties(self.device).total_memory // _PASS_SHARE
        return max(1, limit // (row * len(questions)))

    def generate(self, state: DenseState, count: int) -> list[int]:
        """The ``count`` next tokens by greedy decoding, end of text or not."""
        ids: list[int] = []
        while len(ids) < count:
            ids.append(int(state.logits.argmax()))
            step = _Pass([state])
            state = _extended(state, step, 1, self._forward(step, torch.tensor([ids[-1:]]), 1)[0, -1].float())
        return ids

    @torch.inference_mode()
    def _forward(self, step: _Pass, ids: Tensor, last: int, start: int | None = None) -> Tensor:
        """Logits [B, last, vocabulary], in the model's type, after each of the last tokens of ids [B, T]."""
        device = self._model.device
        start = step.states[0].num_tokens if start is None else start
        with sdpa_kernel(_KERNELS):
            output = self._model(
                input_ids=ids.to(device),
                position_ids=torch.arange(start, start + ids.shape[1], device=device)[None],
                use_cache=False,
                logits_to_keep=last,
                dense=step,
            )
        logits: Tensor = output.logits
        return logits


def _extended(state: DenseState, step: _Pass, count: int, logits: Tensor) -> DenseState:
    """The state after the only row of a pass, its tokens retained."""

    def appended(past: tuple[Tensor, ...], new: list[Tensor]) -> tuple[Tensor, ...]:
        if not past:
            return tuple(b[0].contiguous() for b in new)
        return tuple(torch.cat([a, b[0]], dim=1) for a, b in zip(past, new, strict=True))

    retained = torch.cat([state.retained, state.retained.new_ones(*state.retained.shape[:2], count)], dim=-1)
    return DenseState(appended(state.keys, step.keys), appended(state.values, step.values), retained, logits)
