# SPDX-License-Identifier: Apache-2.0
"""Fast KVzip, https://arxiv.org/abs/2601.17668: a trained gate tells what the model would need to repeat the text.

    score[h, t] = gate of the layer (`vllm_tangram.compression.gate`), from the hidden state of token t alone, in [0, 1]

A gate is trained for one model (``tangram gate train``) or converted from a published one (``tangram gate convert``).
The paper also keeps a recent window of 4096 tokens, or 2 % of a short text; here as for all scorers that is ``window``,
in every chunk.

Cost: O(T * D * 16 * (Hq + H)) time for inner size 16, O(T * Hq * 32) float32 memory.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from vllm_tangram.compression.base import ChunkContext, Need, Scorer
from vllm_tangram.compression.gate import PlacedGate


class FastKVzip(Scorer):
    """Score by a trained gate.

    Args:
        gate: of the model, on its device (`Gate.placed`).

    """

    name: ClassVar[str] = "fastkvzip"
    paper: ClassVar[str] = "https://arxiv.org/abs/2601.17668"
    needs: ClassVar[frozenset[Need]] = frozenset({"hidden", "gate"})
    packs: ClassVar[bool] = True

    def __init__(self, gate: PlacedGate) -> None:
        self.gate = gate

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        """See `Scorer.score`."""
        assert context.hidden is not None
        return self.gate.scores(context.layer, context.hidden)
