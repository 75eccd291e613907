# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with whole compression chunks, exact admission and our figures; steps are planned by vLLM."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_tangram.engine import admission
from vllm_tangram.engine.check import CHECK_VARIABLE, PLANNED, PageCheck, check_wanted
from vllm_tangram.engine.compat import check_supported
from vllm_tangram.engine.manager import HeadGroupManager, RequestBudget
from vllm_tangram.engine.metrics import PageStats
from vllm_tangram.engine.sessions import SessionCache
from vllm_tangram.engine.setup import MAX_RETENTIONS, host_pages, layout_of, plan_of
from vllm_tangram.engine.spec import HeadGroupSpec
from vllm_tangram.engine.spill import COPIES, COPIES_FAILED
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput


logger = init_logger("vllm.tangram")


class TangramScheduler(Scheduler):
    """Announces page needs to the manager, ends prefill at whole chunks, and counts pages for the metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_supported(self.vllm_config)
        self.plan = plan_of(self.vllm_config)
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        if not isinstance(spec, HeadGroupSpec):
            raise TangramError(
                f"the worker described its KV cache as {type(spec).__name__}, not as head groups: "
                "--worker-cls must be vllm-tangram's (start the engine with `tangram serve` or vllm_tangram.LLM)"
            )
        if spec.plan_digest != self.plan.digest():
            raise TangramError(
                "scheduler and worker read different retention profiles: --profile must name the same file "
                f"everywhere and must not change while the engine starts ({self.plan.config.profile})"
            )
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, HeadGroupManager)
        self.pages = manager
        manager.sessions = SessionCache(self.plan.config.session_ttl, host_pages=host_pages(self.vllm_config))
        # vLLM's deal in hashes of blocks of tokens, and the last two are called for every request of every step.
        self.kv_cache_manager.estimate_cached_tokens = manager.cached_tokens
        self.kv_cache_manager.cache_blocks = manager.cache_blocks
        self._allocate_pages = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots
        self.page_bytes = layout_of(self.vllm_config).bytes_of(1)
        self.num_preemptions = 0
        self._preempted: dict[str, Request] = {}  # those that wait, and some that run again
        self.check = PageCheck(manager) if check_wanted() else None
        if self.check is not None:
            logger.info("Tangram: %s=1: pages are verified at every step.", CHECK_VARIABLE)
        admission.log_capacity(self.vllm_config, self.plan, self.kv_cache_config.num_blocks)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's, with what workers have to copy between pool and host before the forward."""
        output = super().schedule(*args, **kwargs)
        if copies := self.pages.sessions.take_copies():
            setattr(output, COPIES, copies)
        if self.check is not None:
            setattr(output, PLANNED, self.check.run(self.requests))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's; but of a step whose copies failed, and of those planned since, nothing counts."""
        if getattr(model_runner_output, COPIES_FAILED, False) and self.pages.sessions.host.capacity:
            self._give_up_host_memory()
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        return outputs

    def _give_up_host_memory(self) -> None:
        """Begin anew, without it, all requests that run; the tokens that they gave so far stay."""
        logger.error(
            "Tangram: host memory for sessions (--session-spill-gib) failed and is not used any more. All sessions are "
            "forgotten, the %d running requests are computed again. Restart the server to have it again.",
            len(self.running),
        )
        self.reset_prefix_cache(reset_running_requests=True)
        self.pages.sessions.close_host()
        for request in self.requests.values():
            if request.num_stale_output_tokens:  # also of one that was preempted while the step ran
                request.drop_stale_output = True
            if request.prefill_stats is not None:  # nobody was told yet how much was cached: nothing was
                request.prefill_stats.set(request.num_prompt_tokens, 0, 0)

    def add_request(self, request: Request) -> None:
        """Announce the request's page need, cut its generation to what the pool can hold, and queue it."""
        if request.request_id not in self.requests:
            retention = self.plan.quantise(admission.retention_of(self.plan.config, request.sampling_params))
            budget = RequestBudget(
                request.num_prompt_tokens, self.plan.schedule(retention), retention, self.plan.config.chunk_size
            )
            self.pages.announce(request.request_id, budget)
            longest = budget.schedule.max_tokens_within(request.num_prompt_tokens, self._usable_pages())
            # The front end refuses prompts that never fit, and the last token needs no page. Without this bound the
            # last running request would preempt itself for ever.
            fitting = max(longest - request.num_prompt_tokens + 1, 1)
            if request.max_tokens > fitting:
                logger.info(
                    "Tangram: request %s may generate %d of %d tokens: its pages then fill the whole pool.",
                    request.request_id,
                    fitting,
                    request.max_tokens,
                )
                request.max_tokens = fitting
        super().add_request(request)

    def _allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        """vLLM's, where there is anything to do: most decode steps need no page, and its way there is long."""
        if self.pages.stays_in_block(request, num_new_tokens):
            return self.kv_cache_manager.empty_kv_cache_blocks
        return self._allocate_pages(request, num_new_tokens, *args, **kwargs)

    def _usable_pages(self) -> int:
        return int(self.kv_cache_config.num_blocks) - 1  # vLLM keeps block 0 as its null block

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Whole chunks only: up to a multiple of the chunk size, or the prompt's end; else not in this step.

        So what a request keeps, and what it answers, does not depend on who shares its steps.
        """
        prompt_len = request.num_prompt_tokens
        if request.status != RequestStatus.RUNNING and not self._retention_fits(request):
            return 0
        if num_computed_tokens >= prompt_len:
            return num_new_tokens
        chunk_size = self.plan.config.chunk_size
        reached = num_computed_tokens + num_new_tokens
        end = prompt_len if reached >= prompt_len else reached // chunk_size * chunk_size
        return max(end - num_computed_tokens, 0)

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        """Begin with the longest compressed prefix that is still there."""
        manager = self.kv_cache_manager
        found = self.pages.find(request) if manager.prefix_cache_lookup_enabled(request) else None
        if found is None:
            return manager.empty_kv_cache_blocks, 0, 0, False
        return KVCacheBlocks((found.pages,)), found.tokens, 0, False

    def _free_request_blocks(self, request: Request) -> None:
        """When a request ends or is preempted, what its prompt was compressed to stays findable."""
        self.pages.leave(request)
        super()._free_request_blocks(request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done = bool(super().reset_prefix_cache(*args, **kwargs))
        if done:
            self.pages.sessions.clear()
        return done

    def list_sessions(self) -> list[dict[str, Any]]:
        """The sessions that can be found, the last used first: fields of ``Session`` and ``bytes``."""
        self.pages.sessions.expire()
        return [
            {**asdict(session), "bytes": session.pages * self.page_bytes} for session in self.pages.sessions.listing()
        ]

    def drop_sessions(self, session_ids: list[str] | None) -> tuple[int, list[str]]:
        """See ``SessionCache.drop``."""
        self.pages.sessions.expire()
        return self.pages.sessions.drop(session_ids)

    def _retention_fits(self, request: Request) -> bool:
        """Whether workers have room for the request's retention beside those of the requests that run."""
        budgets = self.pages.budgets
        schedule = budgets[request.request_id].schedule
        if any(budgets[running.request_id].schedule is schedule for running in self.running):
            return True
        return len({id(budgets[running.request_id].schedule) for running in self.running}) < MAX_RETENTIONS

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self.num_preemptions += 1
        self._preempted[request.request_id] = request
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        self.pages.withdraw(request.request_id)
        self._preempted.pop(request.request_id, None)

    def page_stats(self) -> PageStats:
        """The pool and the running requests as of now."""
        held = kept = full = 0
        requests, budgets, full_pages = self.requests, self.pages.budgets, self.plan.full_pages
        for request_id, blocks in self.pages.req_to_blocks.items():
            if not blocks:
                continue
            held += len(blocks)
            tokens = requests[request_id].num_computed_tokens
            kept += budgets[request_id].pages(tokens)
            full += full_pages(tokens)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        waiting = self.pages.unstarted_pages
        for request in list(self._preempted.values()):
            if request.status == RequestStatus.PREEMPTED:
                waiting += budgets[request.request_id].pages(request.num_tokens)
            else:
                del self._preempted[request.request_id]
        return PageStats(
            pages_in_use=self._usable_pages() - free,
            pages_free=free,
            pages_held=held,
            pages_kept=kept,
            pages_full_kv=full,
            pages_waiting=waiting,
            pages_reclaimed=self.pages.pages_reclaimed,
            preemptions=self.num_preemptions,
            page_bytes=self.page_bytes,
            sessions=len(self.pages.sessions),
            sessions_reused=self.pages.sessions.reused,
            sessions_evicted=self.pages.sessions.evicted,
            sessions_spilled=len(self.pages.sessions.host),
            sessions_restored=self.pages.sessions.restored,
            host_pages_in_use=self.pages.sessions.host.num_used,
        )

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        self.pages.sessions.expire()
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self.page_stats().attach(stats)
        return stats


class TangramAsyncScheduler(TangramScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduler, which plans a step while the one before it runs."""
