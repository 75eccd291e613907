# SPDX-License-Identifier: Apache-2.0
"""Allocates head-group pages: exactly those that the eviction schedule says, never one back before the end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_tangram.engine.checkpoint import Hit
from vllm_tangram.engine.sessions import SessionCache

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_tangram.budget import EvictionSchedule


@dataclass(frozen=True)
class RequestBudget:
    """What the page need of one request depends on, besides its length.

    Attributes:
        prompt_len: tokens of the prompt, P; later tokens evict nothing.
        schedule: the eviction schedule at the request's retention.
        retention: that.
        chunk_size: prompt tokens compressed at once.

    """

    prompt_len: int
    schedule: EvictionSchedule
    retention: float
    chunk_size: int

    def pages(self, num_tokens: int) -> int:
        """Pages held after ``num_tokens`` tokens."""
        return self.schedule.num_pages(num_tokens, self.prompt_len)

    def boundaries(self, num_tokens: int) -> range:
        """Prompt lengths up to ``num_tokens`` after which the state depends on these tokens alone, longest first."""
        last = min(num_tokens, self.prompt_len) // self.chunk_size
        return range(last * self.chunk_size, 0, -self.chunk_size)


class HeadGroupManager(SingleTypeKVCacheManager):
    """vLLM's per-spec page manager with the deterministic page need of ``docs/design.md``.

    The scheduler announces every request (``announce``) before its first allocation and withdraws it when it ends;
    a preempted request stays announced. Invariant: an announced request holds ``pages(t)`` pages after a step that
    brought it to ``t`` tokens, and ``committed_pages`` counts what admitted requests were promised and do not hold yet.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budgets: dict[str, RequestBudget] = {}
        self._promised: dict[str, int] = {}  # pages that the last admission of a request was for, until it has them
        self.sessions = SessionCache()
        self._remembered: dict[str, int] = {}  # tokens of running requests whose states are known
        self._room: dict[str, int] = {}  # tokens that the pages of a request that decodes have room for
        self._found: dict[str, Hit | None] = {}  # what a request will begin with once there are pages for it
        self._begun: dict[str, Hit] = {}  # what it begins with in this step, until it has its other pages, too
        self._unstarted: dict[str, int] = {}  # need of requests that never had a page
        self.unstarted_pages = 0  # its sum: queues are long
        self.pages_reclaimed = 0  # pages that became unnecessary while their request ran: the design keeps this at 0

    def announce(self, request_id: str, budget: RequestBudget) -> None:
        """Make a request known; must come before its first allocation."""
        self.budgets[request_id] = budget
        self._unstarted[request_id] = need = budget.pages(budget.prompt_len)
        self.unstarted_pages += need

    def _started(self, request_id: str) -> None:
        self.unstarted_pages -= self._unstarted.pop(request_id, 0)

    def withdraw(self, request_id: str) -> None:
        """Forget a finished or aborted request."""
        self._started(request_id)
        self.budgets.pop(request_id, None)
        self._promised.pop(request_id, None)
        self._found.pop(request_id, None)

    def committed_pages(self) -> int:
        """Pages that admitted requests will still take for what they were admitted with: prompt and replayed tokens."""
        return sum(
            pages - len(blocks)
            for request_id, pages in self._promised.items()
            if (blocks := self.req_to_blocks.get(request_id))
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Pages to add for ``num_tokens`` tokens; for an admission also those promised to prompts still in prefill."""
        held = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        pages = self.budgets[request_id].pages(num_tokens)
        need = pages - held
        if need < 0:
            self.pages_reclaimed -= need
        # Pages that nobody holds count as free until they are taken; who holds one of a list holds all before it.
        need += len(new_computed_blocks) - bisect_left(new_computed_blocks, True, key=_is_idle)
        if apply_admission_cap:  # vLLM's full-sequence gate: admit only what fits beside all that was admitted before
            need += self.committed_pages()
            self._promised[request_id] = pages  # counts from the first page on that the request gets
        return max(need, 0)

    def stays_in_block(self, request: Request, num_new_tokens: int) -> bool:
        """Whether a step of a request does nothing to pages and sessions: it is one of decode within a block.

        A step that goes beyond the prompt begins at its end or later. So once pages were allocated for one, all states
        of the prompt are known, and until the next block there is nothing to do.
        """
        reached = request.num_computed_tokens + num_new_tokens
        return 0 <= self._room.get(request.request_id, -1) - reached < self.block_size

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Append pages in birth order up to the need at ``num_tokens``; the first may be filled from the host."""
        blocks = self.req_to_blocks[request_id]
        budget = self.budgets[request_id]
        self._started(request_id)
        if num_tokens > budget.prompt_len:
            self._room[request_id] = -(-num_tokens // self.block_size) * self.block_size
        hit = self._begun.pop(request_id, None)
        new_blocks: list[KVCacheBlock] = self.block_pool.get_new_blocks(budget.pages(num_tokens) - len(blocks))
        self.sessions.handed_out(new_blocks, keep=hit.spilled if hit else ())
        blocks.extend(new_blocks)
        if len(blocks) >= self._promised.get(request_id, 0):
            self._promised.pop(request_id, None)
        if hit is not None:
            self.sessions.restore(hit, blocks)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in new_blocks)
        return new_blocks

    def remember(self, request: Request) -> None:
        """Make the states after the chunks that a request has computed findable; those of its running step not yet."""
        request_id = request.request_id
        budget, known = self.budgets[request_id], self._remembered.get(request_id, 0)
        if known >= budget.prompt_len:  # nothing more can come: decode steps end here
            return
        blocks = self.req_to_blocks.get(request_id)
        if not self.enable_caching or not blocks:
            return
        for tokens in budget.boundaries(request.num_computed_tokens):
            if tokens <= known:
                break
            before = tokens - budget.chunk_size
            parent = self._key(request, before) if before else None
            self.sessions.remember(
                self._key(request, tokens), tokens, blocks, budget.pages(tokens), parent, budget.pages(before)
            )
        self._remembered[request_id] = max(known, request.num_computed_tokens)  # not yet set in a request's first step

    def leave(self, request: Request) -> None:
        """A request is about to give its pages back: what it used was used until now."""
        self.remember(request)
        known = self.budgets[request.request_id].boundaries(self._remembered.get(request.request_id, 0))
        if (found := self.sessions.find(self._key(request, tokens) for tokens in known)) is not None:
            self.sessions.used(found.longest)

    def find(self, request: Request) -> Hit | None:
        """The longest known state of a prefix of the request's prompt that leaves a token to compute."""
        self.sessions.expire()
        boundaries = self.budgets[request.request_id].boundaries(request.num_tokens - 1)
        found = self.sessions.find(self._key(request, tokens) for tokens in boundaries)
        self._found[request.request_id] = found
        return found

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a request that others will find: vLLM tells its users which of them were not known before."""
        boundaries = self.budgets[request.request_id].boundaries(request.num_computed_tokens)
        return boundaries[0] if self.enable_caching and boundaries else 0

    def _key(self, request: Request, tokens: int) -> tuple[bytes, float]:
        return request.block_hashes[tokens // self.block_size - 1], self.budgets[request.request_id].retention

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Begin a request with the pages of a checkpoint."""
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        self._remembered[request_id] = num_local_computed_tokens
        if (found := self._found.pop(request_id, None)) is not None:
            self.sessions.began_with(found.longest, self.req_to_blocks[request_id])
            self._begun[request_id] = found

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """What earlier steps computed can be used by others from now on."""
        self.remember(request)

    def free(self, request_id: str) -> None:
        """Give pages back: those of checkpoints to the end of the queue, last page first, the others to its front."""
        blocks = self.pop_blocks_for_free(request_id)
        kept = self.sessions.kept_of(blocks)
        self.block_pool.free_blocks(reversed(blocks[kept:]))
        self.block_pool.unpin_blocks(reversed(blocks[:kept]), _nothing)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._remembered.pop(request_id, None)
        self._room.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is reclaimed."""

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The scheduler asks ``find``: a hit depends on the request's retention, too."""
        return ([],), 0


def _is_idle(page: KVCacheBlock) -> bool:
    return bool(page.ref_cnt == 0)


def _nothing(_: KVCacheBlock) -> None:
    """Pages tell nobody that they are reused: ``allocate_new_blocks`` sees them all."""
