# SPDX-License-Identifier: Apache-2.0
"""A scorer in one layer of the engine, with what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_tangram.compression import Scorer, get_scorer
from vllm_tangram.compression.gate import Gate
from vllm_tangram.compression.rope import Rope
from vllm_tangram.config import TangramConfig

if TYPE_CHECKING:
    from vllm_tangram.engine.chunk import Chunk
    from vllm_tangram.engine.inputs import HiddenStates


def scorer_of(config: TangramConfig, device: torch.device) -> Scorer:
    """The scorer of these options, with its gate on the device."""
    return get_scorer(config.scorer, None if config.gate is None else Gate.load(config.gate).to(device))


@dataclass(frozen=True, eq=False)
class LayerScorer:
    """Ranks the tokens of a chunk in one layer.

    Attributes:
        scorer: the method.
        config: options.
        layer: index.
        scale: factor of the layer's attention logits.
        rope: of the layer; None unless the scorer needs it.
        hidden: where the layer's hidden states are; None unless the scorer needs them.

    """

    scorer: Scorer
    config: TangramConfig
    layer: int
    scale: float
    rope: Rope | None = None
    hidden: HiddenStates | None = None

    def begin(self) -> None:
        """Check, when the layer's attention begins in a step, that what the scorer needs has come.

        Raises:
            TangramError: it has not (``HiddenStates.expect``).

        """
        if self.hidden is not None:
            self.hidden.expect()

    def score(self, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Score a chunk.

        Args:
            chunk: where it stands.
            query: ``[T, Hq, d]`` of the chunk, after RoPE.
            key: ``[T, H, d]`` after RoPE.
            value: ``[T, H, d]``.

        Returns:
            ``[H, T]`` float32.

        """
        hidden = None if self.hidden is None else self.hidden.buffer[chunk.tokens]
        context = chunk.context(self.config, self.scale, layer=self.layer, rope=self.rope, hidden=hidden)
        return self.scorer.score(query, key, value, context)
