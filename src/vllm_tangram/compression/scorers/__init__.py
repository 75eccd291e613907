# SPDX-License-Identifier: Apache-2.0
"""Importance scorers, one per file. A new one needs its file, its line in `registry` and a reference in the tests."""

from vllm_tangram.compression.base import Scorer
from vllm_tangram.compression.scorers.keydiff import KeyDiff
from vllm_tangram.compression.scorers.knorm import KNorm
from vllm_tangram.compression.scorers.snapkv import SnapKV
from vllm_tangram.compression.scorers.streaming import Streaming
from vllm_tangram.errors import TangramError

registry: dict[str, type[Scorer]] = {
    Streaming.name: Streaming,
    KNorm.name: KNorm,
    KeyDiff.name: KeyDiff,
    SnapKV.name: SnapKV,
}


def scorer_names() -> tuple[str, ...]:
    """Names that `get_scorer` knows."""
    return tuple(registry)


def get_scorer(name: str) -> Scorer:
    """Make the scorer called ``name``.

    Raises:
        TangramError: there is none.

    """
    if name not in registry:
        raise TangramError(f"--scorer: unknown scorer {name!r}; known: {', '.join(registry)}")
    return registry[name]()
