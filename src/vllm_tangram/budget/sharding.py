# SPDX-License-Identifier: Apache-2.0
"""Which KV heads of which layers each rank of an engine holds, as vLLM spreads them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_tangram.errors import TangramError


@dataclass(frozen=True)
class Sharding:
    """A model over ``tensor_parallel_size * len(stage_layers)`` ranks.

    Pipeline stages hold runs of layers; within a stage each rank holds a run of every layer's KV heads. With more ranks
    than heads, neighbouring ranks hold copies of one head, each for its own part of the query heads, and every copy is
    a member of its own. ``W`` is the number of KV heads of a layer on all ranks, copies included::

        tensor_parallel_size 2, H = 4:  W = 4, heads 0 1 | 2 3
        tensor_parallel_size 4, H = 2:  W = 4, heads 0 | 0 | 1 | 1

    Attributes:
        num_kv_heads: KV heads of a layer of the whole model, H.
        tensor_parallel_size: ranks of a stage.
        stage_layers: layers of each pipeline stage.

    """

    num_kv_heads: int
    tensor_parallel_size: int
    stage_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that heads and ranks divide each other.

        Raises:
            TangramError: they do not, so vLLM cannot spread them.

        """
        heads, size = self.num_kv_heads, self.tensor_parallel_size
        if heads % size and size % heads:
            raise TangramError(
                f"--tensor-parallel-size {size} does not fit the model's {heads} KV heads: "
                "it must divide their number, or be a multiple of it"
            )

    @property
    def num_layers(self) -> int:
        """Layers of the whole model, L."""
        return sum(self.stage_layers)

    @property
    def copies(self) -> int:
        """Ranks that hold the same KV head."""
        return max(1, self.tensor_parallel_size // self.num_kv_heads)

    @property
    def width(self) -> int:
        """KV heads of a layer on all ranks, copies included: W."""
        return self.num_kv_heads * self.copies

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.tensor_parallel_size * len(self.stage_layers)

    @property
    def ranks(self) -> NDArray[np.int32]:
        """``[L, W]``, the rank that holds each member; vLLM numbers the ranks of a stage before those of the next."""
        stages = np.repeat(np.arange(len(self.stage_layers), dtype=np.int32), self.stage_layers)
        shards = np.repeat(np.arange(self.tensor_parallel_size, dtype=np.int32), self._heads_per_rank)
        return stages[:, None] * np.int32(self.tensor_parallel_size) + shards

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Give every copy its head's value: ``[..., L * H] -> [..., L * W]``."""
        heads = values.reshape(*values.shape[:-1], self.num_layers, self.num_kv_heads)
        return np.repeat(heads, self.copies, axis=-1).reshape(*values.shape[:-1], -1)

    def part(self, rank: int) -> tuple[slice, slice]:
        """Layers of the whole model that a rank holds, and which of their H heads."""
        stage, shard = divmod(rank, self.tensor_parallel_size)
        end = list(accumulate(self.stage_layers))[stage]
        head = shard * self._heads_per_rank // self.copies
        return slice(end - self.stage_layers[stage], end), slice(head, head + self._heads_per_rank)

    @property
    def _heads_per_rank(self) -> int:
        return self.width // self.tensor_parallel_size
