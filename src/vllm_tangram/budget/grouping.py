# SPDX-License-Identifier: Apache-2.0
"""Head groups: which members share page lists (Tangram, arXiv 2606.06302, section 4.1).

With several ranks every rank groups its own members, and group g of all ranks has one page list: a page is then G heads
on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_tangram.config import Grouping
from vllm_tangram.errors import TangramError


@dataclass(frozen=True, eq=False)
class HeadGroups:
    """A partition of all members into groups of at most ``size`` a rank.

    Attributes:
        group: [L, W] int32, the group of each member; W is H with one rank (see ``Sharding``).
        column: [L, W] int32, its column inside the group's pages on its rank, 0 .. size - 1.
        size: columns of a page on a rank, G.
        num_groups: N, on every rank.
        ranks: [L, W] int32, the rank that holds each member.

    """

    group: NDArray[np.int32]
    column: NDArray[np.int32]
    size: int
    num_groups: int
    ranks: NDArray[np.int32]

    @property
    def num_ranks(self) -> int:
        """Ranks that hold members."""
        return int(self.ranks.max()) + 1

    @property
    def places(self) -> NDArray[np.int32]:
        """[L, W, 2] int32, group and column of each member."""
        return np.stack([self.group, self.column], axis=-1).astype(np.int32)

    @property
    def page_members(self) -> int:
        """Members that a page has room for, on all ranks."""
        return self.size * self.num_ranks

    def group_max(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Largest value of each group's members on any rank: [..., M] -> [..., N]."""
        padded = np.full((*values.shape[:-1], self.num_groups, self.page_members), -np.inf)
        padded[..., self.group.ravel(), (self.ranks * self.size + self.column).ravel()] = values
        return padded.max(axis=-1)

    def members(self, group: int) -> list[tuple[int, int]]:
        """The (layer, head) pairs of one group, by rank and column."""
        layers, heads = np.nonzero(self.group == group)
        order = np.lexsort((self.column[layers, heads], self.ranks[layers, heads]))
        return [(int(layers[i]), int(heads[i])) for i in order]

    def over_allocation(self, budgets: NDArray[np.float64]) -> float:
        """Memory that pages take over memory that the budgets ask for, at least 1; padding counts as taken."""
        wanted = float(budgets.sum())
        return self.page_members * float(self.group_max(budgets).sum()) / wanted if wanted > 0 else 1.0

    def of_rank(self, rank: int) -> HeadGroups:
        """Groups and columns ``[L of the rank, H of the rank]`` of the members that one rank holds."""
        own = self.ranks == rank
        shape = own.any(axis=1).sum(), own.any(axis=0).sum()
        group, column = self.group[own].reshape(shape), self.column[own].reshape(shape)
        return HeadGroups(group, column, self.size, self.num_groups, np.zeros(shape, np.int32))


def group_members(
    budgets: NDArray[np.float64],
    shape: tuple[int, int],
    size: int,
    mode: Grouping,
    ranks: NDArray[np.int32] | None = None,
) -> HeadGroups:
    """Partition the members, each rank's for itself.

    Every rank sorts its own, so members of like budgets meet in one group on all ranks, and the largest budget over the
    ranks, which is the group's, is little more than each rank's own.

    Args:
        budgets: [M] sort key of each member, row-major (layer, head).
        shape: (L, W).
        size: members of a group on a rank, G.
        mode: "global" sorts all members, "layer" those of each layer, "neighbours" keeps the (layer, head) order.
            Each sorted run is cut into groups of ``size`` and its last group is padded.
        ranks: [L, W], the rank that holds each member: every rank a run of layers and of their heads; None: one rank.

    Raises:
        TangramError: ``size`` is less than 1, or more than some rank has members.

    """
    ranks = np.zeros(shape, np.int32) if ranks is None else ranks
    fewest = int(np.bincount(ranks.ravel()).min())
    if not 1 <= size <= fewest:
        some = f"{shape[0]} layers of {shape[1]} KV heads"
        raise TangramError(
            f"--page-group-size must be from 1 to {fewest} for "
            f"{some if ranks.max() == 0 else f'the {fewest} KV heads of a rank'}, got {size}"
        )
    group, column = np.empty(shape, np.int32), np.empty(shape, np.int32)
    num_groups = 0
    for rank in range(int(ranks.max()) + 1):
        own = ranks == rank
        # Richest first: the padded group is then the one whose pages are fewest. Stable: equal everywhere.
        runs = -budgets.reshape(shape)[own].reshape((-1, own.any(axis=0).sum()) if mode == "layer" else (1, -1))
        length = runs.shape[1]
        order = np.argsort(runs, 1, kind="stable")
        if mode == "neighbours":
            order = np.arange(length)[None]
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(length)[None], axis=1)
        groups_per_run = -(-length // size)
        group[own] = (place // size + groups_per_run * np.arange(len(runs))[:, None]).ravel()
        column[own] = (place % size).ravel()
        num_groups = max(num_groups, groups_per_run * len(runs))
    return HeadGroups(group, column, size, num_groups, ranks)
