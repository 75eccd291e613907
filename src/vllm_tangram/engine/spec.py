# SPDX-License-Identifier: Apache-2.0
"""What one "layer" of KV cache is to vLLM: a page of one head group.

All layers share one tensor, ``[num_pages, G, block_size, 2 * head_dim]``: vLLM's block pool hands out head-group pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_tangram.engine.setup import plan_of
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class HeadGroupSpec(FullAttentionSpec):
    """A page holds ``num_kv_heads`` = G heads of one group.

    Attributes:
        num_groups: head groups of the model, N.
        plan_digest: identifies the retention plan that the worker built, so that the scheduler can compare its own.

    """

    num_groups: int
    plan_digest: str

    @classmethod
    def of(cls, spec: FullAttentionSpec, vllm_config: VllmConfig) -> Self:
        """The head-group form of a layer's own spec.

        Raises:
            TangramError: the layer's attention is not plain: it would be computed as if it were.

        """
        plain = FullAttentionSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            dcp_sharded=spec.dcp_sharded,
            max_tp_shards=spec.max_tp_shards,
        )
        if spec != plain:
            raise TangramError(f"not supported by vllm-tangram: attention layers of the kind {spec}")
        plan = plan_of(vllm_config)
        return cls(
            block_size=spec.block_size,
            num_kv_heads=plan.groups.size,
            head_size=spec.head_size,
            dtype=spec.dtype,
            num_groups=plan.num_groups,
            plan_digest=plan.digest(),
        )

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """All layers share one cache, so their specs must be equal (the base class would drop our fields)."""
        if any(spec != specs[0] for spec in specs):
            raise TangramError(f"not supported by vllm-tangram: attention layers that differ: {specs}")
        return replace(specs[0])

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Pages of a prompt of the maximum model length at the server's retention."""
        length = vllm_config.model_config.max_model_len
        plan = plan_of(vllm_config)
        return plan.schedule(plan.config.retention).num_pages(length, length) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Row length of vLLM's flat block table: a request may ask for retention 1."""
        return self.num_groups * cdiv(max_len, self.block_size)
