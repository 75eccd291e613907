# SPDX-License-Identifier: Apache-2.0
"""What the attention of one step needs, computed once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from vllm_tangram.attention.decode import DecodeBatch
from vllm_tangram.attention.prefill import PrefillRows, retained_blocks
from vllm_tangram.compression.base import Packing
from vllm_tangram.engine.chunk import Chunk

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_tangram.engine.cuda.runner import TangramGPUModelRunner
    from vllm_tangram.engine.cuda.splits import DecodeSplits
    from vllm_tangram.engine.profiling import ScoreObserver
    from vllm_tangram.pages.device import DevicePages

Ints = npt.NDArray[np.int32]

_HEADER = 5  # of a prefill row: first, num_tokens, slot, protected head and tail


@dataclass(frozen=True)
class DecodeStep:
    """The first rows of the batch: one new token each.

    Attributes:
        num_rows: R, padding included.
        batch: for the kernel.
        splits: of the batch over the device; the first layer makes the plan.

    """

    num_rows: int
    batch: DecodeBatch
    splits: DecodeSplits


@dataclass(frozen=True)
class History:
    """What the chunks' requests hold before them, as a paged kernel reads it; of all layers, made in one launch.

    Sequence ``h * C + c`` is head h of chunk c.

    Attributes:
        blocks: ``[L, H * C, J]`` int32 on the device, ``page * G + column``.
        lengths: ``[L, H * C]`` int32 on the device, tokens.
        most: the largest length, on the host.

    """

    blocks: Tensor
    lengths: Tensor
    most: int


@dataclass(frozen=True)
class PrefillStep:
    """The tokens of the batch after the decode rows: chunks, of which one request may have several.

    What a chunk keeps is a function of its own tokens. So all are scored, selected and written to pages first, and then
    all attend at once to what lies in the pages of their requests before them, that of the same step included.

    Attributes:
        first: first token in the batch; all up to the batch's last belong to chunks.
        chunks: C, one a row, in the batch's order.
        starts: ``[C + 1]`` int32 on the device, token offsets of the chunks from ``first``.
        rows: for the kernels.
        scored: chunks of which something is evicted.
        history: what chunks also attend to; None if no chunk continues a prompt.
        head_starts: ``[H * C + 1]`` int32 on the device, the same offsets where the tokens of one KV head follow on
            those of another.

    """

    first: int
    chunks: tuple[Chunk, ...]
    starts: Tensor
    rows: PrefillRows
    scored: tuple[Chunk, ...]
    history: History | None
    head_starts: Tensor

    @cached_property
    def packing(self) -> Packing | None:
        """Of all chunks, for scorers that take them at once; None if there is one. Made when the first layer asks."""
        if len(self.chunks) == 1:
            return None
        index = np.repeat(np.arange(len(self.chunks)), [chunk.num_tokens for chunk in self.chunks])
        return Packing.of(async_tensor_h2d(index, device=self.starts.device), len(self.chunks))


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

    A decode step touches nothing but persistent buffers: slots, lengths, block table and the plan of ``DecodeSplits``.
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
            batch = DecodeBatch(
                requests=runner.requests[:num_decodes],
                seq_lens=common.seq_lens[:num_decodes],
                flat=runner.flat,
                pages=runner.pages,
            )
            decode = DecodeStep(num_decodes, batch, runner.splits)
        if num_decodes < num_rows:
            prefill = self._prefill(runner, common, num_decodes)
        return HeadGroupMetadata(common.num_actual_tokens, decode, prefill, runner.pages, runner.flat, runner.observer)

    def _prefill(self, runner: TangramGPUModelRunner, common: CommonAttentionMetadata, num_decodes: int) -> PrefillStep:
        starts = common.query_start_loc_cpu[num_decodes : common.num_reqs + 1].numpy()
        num_rows = len(starts) - 1
        slots = common.req_idx[num_decodes:] if common.req_idx is not None else np.zeros(num_rows, np.int64)
        chunks = [
            (slot, chunk)
            for row, (slot, first, end) in enumerate(
                zip(slots.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True)
            )
            for chunk in Chunk.split(
                first,
                end - first,
                int(runner.req_states.num_computed_tokens_np[slot]),
                num_decodes + row,
                prompt_len=int(runner.req_states.prompt_len.np[slot]),
                chunk_size=runner.plan.config.chunk_size,
                known=runner.known.of(slot),
            )
        ]
        packed = self._pack(runner, chunks)
        first, num_tokens = int(starts[0]), int(starts[-1] - starts[0])
        return self._step(first, num_tokens, tuple(chunk for _, chunk in chunks), packed)

    def _pack(self, runner: TangramGPUModelRunner, chunks: list[tuple[int, Chunk]]) -> Ints:
        """[C, header + 2 N] int32: what the kernels need of each chunk."""
        num_groups, config = runner.plan.num_groups, runner.plan.config
        packed = np.zeros((len(chunks), _HEADER + 2 * num_groups), np.int32)
        for row, (slot, chunk) in zip(packed, chunks, strict=True):
            schedule = runner.schedules.get(slot)
            if schedule is None:  # a dummy batch: nothing is kept, nothing written
                row[:3] = chunk.first, 0, -1
                continue
            prompt_len = int(runner.req_states.prompt_len.np[slot])
            before = schedule.lengths(chunk.position, prompt_len)
            after = schedule.lengths(chunk.position + chunk.num_tokens, prompt_len)
            protected = chunk.protect_head(config), chunk.protect_tail(config)
            row[:_HEADER] = (chunk.first, chunk.num_tokens, slot, *protected)
            row[_HEADER : _HEADER + num_groups] = before
            row[_HEADER + num_groups :] = after - before
        return packed

    def _step(self, first: int, num_tokens: int, chunks: tuple[Chunk, ...], packed: Ints) -> PrefillStep:
        num_groups = (packed.shape[1] - _HEADER) // 2
        before, keep = packed[:, _HEADER : _HEADER + num_groups], packed[:, _HEADER + num_groups :]
        real = packed[:, 2] >= 0
        evicting = real & (keep < packed[:, 1:2]).any(axis=1)
        scored = tuple(chunk for chunk, evicts in zip(chunks, evicting.tolist(), strict=True) if evicts)
        heads = np.arange(self.num_kv_heads)[:, None] * num_tokens
        offsets = np.append(heads + [chunk.first - first for chunk in chunks], heads.size * num_tokens)
        starts = async_tensor_h2d(offsets.astype(np.int32), device=self.device)
        device = async_tensor_h2d(packed, device=self.device)  # one copy for all
        rows = PrefillRows(
            first=device[:, 0],
            num_tokens=device[:, 1],
            requests=device[:, 2],
            protect_head=device[:, 3],
            protect_tail=device[:, 4],
            before=device[:, _HEADER : _HEADER + num_groups],
            keep=device[:, _HEADER + num_groups :],
            max_tokens=max(chunk.num_tokens for chunk in chunks),
        )
        most = int(before[real].max(initial=0))
        return PrefillStep(
            first=first,
            chunks=chunks,
            starts=starts[: len(chunks) + 1],
            rows=rows,
            scored=scored,
            history=self._history(rows, most) if most else None,
            head_starts=starts,
        )

    def _history(self, rows: PrefillRows, most: int) -> History:
        """Of all layers at once: pages are the same for all of a step, and a launch per layer is the host's time."""
        runner = self.runner
        assert runner is not None
        heads, plan = runner.all_heads, runner.plan
        sequences = len(heads.group) * len(rows.first)
        blocks = torch.empty(sequences, -(-most // plan.block_size), dtype=torch.int32, device=self.device)
        lengths = torch.empty(sequences, dtype=torch.int32, device=self.device)
        size = plan.groups.size
        retained_blocks(blocks, lengths, rows=rows, flat=runner.flat, pages=runner.pages, heads=heads, group_size=size)
        num_layers = len(runner.heads)
        return History(blocks.view(num_layers, -1, blocks.shape[1]), lengths.view(num_layers, -1), most)

    def nobodys_prefill(self, num_tokens: int) -> HeadGroupMetadata:
        """A step that continues the prompt of no request: every kernel runs, and no page is read or written.

        For a warm-up: what it compiles no client has to wait for.
        """
        runner = self.runner
        assert runner is not None
        packed = np.zeros((1, _HEADER + 2 * runner.plan.num_groups), np.int32)
        packed[0, 2] = -1
        chunk = Chunk(first=0, num_tokens=num_tokens, position=0, request=0)
        step = self._step(0, num_tokens, (chunk,), packed)
        step = replace(step, scored=(chunk,), history=self._history(step.rows, 1))
        return HeadGroupMetadata(num_tokens, None, step, runner.pages, runner.flat, None)
