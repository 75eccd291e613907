# SPDX-License-Identifier: Apache-2.0
"""Allocates head-group pages: exactly those that the eviction schedule says, never one back before the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from vllm_tangram.budget import EvictionSchedule


@dataclass(frozen=True)
class RequestBudget:
    """What the page need of one request depends on, besides its length.

    Attributes:
        prompt_len: tokens of the prompt, P; later tokens evict nothing.
        schedule: the eviction schedule at the request's retention.

    """

    prompt_len: int
    schedule: EvictionSchedule

    def pages(self, num_tokens: int) -> int:
        """Pages held after ``num_tokens`` tokens."""
        return self.schedule.num_pages(num_tokens, self.prompt_len)


class HeadGroupManager(SingleTypeKVCacheManager):
    """vLLM's per-spec page manager with the deterministic page need of ``docs/design.md``.

    The scheduler announces every request (``announce``) before its first allocation and withdraws it when it ends;
    a preempted request stays announced. Invariant: an announced request holds ``pages(t)`` pages after a step that
    brought it to ``t`` tokens, and ``committed_pages`` counts what admitted requests were promised and do not hold yet.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budgets: dict[str, RequestBudget] = {}
        self._promised: dict[str, int] = {}  # pages that the last admission of a request was for
        self.pages_reclaimed = 0  # pages that became unnecessary while their request ran: the design keeps this at 0

    def announce(self, request_id: str, budget: RequestBudget) -> None:
        """Make a request known; must come before its first allocation."""
        self.budgets[request_id] = budget

    def withdraw(self, request_id: str) -> None:
        """Forget a finished or aborted request."""
        self.budgets.pop(request_id, None)
        self._promised.pop(request_id, None)

    def committed_pages(self) -> int:
        """Pages that admitted requests will still take for what they were admitted with: prompt and replayed tokens."""
        return sum(
            max(self._promised[request_id] - len(blocks), 0)
            for request_id, blocks in self.req_to_blocks.items()
            if blocks
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
        held = len(self.req_to_blocks.get(request_id, ()))
        pages = self.budgets[request_id].pages(num_tokens)
        need = pages - held
        if need < 0:
            self.pages_reclaimed -= need
        if apply_admission_cap:  # vLLM's full-sequence gate: admit only what fits beside all that was admitted before
            need += self.committed_pages()
            self._promised[request_id] = pages  # counts from the first page on that the request gets
        return max(need, 0)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Append pages in birth order up to the need at ``num_tokens``."""
        blocks = self.req_to_blocks[request_id]
        new_blocks: list[KVCacheBlock] = self.block_pool.get_new_blocks(
            self.budgets[request_id].pages(num_tokens) - len(blocks)
        )
        blocks.extend(new_blocks)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in new_blocks)
        return new_blocks

    def add_local_computed_blocks(self, *args: Any, **kwargs: Any) -> None:
        """No hits without prefix caching; vLLM calls this only for its bookkeeping."""

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is reclaimed."""

    def cache_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Head-group pages hold no hashable run of tokens."""

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        return ([],), 0
