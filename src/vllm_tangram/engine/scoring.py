# SPDX-License-Identifier: Apache-2.0
"""A scorer in one layer of the engine, with what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce

from vllm_tangram.compression import Scorer, get_scorer
from vllm_tangram.compression.base import alone
from vllm_tangram.compression.gate import Gate
from vllm_tangram.compression.known import reordered
from vllm_tangram.compression.rope import Rope
from vllm_tangram.config import TangramConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_tangram.budget import RetentionPlan
    from vllm_tangram.engine.chunk import Chunk
    from vllm_tangram.engine.inputs import HiddenStates


def scorer_of(plan: RetentionPlan, rank: int, device: torch.device) -> Scorer:
    """The scorer of a plan's options for the heads of one rank, with its gate on the device."""
    config = plan.config
    gate = None if config.gate is None else Gate.load(config.gate).part(*plan.sharding.part(rank)).to(device)
    return get_scorer(config.scorer, gate)


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
        known = None if chunk.known is None else chunk.known[self.layer].float()
        if known is not None and known.shape[-1] == chunk.num_tokens:
            return known
        hidden = None if self.hidden is None else self.hidden.buffer[chunk.tokens]
        context = chunk.context(
            self.config, self.scale, layer=self.layer, rope=self.rope, hidden=hidden, mean_over_ranks=self.mean
        )
        scores = self.scorer.score(query, key, value, context)
        if known is None:
            return scores
        head, tail = chunk.protect_head(self.config), chunk.protect_tail(self.config)
        return reordered(scores, known, protect_head=head, protect_tail=tail)
