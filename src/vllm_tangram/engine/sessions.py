# SPDX-License-Identifier: Apache-2.0
"""Compressed prefixes that outlive their requests: a conversation's next turn, or another question about one document.

A request's state after a whole number of chunks of its prompt depends on those tokens alone (docs/design.md), and its
pages are the first of its page list. So such a state is a *checkpoint*: a list of pages and how many of them count.
Pages are never rewritten, hence checkpoints and requests share them by vLLM's reference counts. Pages of a checkpoint
that nobody uses lie in vLLM's free queue, where they count as free, behind those that hold nothing of use; the first
page that is handed out again takes all checkpoints with it that it belongs to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

#: (hash of the token prefix, retention): vLLM's hash covers everything that makes equal tokens mean something else.
Key = tuple[bytes, float]


@dataclass
class Checkpoint:
    """The compressed state of one token prefix.

    Attributes:
        key: what it is the state of.
        tokens: length of the prefix.
        pages: in order of birth; at least ``num_pages``, of which the first ``num_pages`` are the state.
        num_pages: see ``pages``.
        hits: requests that began with it.

    """

    key: Key
    tokens: int
    pages: Sequence[KVCacheBlock]
    num_pages: int
    hits: int = 0


class SessionCache:
    """The checkpoints whose pages are all intact.

    A page list is freed from its end, and whoever uses a page also uses all before it. So of the pages of a checkpoint
    the last one is the first to be handed out again, and watching it alone is enough.

    Attributes:
        evicted: checkpoints lost to page reuse since start.
        reused: requests that began with a checkpoint since start.

    """

    def __init__(self) -> None:
        self._checkpoints: dict[Key, Checkpoint] = {}
        self._keys_of: defaultdict[int, set[Key]] = defaultdict(set)  # last page -> checkpoints that end with it
        self.evicted = 0
        self.reused = 0

    def __len__(self) -> int:
        return len(self._checkpoints)

    def remember(self, key: Key, tokens: int, pages: Sequence[KVCacheBlock], num_pages: int) -> None:
        """Make a state findable, unless an equal one is known already.

        Args:
            key: what it is the state of.
            tokens: length of the prefix.
            pages: page list of the request that computed it; it may grow, what is in it must stay.
            num_pages: first pages of it that are the state, at least 1.

        """
        if key not in self._checkpoints:
            self._checkpoints[key] = Checkpoint(key, tokens, pages, num_pages)
            self._keys_of[pages[num_pages - 1].block_id].add(key)

    def find(self, keys: Iterable[Key]) -> Checkpoint | None:
        """The first of ``keys`` that is known."""
        return next((found for key in keys if (found := self._checkpoints.get(key)) is not None), None)

    def handed_out(self, pages: Iterable[KVCacheBlock]) -> None:
        """Pages get new contents: forget the checkpoints that end with one of them."""
        for page in pages:
            for key in self._keys_of.pop(page.block_id, ()):
                del self._checkpoints[key]
                self.evicted += 1

    def kept_of(self, pages: Sequence[KVCacheBlock]) -> int:
        """How many of a request's first pages belong to checkpoints: those up to the last page that ends one."""
        for index in range(len(pages) - 1, -1, -1):
            if pages[index].block_id in self._keys_of:
                return index + 1
        return 0

    def clear(self) -> None:
        """Forget all."""
        self._checkpoints.clear()
        self._keys_of.clear()

    def checkpoints(self) -> list[Checkpoint]:
        """All, in the order in which they were remembered."""
        return list(self._checkpoints.values())
