# SPDX-License-Identifier: Apache-2.0
"""Head groups: which members share page lists (Tangram, arXiv 2606.06302, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_tangram.config import Grouping
from vllm_tangram.errors import TangramError


@dataclass(frozen=True, eq=False)
class HeadGroups:
    """A partition of all members into groups of at most ``size``.

    Attributes:
        group: [L, H] int32, the group of each member.
        column: [L, H] int32, its column inside the group's pages, 0 .. size - 1.
        size: columns of a page, G.
        num_groups: N.

    """

    group: NDArray[np.int32]
    column: NDArray[np.int32]
    size: int
    num_groups: int

    def group_max(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Largest value of each group's members: [..., M] -> [..., N]."""
        padded = np.full((*values.shape[:-1], self.num_groups * self.size), -np.inf)
        padded[..., (self.group * self.size + self.column).ravel()] = values
        return padded.reshape(*values.shape[:-1], self.num_groups, self.size).max(axis=-1)

    def members(self, group: int) -> list[tuple[int, int]]:
        """The (layer, head) pairs of one group, by column."""
        layers, heads = np.nonzero(self.group == group)
        order = np.argsort(self.column[layers, heads])
        return [(int(layers[i]), int(heads[i])) for i in order]

    def over_allocation(self, budgets: NDArray[np.float64]) -> float:
        """Memory that pages take over memory that the budgets ask for, at least 1; padding counts as taken."""
        wanted = float(budgets.sum())
        return self.size * float(self.group_max(budgets).sum()) / wanted if wanted > 0 else 1.0


def group_members(budgets: NDArray[np.float64], shape: tuple[int, int], size: int, mode: Grouping) -> HeadGroups:
    """Partition the members.

    Args:
        budgets: [M] sort key of each member, row-major (layer, head).
        shape: (L, H).
        size: members of a group, G.
        mode: "global" sorts all members, "layer" those of each layer, "neighbours" keeps the (layer, head) order.
            Each sorted run is cut into groups of ``size`` and its last group is padded.

    Raises:
        TangramError: ``size`` is not in 1 .. M.

    """
    num_members = shape[0] * shape[1]
    if not 1 <= size <= num_members:
        raise TangramError(
            f"--page-group-size must be from 1 to {num_members} for {shape[0]} layers of {shape[1]} KV heads, "
            f"got {size}"
        )
    # Richest first: the padded group is then the one whose pages are fewest. Stable: equal everywhere.
    runs = -budgets.reshape((shape[0], shape[1]) if mode == "layer" else (1, num_members))
    length = runs.shape[1]
    order = np.tile(np.arange(length), (len(runs), 1)) if mode == "neighbours" else np.argsort(runs, 1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(length)[None], axis=1)
    groups_per_run = -(-length // size)
    group = rank // size + groups_per_run * np.arange(len(runs))[:, None]
    return HeadGroups(
        group=group.reshape(shape).astype(np.int32),
        column=(rank % size).reshape(shape).astype(np.int32),
        size=size,
        num_groups=groups_per_run * len(runs),
    )
