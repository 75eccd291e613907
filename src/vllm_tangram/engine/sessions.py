# SPDX-License-Identifier: Apache-2.0
"""Compressed prefixes that outlive their requests: a conversation's next turn, or another question about one document.

A request's state after a whole number of chunks of its prompt depends on those tokens alone (docs/design.md), and its
pages are the first of its page list. So such a state is a *checkpoint*: a list of pages and how many of them count.
Pages are never rewritten, hence checkpoints and requests share them by vLLM's reference counts. Pages of a checkpoint
that nobody uses lie in vLLM's free queue, where they count as free, behind those that hold nothing of use; the first
page that is handed out again takes all checkpoints with it that it belongs to. Since they count as free, a limit on
their share of the pool would protect nobody, and there is none; a time to live only bounds how long they are found.

A *session*, as people see it, is a checkpoint that no longer one extends: the end of a conversation or document. Its
*chain* is itself and the checkpoints that it extends.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        parent: key of the state one chunk earlier, if there is one; it may be unknown.
        last_used: when a request last computed it, began with it or a longer one, or ended (the cache's clock).
        hits: requests that began with it.

    """

    key: Key
    tokens: int
    pages: Sequence[KVCacheBlock]
    num_pages: int
    parent: Key | None
    last_used: float
    hits: int = 0

    @property
    def last_page(self) -> KVCacheBlock:
        """The first of its pages to be handed out again."""
        return self.pages[self.num_pages - 1]

    @property
    def in_use(self) -> bool:
        """Whether a request holds its pages."""
        return self.last_page.ref_cnt > 0


@dataclass(frozen=True)
class Session:
    """The end of a conversation or document.

    Attributes:
        id: 16 hex digits, made of its key: another one after the conversation's next turn.
        tokens: length of its prefix.
        retention: fraction of full KV that it was compressed to.
        pages: that it holds; sessions with a common beginning share those of it.
        idle_seconds: since its last use.
        hits: requests that began with it or a part of it, summed over its chain.

    """

    id: str
    tokens: int
    retention: float
    pages: int
    idle_seconds: float
    hits: int


class SessionCache:
    """The checkpoints whose pages are all intact.

    A page list is freed from its end, and whoever uses a page also uses all before it. So of the pages of a checkpoint
    the last one is the first to be handed out again, and watching it alone is enough. A checkpoint that expires or is
    dropped is not found any more, but its pages are watched on: longer ones may begin with them, and the order in
    which pages are freed must not change.

    Attributes:
        ttl: seconds without use after which a checkpoint is forgotten, 0 = never; one whose pages a request holds is
            in use.
        evicted: checkpoints lost to page reuse since start.
        reused: requests that began with a checkpoint since start.

    """

    def __init__(self, ttl: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl = ttl
        self._clock = clock
        self._checkpoints: OrderedDict[Key, Checkpoint] = OrderedDict()  # least recently used first
        # Last page -> checkpoints that end with it, or did before they were forgotten.
        self._keys_of: defaultdict[int, set[Key]] = defaultdict(set)
        self._extensions: Counter[Key] = Counter()  # state -> checkpoints one chunk longer
        self.evicted = 0
        self.reused = 0

    def __len__(self) -> int:
        return len(self._checkpoints)

    def remember(
        self, key: Key, tokens: int, pages: Sequence[KVCacheBlock], num_pages: int, parent: Key | None = None
    ) -> None:
        """Make a state findable, unless an equal one is known already.

        Args:
            key: what it is the state of.
            tokens: length of the prefix.
            pages: page list of the request that computed it; it may grow, what is in it must stay.
            num_pages: first pages of it that are the state, at least 1.
            parent: key of the state one chunk earlier.

        """
        if key in self._checkpoints:
            return
        self._checkpoints[key] = checkpoint = Checkpoint(key, tokens, pages, num_pages, parent, self._clock())
        self._keys_of[checkpoint.last_page.block_id].add(key)
        if parent is not None:
            self._extensions[parent] += 1

    def find(self, keys: Iterable[Key]) -> Checkpoint | None:
        """The first of ``keys`` that is known."""
        return next((found for key in keys if (found := self._checkpoints.get(key)) is not None), None)

    def began_with(self, checkpoint: Checkpoint) -> None:
        """A request took it over."""
        self.reused += 1
        checkpoint.hits += 1
        self.used(checkpoint)

    def used(self, longest: Checkpoint) -> None:
        """Its chain was used now."""
        now = self._clock()
        for checkpoint in self._chain(longest):
            checkpoint.last_used = now
            self._checkpoints.move_to_end(checkpoint.key)  # those it extends come after it: the longest expires first

    def handed_out(self, pages: Iterable[KVCacheBlock]) -> None:
        """Pages get new contents: forget the checkpoints that end with one of them."""
        for page in pages:
            for key in self._keys_of.pop(page.block_id, ()):
                checkpoint = self._checkpoints.get(key)
                if checkpoint is not None and checkpoint.last_page is page:  # else forgotten and computed again
                    self._forget(checkpoint)
                    self.evicted += 1

    def expire(self) -> None:
        """Forget what nobody used for ``ttl`` seconds; cheap when that is nothing."""
        if not self.ttl:
            return
        now = self._clock()
        while self._checkpoints and (oldest := next(iter(self._checkpoints.values()))).last_used <= now - self.ttl:
            if oldest.in_use:
                oldest.last_used = now
                self._checkpoints.move_to_end(oldest.key)
            else:
                self._forget(oldest)

    def listing(self) -> list[Session]:
        """All, the last used first."""
        now = self._clock()
        return [
            Session(
                id=_session_id(end.key),
                tokens=end.tokens,
                retention=end.key[1],
                pages=end.num_pages,
                idle_seconds=0.0 if end.in_use else now - end.last_used,
                hits=sum(checkpoint.hits for checkpoint in self._chain(end)),
            )
            for end in self._ends()
        ]

    def drop(self, session_ids: Iterable[str] | None = None) -> tuple[int, list[str]]:
        """Forget sessions, and of their chains what no other one extends. Pages in use stay in use, and a request that
        runs is remembered again as it goes on. What is forgotten cannot be found any more; its pages count as free as
        before and keep their place in the queue, so this is for privacy and tests, not to make room.

        Args:
            session_ids: which; None: all.

        Returns:
            How many were forgotten; and the ids that are no session's: if there are any, nothing is forgotten.

        """
        ends = {_session_id(end.key): end for end in self._ends()}
        wanted = dict.fromkeys(ends if session_ids is None else session_ids)
        if unknown := [session_id for session_id in wanted if session_id not in ends]:
            return 0, unknown
        for session_id in wanted:
            for checkpoint in self._chain(ends[session_id]):
                if self._extensions[checkpoint.key]:
                    break
                self._forget(checkpoint)
        return len(wanted), []

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
        self._extensions.clear()

    def checkpoints(self) -> list[Checkpoint]:
        """All, the least recently used first."""
        return list(self._checkpoints.values())

    def _ends(self) -> list[Checkpoint]:
        return [end for end in reversed(self._checkpoints.values()) if not self._extensions[end.key]]

    def _chain(self, longest: Checkpoint) -> Iterator[Checkpoint]:
        """From the longest on, as far as they are known."""
        checkpoint: Checkpoint | None = longest
        while checkpoint is not None:
            yield checkpoint
            checkpoint = self._checkpoints.get(checkpoint.parent) if checkpoint.parent else None

    def _forget(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint.key]
        if checkpoint.parent is not None:
            self._extensions[checkpoint.parent] -= 1
            if not self._extensions[checkpoint.parent]:
                del self._extensions[checkpoint.parent]


def _session_id(key: Key) -> str:
    prefix, retention = key
    return hashlib.sha256(f"{prefix.hex()} {retention!r}".encode()).hexdigest()[:16]
