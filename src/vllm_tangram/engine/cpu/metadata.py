# SPDX-License-Identifier: Apache-2.0
"""What the attention of one step needs, computed once for all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder

from vllm_tangram.engine.check import check_tables
from vllm_tangram.engine.chunk import Chunk

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_tangram.engine.cpu.runner import TangramCPUModelRunner
    from vllm_tangram.engine.profiling import ScoreObserver
    from vllm_tangram.pages.table import PageTable

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class DecodeRows:
    """The first rows of the batch: one new token each, written straight to pages.

    Attributes:
        slots: ``[R]`` page-table slots.
        lengths: ``[R, N]`` tokens that each group holds, the new one included.

    """

    slots: Ints
    lengths: Ints


@dataclass(frozen=True)
class PrefillRow(Chunk):
    """Several new tokens of one request: a chunk of its prompt, or generated tokens replayed after a preemption.

    Rows run in order, so a chunk finds in the pages what the chunks before it kept, also those of its own step.

    ::

        before[g]              num_tokens
        |---- retained pages --|---- the row's tokens ----|
        |---------- after[g] = before[g] + what the group keeps of them

    Attributes:
        slot: page-table slot.
        before: ``[N]`` tokens held before the row; whole blocks unless it is ``direct``.
        after: ``[N]`` tokens held after it.
        staging_block: first of the staging blocks that hold the row, one run per KV head; -1 if ``direct``.

    """

    slot: int
    before: Ints
    after: Ints
    staging_block: int

    @property
    def direct(self) -> bool:
        """Nothing is evicted, so the tokens go straight to pages."""
        return self.staging_block < 0


@dataclass(frozen=True)
class HeadGroupMetadata:
    """One step."""

    table: PageTable
    decodes: DecodeRows | None
    prefills: tuple[PrefillRow, ...]
    observer: ScoreObserver | None

    @property
    def has_prefill(self) -> bool:
        """Does any row have several new tokens?"""
        return bool(self.prefills)


class HeadGroupMetadataBuilder(AttentionMetadataBuilder[HeadGroupMetadata]):
    """Turns vLLM's batch into rows; ``bind`` gives it the runner, which knows the requests."""

    reorder_batch_threshold: int | None = 1  # decodes first

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size
        self.num_groups: int = kv_cache_spec.num_groups
        self.num_kv_heads: int = vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)
        self.runner: TangramCPUModelRunner | None = None

    def bind(self, runner: TangramCPUModelRunner) -> None:
        self.runner = runner

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HeadGroupMetadata:
        runner = self.runner
        assert runner is not None
        num_reqs = common_attn_metadata.num_reqs
        starts = common_attn_metadata.query_start_loc_cpu[: num_reqs + 1].numpy()
        query_lens = np.diff(starts)
        before_tokens = runner.input_batch.num_computed_tokens_cpu[:num_reqs].astype(np.int64)
        batch = runner.input_batch.req_ids[:num_reqs]
        slots = runner.slots_of(batch)
        flat = runner.input_batch.block_table[0]
        page_ids, counts = flat.block_table.np, flat.num_blocks_per_row
        runner.page_table.ingest_all(slots, np.arange(num_reqs, dtype=np.int32), page_ids, counts)
        if runner.planned is not None:
            check_tables(runner.planned, runner.plan, runner.page_table, batch, slots, page_ids, counts)
        num_decodes = int(np.argmin(np.append(query_lens == 1, False)))
        decodes = None
        if num_decodes:
            lengths = self._lengths(slots[:num_decodes], before_tokens[:num_decodes] + 1)
            decodes = DecodeRows(slots[:num_decodes], lengths)
        chunks = [
            chunk
            for request in range(num_decodes, num_reqs)
            for chunk in Chunk.split(
                int(starts[request]),
                int(query_lens[request]),
                int(before_tokens[request]),
                request,
                prompt_len=int(runner.input_batch.num_prompt_tokens[request]),
                chunk_size=runner.plan.config.chunk_size,
                known=runner.known.of(int(slots[request])),
            )
        ]
        return HeadGroupMetadata(runner.page_table, decodes, tuple(self._rows(chunks, slots)), runner.observer)

    def _rows(self, chunks: list[Chunk], slots: Ints) -> Iterator[PrefillRow]:
        """Give every chunk its staging blocks, unless it evicts nothing."""
        runner = self.runner
        assert runner is not None
        slots = slots[[chunk.request for chunk in chunks]]
        positions = np.array([chunk.position for chunk in chunks], np.int64)
        before = self._lengths(slots, positions)
        after = self._lengths(slots, positions + np.array([chunk.num_tokens for chunk in chunks], np.int64))
        staging_block = runner.first_staging_block
        for row, chunk in enumerate(chunks):
            # A whole chunk is staged even if one group alone evicts: one path for all heads of a layer.
            staged = bool((after[row] - before[row] < chunk.num_tokens).any())
            yield PrefillRow(
                **vars(chunk),
                slot=int(slots[row]),
                before=before[row],
                after=after[row],
                staging_block=staging_block if staged else -1,
            )
            if staged:
                staging_block += -(-chunk.num_tokens // self.block_size) * self.num_kv_heads
        assert staging_block <= runner.last_staging_block, "the step does not fit in the staging pages"

    def _lengths(self, slots: Ints, tokens: Ints) -> Ints:
        """[R, N] tokens that each group holds when requests have ``tokens``."""
        assert self.runner is not None
        lengths = np.empty((len(slots), self.num_groups), np.int32)
        self.runner.page_table.lengths(slots, tokens, lengths)
        return lengths
