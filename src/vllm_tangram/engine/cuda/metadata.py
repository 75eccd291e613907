# SPDX-License-Identifier: Apache-2.0
"""What the attention of one step needs, computed once for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from vllm_tangram.attention.decode import DecodeBatch
from vllm_tangram.attention.prefill import PrefillRows
from vllm_tangram.engine.chunk import Chunk

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_tangram.attention.decode import SplitScratch
    from vllm_tangram.engine.cuda.runner import TangramGPUModelRunner
    from vllm_tangram.engine.profiling import ScoreObserver
    from vllm_tangram.pages.device import DevicePages

_HEADER = 5  # of a prefill row: first, num_tokens, slot, protected head and tail


@dataclass(frozen=True)
class DecodeStep:
    """The first rows of the batch: one new token each.

    Attributes:
        num_rows: R, padding included.
        batch: for the kernel.
        work: work lists of the layers.
        scratch: room for partial results.

    """

    num_rows: int
    batch: DecodeBatch
    work: list[Tensor]
    scratch: SplitScratch


@dataclass(frozen=True)
class History:
    """A row that continues a prompt: its queries also attend to what earlier chunks kept.

    Attributes:
        index: p, its place in the rows.
        starts: ``[H + 1]`` int32 on the device, multiples of the row's tokens: one sequence per KV head.
        max_before: largest number of tokens that a group holds.

    """

    index: int
    starts: Tensor
    max_before: int


@dataclass(frozen=True)
class PrefillStep:
    """Rows of several tokens, after the decode rows.

    Attributes:
        first: first token in the batch; all up to the batch's last belong to rows.
        chunks: the rows.
        rows: for the kernels.
        starts: ``[P + 1]`` int32 on the device, token offsets from ``first``.
        scored: rows of which something is evicted.
        histories: rows that continue a prompt.

    """

    first: int
    chunks: tuple[Chunk, ...]
    rows: PrefillRows
    starts: Tensor
    scored: tuple[Chunk, ...]
    histories: tuple[History, ...]


@dataclass(frozen=True)
class HeadGroupMetadata:
    """One step."""

    num_tokens: int
    decode: DecodeStep | None
    prefill: PrefillStep | None
    pages: DevicePages
    flat: Tensor
    observer: ScoreObserver | None

    @property
    def has_prefill(self) -> bool:
        """Does any row have several new tokens?"""
        return self.prefill is not None


class HeadGroupMetadataBuilder(AttentionMetadataBuilder[HeadGroupMetadata]):
    """Turns vLLM's batch into decode and prefill rows; ``bind`` gives it the runner, which knows the requests.

    A decode step touches nothing but persistent buffers: slots, lengths, block table and the maps of ``DecodeSplits``.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1  # decodes first

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.num_kv_heads: int = vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)
        self.runner: TangramGPUModelRunner | None = None

    def bind(self, runner: TangramGPUModelRunner) -> None:
        self.runner = runner

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HeadGroupMetadata:
        runner = self.runner
        assert runner is not None
        common = common_attn_metadata
        num_decodes = num_rows = common.num_reqs
        if common.max_query_len > 1:
            query_lens = np.diff(common.query_start_loc_cpu[: num_rows + 1].numpy())
            num_decodes = int(np.argmin(np.append(query_lens == 1, False)))
        decode = prefill = None
        if num_decodes:
            work, scratch = runner.splits.of(num_decodes)
            batch = DecodeBatch(
                requests=runner.requests[:num_decodes],
                seq_lens=common.seq_lens[:num_decodes],
                flat=runner.flat,
                pages=runner.pages,
            )
            decode = DecodeStep(num_decodes, batch, work, scratch)
        if num_decodes < num_rows:
            prefill = self._prefill(runner, common, num_decodes)
        return HeadGroupMetadata(common.num_actual_tokens, decode, prefill, runner.pages, runner.flat, runner.observer)

    def _prefill(self, runner: TangramGPUModelRunner, common: CommonAttentionMetadata, num_decodes: int) -> PrefillStep:
        starts = common.query_start_loc_cpu[num_decodes : common.num_reqs + 1].numpy()
        num_rows = len(starts) - 1
        slots = common.req_idx[num_decodes:] if common.req_idx is not None else np.zeros(num_rows, np.int64)
        plan = runner.plan
        packed = np.empty((num_rows, _HEADER + 2 * plan.num_groups), np.int32)
        chunks, scored, histories = [], [], []
        for p, (slot, first, end) in enumerate(
            zip(slots.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ):
            position = int(runner.req_states.num_computed_tokens_np[slot])
            chunk = Chunk(first=first, num_tokens=end - first, position=position, request=num_decodes + p)
            chunks.append(chunk)
            schedule = runner.schedules.get(slot)
            if schedule is None:  # a dummy batch: nothing is kept, nothing written
                packed[p] = 0
                packed[p, :3] = first, 0, -1
                continue
            prompt_len = int(runner.req_states.prompt_len.np[slot])
            before = schedule.lengths(position, prompt_len)
            after = schedule.lengths(position + chunk.num_tokens, prompt_len)
            packed[p, :_HEADER] = (
                first,
                chunk.num_tokens,
                slot,
                chunk.protect_head(plan.config),
                chunk.protect_tail(plan.config),
            )
            packed[p, _HEADER : _HEADER + plan.num_groups] = before
            packed[p, _HEADER + plan.num_groups :] = after - before
            if (after - before < chunk.num_tokens).any():
                scored.append(chunk)
            if position:
                longest = int(before.max())
                ends = torch.arange(self.num_kv_heads + 1, dtype=torch.int32, device=self.device) * chunk.num_tokens
                histories.append(History(p, ends, longest))
        rows = self._rows(packed, max(chunk.num_tokens for chunk in chunks))
        offsets = async_tensor_h2d((starts - starts[0]).astype(np.int32), device=self.device)
        return PrefillStep(int(starts[0]), tuple(chunks), rows, offsets, tuple(scored), tuple(histories))

    def _rows(self, packed: np.ndarray, max_tokens: int) -> PrefillRows:
        device = async_tensor_h2d(packed, device=self.device)
        num_groups = (packed.shape[1] - _HEADER) // 2
        return PrefillRows(
            first=device[:, 0],
            num_tokens=device[:, 1],
            requests=device[:, 2],
            protect_head=device[:, 3],
            protect_tail=device[:, 4],
            before=device[:, _HEADER : _HEADER + num_groups],
            keep=device[:, _HEADER + num_groups :],
            max_tokens=max_tokens,
        )

    def nobodys_prefill(self, num_tokens: int) -> HeadGroupMetadata:
        """A step that continues the prompt of no request: every kernel runs, and no page is read or written.

        For a warm-up: what it compiles no client has to wait for.
        """
        runner = self.runner
        assert runner is not None
        packed = np.zeros((1, _HEADER + 2 * runner.plan.num_groups), np.int32)
        packed[0, 2] = -1
        chunk = Chunk(first=0, num_tokens=num_tokens, position=num_tokens, request=0)
        starts = torch.arange(self.num_kv_heads + 1, dtype=torch.int32, device=self.device) * num_tokens
        step = PrefillStep(
            first=0,
            chunks=(chunk,),
            rows=self._rows(packed, num_tokens),
            starts=starts[:2].clone(),
            scored=(chunk,),
            histories=(History(0, starts, 1),),
        )
        return HeadGroupMetadata(num_tokens, None, step, runner.pages, runner.flat, None)
