# SPDX-License-Identifier: Apache-2.0
"""What an importance scorer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from vllm_tangram.compression.rope import Rope

Need = Literal["rope", "hidden", "gate"]


def alone(values: Tensor) -> Tensor:
    """The mean over one rank."""
    return values


@dataclass(frozen=True, eq=False)
class Packing:
    """Which of several chunks, one after another, each token belongs to.

    Attributes:
        index: ``[T]`` int64, the token's chunk.
        shares: ``[C, T]`` float32, one over the chunk's tokens where the token belongs to it, else 0.

    """

    index: Tensor
    shares: Tensor

    @classmethod
    def of(cls, index: Tensor, num_chunks: int) -> Packing:
        """Chunks of at least one token."""
        own = (index == torch.arange(num_chunks, device=index.device)[:, None]).float()
        return cls(index, own / own.sum(dim=1, keepdim=True))


@dataclass(frozen=True, eq=False)
class ChunkContext:
    """What a scorer may know about a chunk besides its tensors.

    Attributes:
        sinks: first tokens of the prompt that are always kept.
        window: last tokens of every chunk that are always kept.
        scale: factor of the attention logits, usually ``1 / sqrt(head_dim)``.
        start: position of the chunk's first token in the prompt.
        layer: index of the layer, among those of this rank.
        rope: the layer's rotary embedding; None unless the scorer needs "rope".
        hidden: ``[T, D]`` what enters the layer's attention block (after its norm), in the model's type; None unless
            the scorer needs "hidden".
        mean_over_ranks: under tensor parallelism a rank sees its own heads only; a scorer that mixes heads takes with
            this the mean of a tensor over the ranks that share the layer.
        packing: the chunks that the tensors hold, where they hold several (see ``Scorer.packs``).

    """

    sinks: int
    window: int
    scale: float
    start: int
    layer: int = 0
    rope: Rope | None = None
    hidden: Tensor | None = None
    mean_over_ranks: Callable[[Tensor], Tensor] = alone
    packing: Packing | None = None

    def chunk_mean(self, values: Tensor) -> Tensor:
        """Mean over each token's chunk: ``[T, ...]`` float32 -> ``[T, ...]``, or ``[1, ...]`` of a single chunk."""
        if self.packing is None:
            return values.mean(dim=0, keepdim=True)
        means = self.packing.shares @ values.flatten(1)
        return means.index_select(0, self.packing.index).view_as(values)

    @property
    def leading_sinks(self) -> int:
        """First tokens of the chunk that are sinks, if it is long enough to have them all."""
        return max(0, self.sinks - self.start)


class Scorer(Protocol):
    """Gives every token of a prompt chunk one number per KV head; tokens with higher numbers are kept.

    A scorer sees the chunk's own tokens and nothing else. Pages are append-only and retained keys may be stored
    packed, so what earlier chunks kept is neither needed nor readable, and the same prompt gets the same scores
    whoever shares its batch. Scorers compute in float32 whatever the type of their inputs, and keep no state.

    Attributes:
        name: what users write.
        paper: link to the source.
        needs: what the context must bring ("rope", "hidden"; a model that does not have it is refused at start), and
            whether the scorer is made with a gate ("gate").
        packs: whether ``score`` also takes several chunks, one after another, if the context has their ``packing``.
            Such a scorer looks at other tokens through ``chunk_mean`` only, and not at ``start``.

    """

    name: ClassVar[str]
    paper: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    packs: ClassVar[bool] = False

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        """Score one chunk of one layer of one sequence.

        Args:
            query: ``[T, Hq, d]`` after RoPE; query heads of one KV head are neighbours.
            key: ``[T, H, d]`` after RoPE.
            value: ``[T, H, d]``.
            context: where the chunk stands and what is protected.

        Returns:
            ``[H, T]`` float32, finite for finite inputs.

        """
        ...

    def score_rows(self, key: Tensor, scores: Tensor, first: Tensor, num_tokens: Tensor) -> bool:
        """Score all chunks of a step in one launch on a GPU, if the scorer can; the scores are those of ``score``.

        A step with few tokens takes as long as the host needs to launch its kernels. For scorers that see nothing but
        keys. Does not wait for the device.

        Args:
            key: ``[N, H, d]`` of the step, after RoPE, last dimension contiguous.
            scores: ``[H, N]`` float32, last dimension contiguous; written for the tokens of the chunks and no others.
            first: ``[C]`` int32 on the device, each chunk's first token in the step.
            num_tokens: ``[C]`` int32, likewise and with the same stride: how many it has; 0 is none to score.

        Returns:
            Whether it did; if not, nothing is written and ``score`` is to be called.

        """
        return False
