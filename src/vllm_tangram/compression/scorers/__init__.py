# SPDX-License-Identifier: Apache-2.0
"""Importance scorers, one per file. A new one needs its file, its line in `registry` and a reference in the tests."""

from vllm_tangram.compression.base import Scorer
from vllm_tangram.compression.gate import PlacedGate
from vllm_tangram.compression.scorers.expected_attention import ExpectedAttention
from vllm_tangram.compression.scorers.fastkvzip import FastKVzip
from vllm_tangram.compression.scorers.keydiff import KeyDiff
from vllm_tangram.compression.scorers.knorm import KNorm
from vllm_tangram.compression.scorers.snapkv import SnapKV
from vllm_tangram.compression.scorers.streaming import Streaming
from vllm_tangram.compression.scorers.tova import Tova
from vllm_tangram.errors import TangramError

registry: dict[str, type[Scorer]] = {
    Streaming.name: Streaming,
    KNorm.name: KNorm,
    KeyDiff.name: KeyDiff,
    SnapKV.name: SnapKV,
    Tova.name: Tova,
    ExpectedAttention.name: ExpectedAttention,
    FastKVzip.name: FastKVzip,
}


def scorer_names() -> tuple[str, ...]:
    """Names that `get_scorer` knows."""
    return tuple(registry)


def needs_gate(name: str) -> bool:
    """Is the scorer made with a trained gate?"""
    return name in registry and "gate" in registry[name].needs


def get_scorer(name: str, gate: PlacedGate | None = None) -> Scorer:
    """Make the scorer called ``name``.

    Args:
        name: what users write.
        gate: for scorers that need one, placed where they score (`Gate.placed`); others do not look at it.

    Raises:
        TangramError: there is none, or it needs a gate.

    """
    if name not in registry:
        raise TangramError(f"--scorer: unknown scorer {name!r}; known: {', '.join(registry)}")
    if not needs_gate(name):
        return registry[name]()
    if gate is None:
        raise TangramError(f"--scorer {name} needs a gate of the model: give one with --gate")
    return FastKVzip(gate)
