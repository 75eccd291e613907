# SPDX-License-Identifier: Apache-2.0
"""What the attention of one step needs, computed once for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from vllm_tangram.attention.decode import DecodeBatch
from vllm_tangram.attention.prefill import PrefillRows
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
    """A chunk that continues a prompt: its queries also attend to what earlier chunks kept.

    Attributes:
        index: p, its place in its wave's rows.
        starts: ``[H + 1]`` int32 on the device, multiples of the row's tokens: one sequence per KV head.
        max_before: largest number of tokens that a group holds.

    """

    index: int
    starts: Tensor
    max_before: int


@dataclass(frozen=True)
class Wave:
    """Chunks of different requests, which do not depend on each other.

    Attributes:
        chunks: one a row.
        rows: for the kernels.
        scored: chunks of which something is evicted.
        histories: chunks that continue a prompt.

    """

    chunks: tuple[Chunk, ...]
    rows: PrefillRows
    scored: tuple[Chunk, ...]
    histories: tuple[History, ...]


@dataclass(frozen=True)
class PrefillStep:
    """The tokens of the batch after the decode rows.

    A step may take several chunks of a prompt. All attend to themselves at once; then the first chunk of every request
    is compressed, then the second, which also attends to what the first kept, and so on.

    Attributes:
        first: first token in the batch; all up to the batch's last belong to chunks.
        starts: ``[C + 1]`` int32 on the device, token offsets of all chunks from ``first``, in the batch's order.
        max_tokens: of a chunk.
        waves: the chunks by their place in their request's part of the step.

    """

    first: int
    starts: Tensor
    max_tokens: int
    waves: tuple[Wave, ...]


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
        parts = [
            [
                (slot, chunk)
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
            for row, (slot, first, end) in enumerate(
                zip(slots.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True)
            )
        ]
        waves = [[chunk for chunk in wave if chunk is not None] for wave in zip_longest(*parts)]
        packed = np.concatenate([self._pack(runner, wave) for wave in waves])
        device = async_tensor_h2d(packed, device=self.device)  # one copy for all
        made, row = [], 0
        for wave in waves:
            rows = slice(row, row + len(wave))
            made.append(self._wave(runner, [chunk for _, chunk in wave], packed[rows], device[rows]))
            row = rows.stop
        firsts = [chunk.first for part in parts for _, chunk in part]
        offsets = np.array([*firsts, starts[-1]], np.int32) - starts[0]
        return PrefillStep(
            first=int(starts[0]),
            starts=async_tensor_h2d(offsets.astype(np.int32), device=self.device),
            max_tokens=int(np.diff(offsets).max()),
            waves=tuple(made),
        )

    def _pack(self, runner: TangramGPUModelRunner, wave: list[tuple[int, Chunk]]) -> Ints:
        """[P, header + 2 N] int32: what the kernels need of each chunk."""
        num_groups, config = runner.plan.num_groups, runner.plan.config
        packed = np.zeros((len(wave), _HEADER + 2 * num_groups), np.int32)
        for row, (slot, chunk) in zip(packed, wave, strict=True):
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

    def _wave(self, runner: TangramGPUModelRunner, chunks: list[Chunk], packed: Ints, device: Tensor) -> Wave:
        num_groups = runner.plan.num_groups
        scored, histories = [], []
        for p, (chunk, row) in enumerate(zip(chunks, packed, strict=True)):
            before, keep = row[_HEADER : _HEADER + num_groups], row[_HEADER + num_groups :]
            if row[2] < 0:
                continue
            if (keep < chunk.num_tokens).any():
                scored.append(chunk)
            if chunk.position:
                ends = torch.arange(self.num_kv_heads + 1, dtype=torch.int32, device=self.device) * chunk.num_tokens
                histories.append(History(p, ends, int(before.max())))
        rows = self._rows(device, max(chunk.num_tokens for chunk in chunks))
        return Wave(tuple(chunks), rows, tuple(scored), tuple(histories))

    def _rows(self, device: Tensor, max_tokens: int) -> PrefillRows:
        num_groups = (device.shape[1] - _HEADER) // 2
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
        chunk = Chunk(first=0, num_tokens=num_tokens, position=0, request=0)
        starts = torch.arange(self.num_kv_heads + 1, dtype=torch.int32, device=self.device) * num_tokens
        rows = self._rows(async_tensor_h2d(packed, device=self.device), num_tokens)
        wave = Wave((chunk,), rows, scored=(chunk,), histories=(History(0, starts, 1),))
        step = PrefillStep(first=0, starts=starts[:2].clone(), max_tokens=num_tokens, waves=(wave,))
        return HeadGroupMetadata(num_tokens, None, step, runner.pages, runner.flat, None)
