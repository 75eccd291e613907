# SPDX-License-Identifier: Apache-2.0
"""Compressed prefixes that outlive their requests: a conversation's next turn, or another question about one document.

A request's state after a whole number of chunks of its prompt depends on those tokens alone (docs/design.md), and its
pages are the first of its page list. So such a state is a *checkpoint*: a list of pages and how many of them count.
Pages are never rewritten, hence checkpoints and requests share them by vLLM's reference counts. Pages of a checkpoint
that nobody uses lie in vLLM's free queue, where they count as free, behind those that hold nothing of use; the first
page that is handed out again takes all checkpoints with it that it belongs to. Since they count as free, a limit on
their share of the pool would protect nobody, and there is none; a time to live only bounds how long they are found.

With host memory (``engine.spill``) a checkpoint that loses its pages lives on there: the pages that it has beyond the
checkpoint one chunk earlier are copied before the step that overwrites them. A request that begins with it gets new
pages, into which they are copied back.

A *session*, as people see it, is a checkpoint that no longer one extends: the end of a conversation or document. Its
*chain* is itself and the checkpoints that it extends.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from vllm_tangram.engine.checkpoint import Checkpoint, Hit, Session
from vllm_tangram.engine.spill import Copies, HostSpace, Key

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class SessionCache:
    """The checkpoints whose pages are all intact, in the pool or on the host.

    A page list is freed from its end, and whoever uses a page also uses all before it. So of the pages of a checkpoint
    the last one is the first to be handed out again, and watching it alone is enough. A checkpoint that expires or is
    dropped is not found any more, but its pages are watched on: longer ones may begin with them, and the order in
    which pages are freed must not change.

    A checkpoint that is on the host alone has its own pages there, and those before it are some earlier checkpoint's,
    which is known: who loses an earlier one loses it, too. What is in the pool again keeps its copy on the host, which
    stays right, for pages are never rewritten; but the host gives up first what left the pool first.

    Attributes:
        ttl: seconds without use after which a checkpoint is forgotten, 0 = never; one whose pages a request holds is
            in use.
        host: room for checkpoints that lose their pages.
        copies: what the next step has to copy.
        evicted: checkpoints lost to page reuse since start.
        reused: requests that began with a checkpoint since start.
        restored: those of them that began with pages from the host.

    """

    def __init__(self, ttl: float = 0.0, clock: Callable[[], float] = time.monotonic, host_pages: int = 0) -> None:
        self.ttl = ttl
        self.host = HostSpace(host_pages)
        self.copies = Copies()
        self._clock = clock
        self._checkpoints: OrderedDict[Key, Checkpoint] = OrderedDict()  # least recently used first
        # Last page -> checkpoints that end with it, or did before they were forgotten.
        self._keys_of: defaultdict[int, set[Key]] = defaultdict(set)
        self._extensions: defaultdict[Key, set[Key]] = defaultdict(set)  # state -> checkpoints one chunk longer
        self.evicted = 0
        self.reused = 0
        self.restored = 0

    def __len__(self) -> int:
        return len(self._checkpoints)

    def remember(
        self,
        key: Key,
        tokens: int,
        pages: Sequence[KVCacheBlock],
        num_pages: int,
        parent: Key | None = None,
        inherited: int = 0,
    ) -> None:
        """Make a state findable, unless the pool has an equal one already.

        Args:
            key: what it is the state of.
            tokens: length of the prefix.
            pages: page list of the request that computed it; it may grow, what is in it must stay.
            num_pages: first pages of it that are the state, at least 1.
            parent: key of the state one chunk earlier.
            inherited: first pages of it that are that state.

        """
        known = self._checkpoints.get(key)
        if known is None:
            known = Checkpoint(key, tokens, (), num_pages, inherited, parent, self._clock())
            self._checkpoints[key] = known
            if parent is not None:
                self._extensions[parent].add(key)
        if not known.in_pool:
            self._bring_into_pool(known, pages)

    def find(self, keys: Iterable[Key]) -> Hit | None:
        """What the first of ``keys`` that is known begins with."""
        longest = next((found for key in keys if (found := self._checkpoints.get(key)) is not None), None)
        if longest is None:
            return None
        spilled: list[Checkpoint] = []
        for checkpoint in self._chain(longest):
            if checkpoint.in_pool:
                return Hit(longest, list(checkpoint.pages[: checkpoint.num_pages]), spilled)
            spilled.append(checkpoint)
        return Hit(longest, [], spilled)

    def restore(self, hit: Hit, pages: Sequence[KVCacheBlock]) -> None:
        """A request got its pages: those from the host are filled in the next step, before anybody reads them.

        Args:
            hit: what it begins with; no state of it may have been lost.
            pages: its page list.

        """
        for checkpoint in hit.spilled:
            own = checkpoint.own_of(pages)
            self.copies.add(to_host=False, pool_pages=own, host_pages=self.host.pages_of(checkpoint.key))
            self._bring_into_pool(checkpoint, pages)
        self.restored += bool(hit.spilled)

    def take_copies(self) -> Copies:
        """What has to be copied in the step that was planned, and before its forward."""
        copies, self.copies = self.copies, Copies()
        return copies

    def began_with(self, longest: Checkpoint, pages: Sequence[KVCacheBlock]) -> None:
        """A request took it over.

        Its chain shares the request's page list from now on: with a list from every turn, the lists of a conversation
        would grow with the square of its turns, and with them memory and every collection of garbage.

        Args:
            longest: what it began with.
            pages: page list of the request; as in ``remember``.

        """
        self.reused += 1
        longest.hits += 1
        self.used(longest)
        for checkpoint in self._chain(longest):
            # The last page tells: whoever uses a page has all before it, too. Others computed an equal state elsewhere.
            if checkpoint.in_pool and checkpoint.last_page is pages[checkpoint.num_pages - 1]:
                checkpoint.pages = pages

    def used(self, longest: Checkpoint) -> None:
        """Its chain was used now."""
        now = self._clock()
        for checkpoint in self._chain(longest):
            checkpoint.last_used = now
            self._checkpoints.move_to_end(checkpoint.key)  # those it extends come after it: the longest expires first

    def handed_out(self, pages: Iterable[KVCacheBlock], keep: Iterable[Checkpoint] = ()) -> None:
        """Pages get new contents: checkpoints that end with one of them go to the host, or are forgotten.

        Args:
            pages: that have been handed out, and not been written to yet.
            keep: checkpoints that are needed on the host.

        """
        needed = {checkpoint.key for checkpoint in keep}
        for page in pages:
            for key in self._keys_of.pop(page.block_id, ()):
                checkpoint = self._checkpoints.get(key)
                # Else it was forgotten, and perhaps computed again.
                if checkpoint is not None and checkpoint.in_pool and checkpoint.last_page is page:
                    if self._spill(checkpoint, needed):
                        checkpoint.pages = ()
                    else:
                        self.evicted += self._forget(checkpoint)

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
                id=end.session_id,
                tokens=end.tokens,
                retention=end.key[1],
                pages=end.num_pages,
                spilled_pages=self._spilled_pages(end),
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
        ends = {end.session_id: end for end in self._ends()}
        wanted = dict.fromkeys(ends if session_ids is None else session_ids)
        if unknown := [session_id for session_id in wanted if session_id not in ends]:
            return 0, unknown
        for session_id in wanted:
            for checkpoint in self._chain(ends[session_id]):
                if self._extensions.get(checkpoint.key):
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
        self.host.clear()

    def close_host(self) -> None:
        """Forget all, and put nothing on the host any more."""
        self.clear()
        self.host = HostSpace(0)

    def checkpoints(self) -> list[Checkpoint]:
        """All, the least recently used first."""
        return list(self._checkpoints.values())

    def _ends(self) -> list[Checkpoint]:
        return [end for end in reversed(self._checkpoints.values()) if not self._extensions.get(end.key)]

    def _chain(self, longest: Checkpoint) -> Iterator[Checkpoint]:
        """From the longest on, as far as they are known."""
        checkpoint: Checkpoint | None = longest
        while checkpoint is not None:
            yield checkpoint
            checkpoint = self._checkpoints.get(checkpoint.parent) if checkpoint.parent else None

    def _spilled_pages(self, end: Checkpoint) -> int:
        spilled = takewhile(lambda checkpoint: not checkpoint.in_pool, self._chain(end))
        return sum(checkpoint.own_pages for checkpoint in spilled)

    def _bring_into_pool(self, checkpoint: Checkpoint, pages: Sequence[KVCacheBlock]) -> None:
        checkpoint.pages = pages
        self._keys_of[checkpoint.last_page.block_id].add(checkpoint.key)

    def _spill(self, checkpoint: Checkpoint, needed: set[Key]) -> bool:
        """Let the host hold a checkpoint that loses its pages, if there is room and it can be used from there."""
        if not self.host.capacity or (checkpoint.parent is not None and checkpoint.parent not in self._checkpoints):
            return False
        chain = [each.key for each in self._chain(checkpoint)]
        if checkpoint.key not in self.host:
            keep = needed.union(chain)
            if not self.host.fits(checkpoint.own_pages, keep):
                return False
            while (victim := self.host.next_victim(checkpoint.own_pages, keep)) is not None:
                self._lose_copy(self._checkpoints[victim])
            pages = self.host.put(checkpoint.key, checkpoint.own_pages)
            self.copies.add(to_host=True, pool_pages=checkpoint.own_of(checkpoint.pages), host_pages=pages)
        for key in chain:  # those it extends come after it: the longest gives its pages up first
            self.host.renew(key)
        return True

    def _lose_copy(self, checkpoint: Checkpoint) -> None:
        self.host.discard(checkpoint.key)
        if not checkpoint.in_pool:
            self.evicted += self._forget(checkpoint)

    def _forget(self, checkpoint: Checkpoint) -> int:
        """Forget it and all that cannot be used without it.

        Returns:
            How many that are.

        """
        lost = [checkpoint]
        for each in lost:
            del self._checkpoints[each.key]
            self.host.discard(each.key)
            if each.parent is not None and each.parent in self._extensions:
                self._extensions[each.parent].discard(each.key)
                if not self._extensions[each.parent]:
                    del self._extensions[each.parent]
            extensions = [self._checkpoints[key] for key in self._extensions.get(each.key, ())]
            lost += [extension for extension in extensions if not extension.in_pool]
        return len(lost)
