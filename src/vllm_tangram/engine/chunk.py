# SPDX-License-Identifier: Apache-2.0
"""Several new tokens of one request in a step, as scorers and the profiler see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from vllm_tangram.compression import ChunkContext
from vllm_tangram.compression.base import alone
from vllm_tangram.compression.known import KnownPrefix
from vllm_tangram.compression.rope import Rope
from vllm_tangram.config import TangramConfig


@dataclass(frozen=True)
class Chunk:
    """A chunk of a prompt, or generated tokens replayed after a preemption.

    Attributes:
        first: index of its first token in the batch.
        num_tokens: T.
        position: position of its first token in the request.
        request: index of the request in the batch.
        known: ``[L, H, n]`` scores of its first n tokens, by layer of the rank, that were computed beforehand; None if
            there are none.

    """

    first: int
    num_tokens: int
    position: int
    request: int
    known: Tensor | None = field(default=None, kw_only=True, compare=False, repr=False)

    @classmethod
    def split(
        cls,
        first: int,
        num_tokens: int,
        position: int,
        request: int,
        *,
        prompt_len: int,
        chunk_size: int,
        known: KnownPrefix | None = None,
    ) -> Iterator[Chunk]:
        """The chunks of a request's tokens in a step, in order; a step may take several of one prompt.

        They end at multiples of ``chunk_size`` and at the step's end; replayed tokens, at and after ``prompt_len``, are
        one piece, since they evict nothing. ``known`` is what the prompt has in common with documents.
        """
        end = position + num_tokens
        while position < end:
            stop = end if position >= prompt_len else min(end, (position // chunk_size + 1) * chunk_size)
            scores = None if known is None or position >= prompt_len else known.scores(position, stop)
            yield Chunk(first=first, num_tokens=stop - position, position=position, request=request, known=scores)
            first, position = first + stop - position, stop

    @property
    def tokens(self) -> slice:
        """Its tokens in the batch."""
        return slice(self.first, self.first + self.num_tokens)

    def protect_head(self, config: TangramConfig) -> int:
        """First tokens of the chunk that are sinks."""
        return max(0, min(config.sinks - self.position, self.num_tokens))

    def protect_tail(self, config: TangramConfig) -> int:
        """Last tokens of the chunk that are its window."""
        return min(config.window, self.num_tokens)

    def context(
        self,
        config: TangramConfig,
        scale: float,
        *,
        layer: int,
        rope: Rope | None = None,
        hidden: Tensor | None = None,
        mean_over_ranks: Callable[[Tensor], Tensor] = alone,
    ) -> ChunkContext:
        """What a scorer may know."""
        return ChunkContext(config.sinks, config.window, scale, self.position, layer, rope, hidden, mean_over_ranks)
