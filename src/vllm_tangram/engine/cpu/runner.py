# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU model runner (V1) with page tables per head group."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed import get_pp_group
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_tangram.engine.admission import retention_of
from vllm_tangram.engine.check import PLANNED, Planned
from vllm_tangram.engine.cpu.attention import HeadGroupCPUAttention, HeadGroupCPUBackend
from vllm_tangram.engine.cpu.generator import RewindableGenerator
from vllm_tangram.engine.host import SpillingRunner
from vllm_tangram.engine.known import KnownPrompts
from vllm_tangram.engine.layers import adopt_layers
from vllm_tangram.engine.scoring import LayerScorer
from vllm_tangram.engine.setup import groups_of, plan_of, rank_of, staging_pages
from vllm_tangram.engine.spec import HeadGroupSpec
from vllm_tangram.pages.table import PageTable, compile_kernels

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from vllm_tangram.budget import RetentionPlan
    from vllm_tangram.engine.profiling import ScoreObserver


class TangramCPUModelRunner(SpillingRunner, CPUModelRunner):
    """Adds to the stock runner: our attention in every layer, one page pool for all layers, page tables by request.

    Attributes:
        page_table: tables of the requests that this worker knows, in slots.
        first_staging_block: first one-head block of the staging pages, which lie behind the pool in the same tensor.
        last_staging_block: one past the last.
        plan: what each head may keep.
        known: scores of documents, and which requests begin with them, by slot.
        observer: records scores while a profile is made.
        planned: what the scheduler says that requests hold in this step, if it checks that.

    """

    page_table: PageTable
    plan: RetentionPlan
    known: KnownPrompts
    planned: dict[str, Planned] | None

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.first_staging_block = self.last_staging_block = 0
        self.observer: ScoreObserver | None = None
        self.planned = None
        self._slot_of: dict[str, int] = {}
        self._free_slots: list[int] = []

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        if not get_pp_group().is_first_rank:  # vLLM makes this in its warm-up, which it leaves out in eager mode
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        plan = self.plan = plan_of(self.vllm_config)
        groups = groups_of(self.vllm_config)
        self.known = KnownPrompts.load(plan, rank_of(self.vllm_config), self.device)

        def implement(index: int, stock: Any, scorer: LayerScorer) -> HeadGroupCPUAttention:
            return HeadGroupCPUAttention(
                stock,
                index=index,
                group=groups.group[index],
                column=groups.column[index],
                block_size=plan.block_size,
                dtype=self.model_config.dtype,
                config=plan.config,
                scorer=scorer,
            )

        adopt_layers(self.vllm_config, self.get_model(), plan, HeadGroupCPUBackend, implement, self.device)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs = super().get_kv_cache_spec()
        return {name: HeadGroupSpec.of(spec, self.vllm_config) for name, spec in specs.items()}

    def initialize_metadata_builders(self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]) -> None:
        super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)
        for attn_group in self._attn_group_iterator():
            attn_group.get_metadata_builder().bind(self)

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Allocate the pool and the staging pages behind it; the scheduler knows only the pool."""
        plan = self.plan = plan_of(self.vllm_config)  # the final model length is known only now
        (tensor,) = kv_cache_config.kv_cache_tensors
        num_staging = staging_pages(self.vllm_config)
        enlarged = copy.copy(kv_cache_config)
        enlarged.num_blocks += num_staging
        page_bytes = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        tensor = copy.copy(tensor)
        tensor.size += num_staging * page_bytes
        enlarged.kv_cache_tensors = [tensor]
        kv_caches = super().initialize_kv_cache_tensors(enlarged, kernel_block_sizes, **kwargs)

        group_size = plan.groups.size
        self.first_staging_block = kv_cache_config.num_blocks * group_size
        self.last_staging_block = enlarged.num_blocks * group_size
        self.page_table = PageTable(
            self.max_num_reqs,
            plan.num_groups,
            -(-self.max_model_len // plan.block_size),
            block_size=plan.block_size,
            group_size=group_size,
        )
        self._free_slots = list(range(self.max_num_reqs))
        compile_kernels()
        return kv_caches

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Keep a page-table slot for exactly the requests of the batch.

        A request that comes back (it waited for its next chunk, or was preempted) brings its whole page list again,
        so a table can always be rebuilt.
        """
        self.planned = getattr(scheduler_output, PLANNED, None)
        result = super()._update_states(scheduler_output)
        present = self.input_batch.req_ids
        # An id may end and come again in one step; then, too, its pages are other ones.
        renewed = scheduler_output.scheduled_cached_reqs.resumed_req_ids | scheduler_output.finished_req_ids
        for request_id in (self._slot_of.keys() - set(present)) | (self._slot_of.keys() & renewed):
            slot = self._slot_of.pop(request_id)
            self.page_table.close(slot)
            self.known.close(slot)
            self._free_slots.append(slot)
        for request_id in present:
            if request_id not in self._slot_of:
                self._slot_of[request_id] = slot = self._free_slots.pop()
                request = self.requests[request_id]
                retention = retention_of(self.plan.config, request.sampling_params)
                self.page_table.open(slot, request.num_prompt_tokens, self.plan.schedule(retention).kept)
                self.known.open(slot, request.prompt_token_ids, adapted=request.lora_request is not None)
        self._begin_seeded_draws()
        return result

    def _begin_seeded_draws(self) -> None:
        for row, generator in self.input_batch.generators.items():
            request = self.requests[self.input_batch.req_ids[row]]
            if not isinstance(generator, RewindableGenerator):
                generator = RewindableGenerator.like(generator)
                self.input_batch.generators[row] = generator
                request.generator = generator
            generator.begin_step(len(request.output_token_ids))

    def slots_of(self, request_ids: Sequence[str]) -> np.ndarray:
        """Page-table slots of requests, ``[R]`` int32."""
        return np.fromiter((self._slot_of[r] for r in request_ids), np.int32, len(request_ids))
