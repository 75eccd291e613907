# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU model runner (V2) with pages of head groups."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_tangram.attention.prefill import LayerHeads, sizes_to_compile
from vllm_tangram.engine.admission import retention_of
from vllm_tangram.engine.cuda.attention import HeadGroupCUDAAttention, HeadGroupCUDABackend
from vllm_tangram.engine.cuda.splits import DecodeSplits
from vllm_tangram.engine.host import SpillingRunner
from vllm_tangram.engine.known import KnownPrompts
from vllm_tangram.engine.layers import adopt_layers
from vllm_tangram.engine.scoring import LayerScorer
from vllm_tangram.engine.setup import MAX_RETENTIONS, groups_of, plan_of, rank_of
from vllm_tangram.engine.spec import HeadGroupSpec
from vllm_tangram.pages.device import DevicePages

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_tangram.budget import EvictionSchedule, HeadGroups, RetentionPlan
    from vllm_tangram.engine.profiling import ScoreObserver


class TangramGPUModelRunner(SpillingRunner, GPUModelRunner):
    """Adds to the stock runner: our attention in every layer, one page pool for all layers, and what finds pages.

    vLLM's own block table is our page table (``pages.device``). It is read by request slot, so the stock gather into
    batch order is left out.

    Attributes:
        plan: what each head may keep.
        pages: finds the pages of the requests that this worker knows.
        requests: ``[max_num_reqs]`` int32 on the device, slot of each batch row, -1 where there is no request.
        schedules: by slot.
        known: scores of documents, and which requests begin with them, by slot.
        splits: how decode attention is split over the device.
        observer: records scores while a profile is made.

    """

    plan: RetentionPlan
    pages: DevicePages
    splits: DecodeSplits
    known: KnownPrompts

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.requests = torch.full((self.max_num_reqs,), -1, dtype=torch.int32, device=device)
        self._slots = np.full(self.max_num_reqs, -1, np.int32)  # what is in it
        self.schedules: dict[int, EvictionSchedule] = {}
        self.observer: ScoreObserver | None = None

    @cached_property
    def groups(self) -> HeadGroups:
        """Groups and columns of the KV heads that this rank holds."""
        return groups_of(self.vllm_config)

    @cached_property
    def heads(self) -> list[LayerHeads]:
        """The same by layer, on the device."""
        groups = self.groups
        return [
            LayerHeads(torch.tensor(group, device=self.device), torch.tensor(column, device=self.device))
            for group, column in zip(groups.group, groups.column, strict=True)
        ]

    @cached_property
    def all_heads(self) -> LayerHeads:
        """Those of all layers, one after another, on the device."""
        groups = self.groups
        return LayerHeads(
            torch.tensor(groups.group.reshape(-1), device=self.device),
            torch.tensor(groups.column.reshape(-1), device=self.device),
        )

    @property
    def flat(self) -> Tensor:
        """``[max_num_reqs, W]`` int32 on the device: the page list of every request slot."""
        table: Tensor = self.block_tables.block_tables[0].gpu
        return table

    def table_bytes(self) -> int:
        """Device memory of the block table, of what finds pages in it, and of the longest page lists of a step."""
        spec_width = self.plan.num_groups * self._max_blocks
        tables = spec_width * (self.max_num_reqs + MAX_RETENTIONS) + self.max_num_reqs * self.plan.num_groups
        # Every request has a chunk that begins in the step, and whole ones as the step has room for: `History`.
        chunks = self.max_num_reqs + self.max_num_tokens // self.plan.config.chunk_size
        return 4 * (tables + self.groups.group.size * chunks * (self._max_blocks + 1))

    @property
    def longest_chunk(self) -> int:
        """Most tokens of a chunk; a scorer may know no position beyond the model's."""
        return min(self.max_num_tokens, self.plan.config.chunk_size, self.max_model_len)

    @property
    def _max_blocks(self) -> int:
        return -(-self.max_model_len // self.plan.block_size)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        plan = self.plan = plan_of(self.vllm_config)
        self.known = KnownPrompts.load(plan, rank_of(self.vllm_config), self.device)

        def implement(index: int, stock: Any, scorer: LayerScorer) -> HeadGroupCUDAAttention:
            return HeadGroupCUDAAttention(
                stock, index=index, heads=self.heads[index], scorer=scorer, longest_chunk=self.longest_chunk
            )

        adopt_layers(self.vllm_config, self.get_model(), plan, HeadGroupCUDABackend, implement, self.device)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs = super().get_kv_cache_spec()
        return {name: HeadGroupSpec.of(spec, self.vllm_config) for name, spec in specs.items()}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        plan = self.plan = plan_of(self.vllm_config)  # the final model length is known only now
        self.pages = DevicePages(
            self.max_num_reqs, plan.num_groups, self._max_blocks, plan.block_size, MAX_RETENTIONS, self.device
        )
        self.splits = DecodeSplits(self)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        # Nothing is gathered into batch order: a token place of each row is enough for the stock code around it.
        self.block_tables.input_block_tables = [
            torch.zeros(self.max_num_reqs, 1, dtype=torch.int32, device=self.device)
        ]
        self.block_tables.init_block_table_layout_tensors()
        for groups in self.attn_groups:
            for group in groups:
                group.get_metadata_builder(0).bind(self)

    def warm_up_prefill(self) -> None:
        """Compile the prefill kernels for chunks of any size; the prompts of vLLM's own warm-up have two tokens."""
        layer = self.compilation_config.static_forward_context[self.kv_cache_config.kv_cache_groups[0].layer_names[0]]
        builder = self.attn_groups[0][0].get_metadata_builder(0)
        for num_tokens in sizes_to_compile(self.longest_chunk):
            query, key, value, output = (
                torch.zeros(num_tokens, heads, layer.head_size, dtype=self.dtype, device=self.device)
                for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads, layer.num_heads)
            )
            layer.impl.forward(layer, query, key, value, layer.kv_cache, builder.nobodys_prefill(num_tokens), output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            slot = self.req_states.req_id_to_index[new.req_id]
            schedule = self.plan.schedule(retention_of(self.plan.config, new.sampling_params))
            self.schedules[slot] = schedule
            self.pages.open(slot, new.prompt_len, schedule)
            self.known.open(slot, new.prompt_token_ids, adapted=new.lora_request is not None)

    def _remove_request(self, req_id: str) -> bool:
        slot = self.req_states.req_id_to_index.get(req_id)
        if slot is not None:
            self.pages.close(slot)
            self.schedules.pop(slot, None)
            self.known.close(slot)
        return bool(super()._remove_request(req_id))

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[Tensor, ...], Tensor]:
        """Tell the kernels which slot each row of the batch is; block table and slots are found from there.

        Most decode steps have the rows of the step before, and nothing to copy.
        """
        slots = np.full(input_batch.num_reqs_after_padding, -1, np.int32)
        slots[: input_batch.num_reqs] = input_batch.idx_mapping_np
        if not np.array_equal(slots, self._slots[: len(slots)]):
            async_tensor_h2d(slots, out=self.requests[: len(slots)])
            self._slots[: len(slots)] = slots
        return (self.flat[: len(slots)],), self.block_tables.slot_mappings[:, : input_batch.num_tokens_after_padding]

    def prepare_dummy_attn(
        self, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        self._slots.fill(-1)
        self.requests.fill_(-1)  # a dummy batch must not write to pages of real requests
        return super().prepare_dummy_attn(input_batch, *args, **kwargs)
