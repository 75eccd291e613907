# SPDX-License-Identifier: Apache-2.0
"""Host memory behind the page pool, as the scheduler sees it: which host page holds what, and what a step has to copy.

Nothing here touches a page. Workers own the buffer (``engine.host``) and do the copies of a step before its forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

#: (hash of the token prefix, retention): vLLM's hash covers everything that makes equal tokens mean something else.
Key = tuple[bytes, float]

#: Name of the attribute of vLLM's ``SchedulerOutput`` under which a step's ``Copies`` travel.
COPIES = "tangram_copies"

#: And of its ``ModelRunnerOutput``, present where copies of the step failed on some rank.
COPIES_FAILED = "tangram_copies_failed"


@dataclass
class Copies:
    """What a step copies between pool and host, in the order in which it was decided.

    The order makes everything right that can happen to a page within one step: handed out, filled from the host and
    handed out again, or a host page that is read and then given to another state.

    Attributes:
        runs: (whether to the host, {destination page: source page}); copies of a run read nothing that it writes, and
            where a page was written twice the last one counts.

    """

    runs: list[tuple[bool, dict[int, int]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.runs)

    def add(self, *, to_host: bool, pool_pages: Iterable[int], host_pages: Iterable[int]) -> None:
        """Copy pages, pairwise."""
        if not self.runs or self.runs[-1][0] != to_host:
            self.runs.append((to_host, {}))
        pairs = zip(pool_pages, host_pages, strict=True)
        self.runs[-1][1].update({host: pool for pool, host in pairs} if to_host else dict(pairs))


class HostSpace:
    """Pages of the host buffer, handed out to states by their keys.

    Attributes:
        capacity: pages that there are.

    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity))
        self._pages: OrderedDict[Key, Sequence[int]] = OrderedDict()  # first to give its pages up first

    def __len__(self) -> int:
        """States that are here."""
        return len(self._pages)

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    @property
    def num_used(self) -> int:
        """Pages that hold something."""
        return self.capacity - len(self._free)

    def pages_of(self, key: Key) -> Sequence[int]:
        """Pages of a state that is here."""
        return self._pages[key]

    def fits(self, num_pages: int, keep: Collection[Key]) -> bool:
        """Whether a state of this size can be put here if all but those to ``keep`` go."""
        return num_pages <= self.capacity - sum(len(self._pages.get(key, ())) for key in keep)

    def next_victim(self, num_pages: int, keep: Collection[Key]) -> Key | None:
        """The state to ``discard`` first so that one of ``num_pages`` has room; None: there is room."""
        if num_pages <= len(self._free):
            return None
        return next(key for key in self._pages if key not in keep)

    def put(self, key: Key, num_pages: int) -> Sequence[int]:
        """Give pages to a state that is not here; there must be room."""
        assert key not in self._pages
        pages = self._pages[key] = [self._free.pop() for _ in range(num_pages)]
        return pages

    def renew(self, key: Key) -> None:
        """It gives its pages up last from now on, if it is here."""
        if key in self._pages:
            self._pages.move_to_end(key)

    def discard(self, key: Key) -> None:
        """Take a state's pages back, if it is here."""
        self._free.extend(self._pages.pop(key, ()))

    def clear(self) -> None:
        """Take all back."""
        for key in list(self._pages):
            self.discard(key)
