# SPDX-License-Identifier: Apache-2.0
"""What is known of a compressed prefix, and what is shown of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_tangram.engine.spill import Key

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass
class Checkpoint:
    """The compressed state of one token prefix.

    Attributes:
        key: what it is the state of.
        tokens: length of the prefix.
        pages: in order of birth; at least ``num_pages``, of which the first ``num_pages`` are the state. Empty if it is
            not in the pool.
        num_pages: see ``pages``.
        inherited: how many of these are the state one chunk earlier.
        parent: key of that state, if there is one; it may be unknown unless this one is on the host alone.
        last_used: when a request last computed it, began with it or a longer one, or ended (the cache's clock).
        hits: requests that began with it.

    """

    key: Key
    tokens: int
    pages: Sequence[KVCacheBlock]
    num_pages: int
    inherited: int
    parent: Key | None
    last_used: float
    hits: int = 0

    @property
    def session_id(self) -> str:
        """Of the session that ends with it: 16 hex digits."""
        prefix, retention = self.key
        return hashlib.sha256(f"{prefix.hex()} {retention!r}".encode()).hexdigest()[:16]

    @property
    def in_pool(self) -> bool:
        """Whether the pool has its pages."""
        return bool(self.pages)

    @property
    def own_pages(self) -> int:
        """Pages that it has beyond the state one chunk earlier."""
        return self.num_pages - self.inherited

    def own_of(self, pages: Sequence[KVCacheBlock]) -> list[int]:
        """Ids of those in the page list of a request that begins with it."""
        return [page.block_id for page in pages[self.inherited : self.num_pages]]

    @property
    def last_page(self) -> KVCacheBlock:
        """The first of its pages to be handed out again."""
        return self.pages[self.num_pages - 1]

    @property
    def in_use(self) -> bool:
        """Whether a request holds its pages."""
        return self.in_pool and self.last_page.ref_cnt > 0


@dataclass(frozen=True)
class Hit:
    """What a request can begin with.

    Attributes:
        longest: the state.
        pages: the pages of it that are in the pool, from the first on.
        spilled: the states whose own pages come after those and are on the host.

    """

    longest: Checkpoint
    pages: list[KVCacheBlock]
    spilled: list[Checkpoint]

    @property
    def tokens(self) -> int:
        """Length of the prefix."""
        return self.longest.tokens


@dataclass(frozen=True)
class Session:
    """The end of a conversation or document.

    Attributes:
        id: 16 hex digits, made of its key: another one after the conversation's next turn.
        tokens: length of its prefix.
        retention: fraction of full KV that it was compressed to.
        pages: that it holds; sessions with a common beginning share those of it.
        spilled_pages: those of them that are on the host alone.
        idle_seconds: since its last use.
        hits: requests that began with it or a part of it, summed over its chain.

    """

    id: str
    tokens: int
    retention: float
    pages: int
    spilled_pages: int
    idle_seconds: float
    hits: int
