# SPDX-License-Identifier: Apache-2.0
"""From a user's options to vLLM's engine arguments: one place for ``LLM`` and ``tangram serve``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from vllm.exceptions import VLLMError
from vllm.platforms import current_platform

from vllm_tangram.config import DEFAULT_BLOCK_SIZE, MIXED_GRAPHS, TangramConfig
from vllm_tangram.engine.setup import OPTIONS_KEY
from vllm_tangram.errors import TangramError

_DEFAULT_MAX_NUM_SEQS = 128
_SCHEDULER = "vllm_tangram.engine.scheduler.TangramScheduler"
_ASYNC_SCHEDULER = "vllm_tangram.engine.scheduler.TangramAsyncScheduler"
_OURS = ("worker_cls", "scheduler_cls")


@dataclass(frozen=True)
class _Platform:
    """What serving on a kind of device takes.

    Attributes:
        name: for messages.
        worker: worker class.
        block_size: tokens of a block unless given.
        takes_block: whether its kernels can read blocks of a size.
        block_rule: that, for messages.
        step_tokens: prompt tokens that a step takes unless given, in whole chunks, at least one.

    """

    name: str
    worker: str
    block_size: int
    takes_block: Callable[[int], bool]
    block_rule: str
    step_tokens: int


_CPU = _Platform(
    name="the CPU",
    worker="vllm_tangram.engine.cpu.worker.TangramCPUWorker",
    block_size=DEFAULT_BLOCK_SIZE,
    takes_block=lambda size: size % 32 == 0,
    block_rule="a multiple of 32",
    step_tokens=2048,
)
_CUDA = _Platform(
    name="CUDA",
    worker="vllm_tangram.engine.cuda.worker.TangramGPUWorker",
    block_size=64,  # measured: faster to read than 16 or 32, and a quarter of the page ids of 16
    takes_block=lambda size: size in (16, 32, 64, 128),
    block_rule="16, 32, 64 or 128",
    step_tokens=8192,
)


def _platform() -> _Platform:
    if current_platform.is_cpu():
        return _CPU
    if current_platform.is_cuda():
        return _CUDA
    raise TangramError(
        f"vllm-tangram serves CPUs and NVIDIA GPUs, and vLLM found {current_platform.device_name or 'neither'} here: "
        "run `tangram doctor`"
    )


def graph_sizes(max_num_seqs: int, step_tokens: int) -> list[int]:
    """Tokens of the steps that are captured: those that vLLM captures by itself on a Hopper GPU, and up to 2048.

    A turn of a conversation that begins with a session computes some hundred tokens. Without a graph such a step takes
    the GPU less time than it takes the host to launch it.

    Args:
        max_num_seqs: most requests of a step. Always one of the sizes: a decode step has a full graph only if there is
            one of as many rows or more, and none has more rows than this.
        step_tokens: most tokens of a step, ``max_num_batched_tokens``.

    """
    most = min(2 * max_num_seqs, 512)
    decode = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    sizes = {size for size in decode if size <= most} | {max_num_seqs, *MIXED_GRAPHS, step_tokens}
    return sorted(size for size in sizes if size <= min(step_tokens, MIXED_GRAPHS[-1]))


def _leaves_graphs_to_us(given: dict[str, Any]) -> bool:
    """Whether CUDA graphs are wanted, of no sizes in particular."""
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    compilation = given.get("compilation_config")
    stated = (
        compilation if isinstance(compilation, dict) else {name: getattr(compilation, name, None) for name in names}
    )
    if given.get("enforce_eager") or given.get("performance_mode") == "interactivity":  # which has sizes of its own
        return False
    return all(given.get(name) is stated.get(name) is None for name in names)


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell our options from vLLM's.

    Returns:
        (ours, vLLM's); the names do not overlap.

    """
    ours = {name: value for name, value in options.items() if name in TangramConfig.model_fields}
    return ours, {name: value for name, value in options.items() if name not in ours}


def engine_options(config: TangramConfig, vllm_options: dict[str, Any]) -> dict[str, Any]:
    """Complete vLLM's engine arguments so that head-group pages are served.

    Args:
        config: our options, the profile resolved.
        vllm_options: vLLM's options as the user gave them; None counts as not given.

    Raises:
        TangramError: an option that we must set ourselves was given, the block size does not fit the device's kernels
            or the chunk, or there is no device to serve on.

    """
    platform = _platform()
    given = {name: value for name, value in vllm_options.items() if value is not None}
    for name in _OURS:
        if given.get(name, "auto") != "auto":
            raise TangramError(f"--{name.replace('_', '-')} is set by vllm-tangram and cannot be given")
    block_size = given.setdefault("block_size", platform.block_size)
    if not platform.takes_block(block_size):
        raise TangramError(f"--block-size must be {platform.block_rule} on {platform.name}, got {block_size}")
    if config.chunk_size % block_size:
        raise TangramError(f"--chunk-size ({config.chunk_size}) must be a multiple of --block-size ({block_size})")
    given.setdefault("enable_prefix_caching", True)
    given.setdefault("max_num_seqs", _DEFAULT_MAX_NUM_SEQS)
    if given.get("enable_chunked_prefill", True):  # else vLLM would find fault with ours before the option is refused
        step_tokens = max(config.chunk_size, platform.step_tokens)
        given.setdefault("max_num_batched_tokens", step_tokens + given["max_num_seqs"])
    if platform is _CPU:
        # vLLM's V2 runner needs Triton, which serves no CPU here; its choice is read from the environment only.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        scheduler = _SCHEDULER
    else:
        if _leaves_graphs_to_us(given):
            step_tokens = given.get("max_num_batched_tokens", platform.step_tokens)
            given["cudagraph_capture_sizes"] = graph_sizes(given["max_num_seqs"], step_tokens)
        # Said explicitly: with a scheduler class of its own an engine must know which of the two it is to be.
        scheduler = _ASYNC_SCHEDULER if given.setdefault("async_scheduling", True) else _SCHEDULER
    return given | {
        "worker_cls": platform.worker,
        "scheduler_cls": scheduler,
        "additional_config": (given.get("additional_config") or {}) | {OPTIONS_KEY: config.model_dump()},
    }


@contextmanager
def vllm_refusals(prefix: str = "") -> Iterator[None]:
    """Turn what vLLM says about a user's options and model into a ``TangramError`` of one line, in vLLM's words."""
    try:
        yield
    except TangramError:
        raise
    except ValidationError as error:
        reasons = "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
        raise TangramError(prefix + _one_line(reasons)) from error
    except (VLLMError, ValueError, TypeError, OSError) as error:  # OSError: the model cannot be found or fetched
        raise TangramError(prefix + _one_line(str(error))) from error


def _one_line(message: str) -> str:
    return " ".join(message.split())
