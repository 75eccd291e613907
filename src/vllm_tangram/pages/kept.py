# SPDX-License-Identifier: Apache-2.0
"""The kept tables of the running requests, stacked in one array so that one kernel call serves a mixed batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 4


class KeptTables:
    """Registry of distinct kept tables, by identity of the array.

    A table without users stays until its place is needed, so requests that come one after another at the same retention
    copy it once; the registry never outgrows twice the number of distinct tables in use at one time.

    Attributes:
        stacked: ``[capacity, n_max + 1, N]`` int32; replaced by a larger array when it grows.

    """

    def __init__(self, num_groups: int) -> None:
        self.stacked: npt.NDArray[np.int32] = np.zeros((0, 0, num_groups), np.int32)
        self._sources: list[npt.NDArray[Any]] = []  # held, so that an id stays that of one array
        self._users: list[int] = []
        self._index: dict[int, int] = {}  # id of the source -> place
        self._idle: dict[int, None] = {}  # places without users, longest idle first

    def acquire(self, kept: npt.NDArray[np.integer[Any]]) -> int:
        """Count one more user of ``kept`` and return its place in `stacked`.

        Args:
            kept: ``[n_max + 1, N]`` integers that must not change while they are registered.

        Raises:
            ValueError: not of the shape of the tables before it.

        """
        place = self._index.get(id(kept))
        if place is None:
            self._check_shape(kept)
            place = self._free_place(kept)
            self.stacked[place] = kept
            self._sources[place] = kept
            self._index[id(kept)] = place
        self._idle.pop(place, None)
        self._users[place] += 1
        return place

    def release(self, place: int) -> None:
        """Count one user less of the table at ``place``."""
        self._users[place] -= 1
        if self._users[place] == 0:
            self._idle[place] = None

    def _check_shape(self, kept: npt.NDArray[Any]) -> None:
        num_groups = self.stacked.shape[2]
        if kept.ndim != 2 or kept.shape[1] != num_groups:
            raise ValueError(f"a kept table must be [n_max + 1, {num_groups}], got {kept.shape}")
        if self._sources and kept.shape[0] != self.stacked.shape[1]:
            raise ValueError(f"kept tables must all have {self.stacked.shape[1]} rows, got {kept.shape[0]}")

    def _free_place(self, kept: npt.NDArray[Any]) -> int:
        used, capacity = len(self._sources), len(self.stacked)
        if used == capacity and self._idle:
            place = next(iter(self._idle))
            del self._index[id(self._sources[place])]
            return place
        if used == capacity:
            grown = np.zeros((2 * capacity or _FIRST_CAPACITY, *kept.shape), np.int32)
            if used:
                grown[:used] = self.stacked
            self.stacked = grown
        self._sources.append(kept)
        self._users.append(0)
        return used
