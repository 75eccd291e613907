# SPDX-License-Identifier: Apache-2.0
"""Non-uniform KV cache compression for unmodified vLLM."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.budget import RetentionProfile
    from vllm_tangram.config import TangramConfig
    from vllm_tangram.engine.llm import LLM

__version__ = "0.1.0"
SUPPORTED_VLLM = "0.32"

__all__ = ["LLM", "RetentionProfile", "TangramConfig", "TangramError", "__version__"]

# Resolved on first use: vLLM imports this package in each of its processes, and `tangram --help` must be quick.
_LAZY = {
    "LLM": "vllm_tangram.engine.llm",
    "RetentionProfile": "vllm_tangram.budget",
    "TangramConfig": "vllm_tangram.config",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
