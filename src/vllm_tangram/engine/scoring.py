# SPDX-License-Identifier: Apache-2.0
"""A scorer in one layer of the engine, with what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce

from vllm_tangram.compression import ChunkContext, Scorer, get_scorer
from vllm_tangram.compression.base import Packing, alone
from vllm_tangram.compression.gate import Gate
from vllm_tangram.compression.known import reordered
from vllm_tangram.compression.rope import Rope
from vllm_tangram.config import TangramConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_tangram.budget import RetentionPlan
    from vllm_tangram.engine.chunk import Chunk
    from vllm_tangram.engine.inputs import HiddenStates


def scorer_of(plan: RetentionPlan, rank: int, device: torch.device, dtype: torch.dtype) -> Scorer:
    """The scorer of a plan's options for the heads of one rank, with its gate on the device of a model of that type."""
    config = plan.config
    if config.gate is None:
        return get_scorer(config.scorer)
    return get_scorer(config.scorer, Gate.load(config.gate).part(*plan.sharding.part(rank)).placed(device, dtype))


def mean_over_ranks(vllm_config: VllmConfig) -> Callable[[Tensor], Tensor]:
    """What takes the mean of equal-shaped float32 tensors of the ranks that share a layer; all of them must call it."""
    size = vllm_config.parallel_config.tensor_parallel_size
    if size == 1:
        return alone

    def mean(values: Tensor) -> Tensor:
        total: Tensor = tensor_model_parallel_all_reduce(values.clone())  # gloo adds in place
        return total / size

    return mean


@dataclass(frozen=True, eq=False)
class LayerScorer:
    """Ranks the tokens of a chunk in one layer.

    Attributes:
        scorer: the method.
        config: options.
        layer: index among the rank's layers.
        scale: factor of the layer's attention logits.
        rope: of the layer; None unless the scorer needs it.
        hidden: where the layer's hidden states are; None unless the scorer needs them.
        mean: takes the mean over the ranks that share the layer.

    """

    scorer: Scorer
    config: TangramConfig
    layer: int
    scale: float
    rope: Rope | None = None
    hidden: HiddenStates | None = None
    mean: Callable[[Tensor], Tensor] = alone

    def begin(self) -> None:
        """Check, when the layer's attention begins in a step, that what the scorer needs has come.

        Raises:
            TangramError: it has not (``HiddenStates.expect``).

        """
        if self.hidden is not None:
            self.hidden.expect()

    def score_all(
        self,
        chunks: Sequence[Chunk],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor,
        *,
        first: Tensor,
        num_tokens: Tensor,
        packing: Callable[[], Packing | None],
    ) -> None:
        """Score chunks of a batch: all at once, if the scorer can, for each call has its price.

        What the scorer takes at once are all chunks of the batch, those that need no scores, too.

        Args:
            chunks: what needs scores.
            query: ``[N, Hq, d]`` of the batch, after RoPE.
            key: ``[N, H, d]`` after RoPE.
            value: ``[N, H, d]``.
            scores: ``[H, N]`` float32, written for the tokens of the chunks and maybe of others.
            first: ``[C]`` int32 on the device, first token of every chunk of the batch (``Scorer.score_rows``).
            num_tokens: ``[C]`` int32, how many it has.
            packing: gives, where it is asked for, the packing of the last tokens of the batch, all that its chunks
                have; None: one by one.

        """
        if not chunks:
            return
        if not self.scorer.score_rows(key, scores, first, num_tokens):
            packed = packing() if self.scorer.packs else None
            if packed is None:
                for chunk in chunks:
                    tokens = chunk.tokens
                    scores[:, tokens] = self.score(chunk, query[tokens], key[tokens], value[tokens])
                return
            tokens = slice(len(key) - len(packed.index), len(key))
            context = replace(self._context(chunks[0], tokens), packing=packed)
            scores[:, tokens] = self.scorer.score(query[tokens], key[tokens], value[tokens], context)
        for chunk in chunks:
            if chunk.known is not None:
                scores[:, chunk.tokens] = self._known(chunk, scores[:, chunk.tokens])

    def score(self, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Score a chunk, by scores that were computed beforehand as far as there are any (`compression.known`).

        Args:
            chunk: where it stands.
            query: ``[T, Hq, d]`` of the chunk, after RoPE.
            key: ``[T, H, d]`` after RoPE.
            value: ``[T, H, d]``.

        Returns:
            ``[H, T]`` float32.

        """
        if chunk.known is not None and chunk.known.shape[-1] == chunk.num_tokens:
            return chunk.known[self.layer].float()
        scores = self.scorer.score(query, key, value, self._context(chunk, chunk.tokens))
        return scores if chunk.known is None else self._known(chunk, scores)

    def _context(self, chunk: Chunk, tokens: slice) -> ChunkContext:
        hidden = None if self.hidden is None else self.hidden.buffer[tokens]
        return chunk.context(
            self.config, self.scale, layer=self.layer, rope=self.rope, hidden=hidden, mean_over_ranks=self.mean
        )

    def _known(self, chunk: Chunk, scores: Tensor) -> Tensor:
        """The scores of a chunk that begins with tokens of a document, whose own scores decide between these."""
        assert chunk.known is not None
        known = chunk.known[self.layer].float()
        if known.shape[-1] == chunk.num_tokens:
            return known
        head, tail = chunk.protect_head(self.config), chunk.protect_tail(self.config)
        return reordered(scores, known, protect_head=head, protect_tail=tail)
