# SPDX-License-Identifier: Apache-2.0
"""Kernels to measure beside ours: FlashAttention 3 on equal and on ragged lengths, FlashInfer on ragged lengths."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_tangram.bench.kernels import Case, Kernels
from vllm_tangram.bench.ragged import Workload
from vllm_tangram.bench.shapes import HeadShape

STOCK_BLOCK_SIZE = 16  # vLLM's default on CUDA
_FLASHINFER_WORKSPACE = 128 * 2**20  # bytes


def stock_numbers(work: Workload, shape: HeadShape) -> int:
    """Numbers that the pools of `stock` hold."""
    blocks = int((-(-work.uniform_lengths // STOCK_BLOCK_SIZE)).sum()) + 1
    return shape.layers * blocks * STOCK_BLOCK_SIZE * shape.kv_heads * 2 * shape.head_dim


def stock(case: Case) -> list[Kernels]:
    """FlashAttention 3 in stock vLLM's layout, all heads equally long: both ways to schedule it."""
    shape, lengths = case.shape, case.work.uniform_lengths
    counts = -(-lengths // STOCK_BLOCK_SIZE)
    size = (shape.layers, int(counts.sum()) + 1, STOCK_BLOCK_SIZE, shape.kv_heads, 2 * shape.head_dim)
    caches = case.memory[: int(np.prod(size))].view(size)
    table = np.zeros((len(lengths), int(counts.max())), np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = np.random.default_rng(0).permutation(counts.sum()) + 1
    block_table, on_device = case.put(table), case.put(lengths)
    kv_bytes = int(lengths.sum()) * shape.layers * shape.kv_heads * 2 * shape.head_dim * case.memory.itemsize

    def layer(index: int, output: Tensor) -> _Sequences:
        return _Sequences(case.query[index], caches[index], output[index], block_table, on_device, int(lengths.max()))

    return _both_ways(case, layer, kv_bytes)


def flash_ragged(case: Case) -> list[Kernels]:
    """FlashAttention 3 on our pages: one sequence per request and KV head. Run it after the new token was written."""
    ragged = [_member_sequences(case, index) for index in range(case.shape.layers)]

    def layer(index: int, output: Tensor) -> _Sequences:
        table, lengths = ragged[index]
        query, cache = _per_head(case.query[index], case), _one_head_cache(case)
        longest = int(case.work.lengths[:, index].max())
        return _Sequences(query, cache, _per_head(output[index], case), table, lengths, longest)

    return _both_ways(case, layer, case.kv_bytes)


def flashinfer_ragged(case: Case) -> list[Kernels]:
    """FlashInfer on our pages; notes give the time of planning all layers once, in ms of the host.

    Raises:
        ImportError: FlashInfer is not installed.

    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    plan, shape = case.work.plan, case.shape
    # Partial results only, and layers run one after the other: one workspace is enough.
    workspace = torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=case.memory.device)
    cache = _one_head_cache(case)
    keys_values = cache[..., : shape.head_dim], cache[..., shape.head_dim :]
    output = torch.empty_like(case.query)
    wrappers, arguments = [], []
    for index in range(shape.layers):
        lengths = case.work.lengths[:, index].ravel()
        counts = -(-lengths // plan.block_size)
        table = case.work.member_blocks(index)
        host = [np.concatenate([[0], np.cumsum(counts)]), lengths - (counts - 1) * plan.block_size]
        starts, last = (torch.from_numpy(values.astype(np.int32)) for values in host)
        blocks = case.put(table[np.arange(table.shape[1]) < counts[:, None]])
        arguments.append(
            (starts, blocks, last, shape.query_heads // shape.kv_heads, 1, shape.head_dim, plan.block_size)
        )
        wrappers.append(BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True))

    def plan_all() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for wrapper, given in zip(wrappers, arguments, strict=True):
            wrapper.plan(*given, q_data_type=case.memory.dtype, kv_data_type=case.memory.dtype, sm_scale=case.scale)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def layer(index: int) -> Callable[[], None]:
        query, out = _per_head(case.query[index], case), _per_head(output[index], case)
        return lambda: wrappers[index].run(query, keys_values, out=out)

    plan_all()  # compiles
    seconds = min(plan_all() for _ in range(3))
    layers = [layer(index) for index in range(shape.layers)]
    return [Kernels(layers, output, case.kv_bytes, {"plan_milliseconds": 1e3 * seconds})]


@dataclass(frozen=True)
class _Sequences:
    """Arguments of one layer, for `engine.stock_attention.flash_decode`."""

    query: Tensor
    cache: Tensor
    output: Tensor
    block_table: Tensor
    lengths: Tensor
    longest: int


def _both_ways(case: Case, layer: Callable[[int, Tensor], _Sequences], kv_bytes: int) -> list[Kernels]:
    from vllm_tangram.engine.stock_attention import flash_decode

    made = []
    for ahead in (True, False):
        output = torch.empty_like(case.query)
        layers = []
        for index in range(case.shape.layers):
            sequences = layer(index, output)
            starts = torch.arange(len(sequences.lengths) + 1, dtype=torch.int32, device=case.memory.device)
            layers.append(flash_decode(**vars(sequences), starts=starts, scale=case.scale, ahead=ahead))
        made.append(Kernels(layers, output, kv_bytes, {"scheduled": "ahead" if ahead else "in each call"}))
    return made


def _member_sequences(case: Case, layer: int) -> tuple[Tensor, Tensor]:
    """Block table [R * H, J] and lengths [R * H] of a layer's heads, on the device."""
    return case.put(case.work.member_blocks(layer)), case.put(case.work.lengths[:, layer].ravel())


def _one_head_cache(case: Case) -> Tensor:
    """The pool as blocks of one head: [num_pages * G, B, 1, 2 * D]."""
    return case.pool.flatten(0, 1).unsqueeze(2)


def _per_head(values: Tensor, case: Case) -> Tensor:
    """[R, Hq, D] seen as [R * H, Hq / H, D]."""
    return values.view(-1, case.shape.query_heads // case.shape.kv_heads, case.shape.head_dim)
