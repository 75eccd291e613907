# SPDX-License-Identifier: Apache-2.0
"""Engines for the tests: in this process, so that a test can look inside; shared, since a start is slow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Two threads that spin for each other on two busy cores are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM binds every rank to a NUMA node of its own, which the machine may not have. It reads this once a process.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import pytest
from tests.engine.drive import Engine

from vllm_tangram.budget import RetentionProfile
from vllm_tangram.compression import needs_gate
from vllm_tangram.compression.gate import Gate
from vllm_tangram.compression.shipped import find_gate

COMMON: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}


@pytest.fixture(scope="session")
def make_engine(embedded: Path) -> Iterator[Callable[..., Engine]]:
    """Start (or reuse) an engine on the embedded model; ``stock=True`` gives vLLM's own ``LLM``.

    Stock vLLM has its prefix cache on, as by default. The three used last are kept: each takes about a gigabyte.
    """
    engines: dict[str, Engine] = {}

    def make(*, stock: bool = False, **options: Any) -> Engine:
        key = repr((stock, sorted(options.items())))
        if key in engines:
            engines[key] = engines.pop(key)
        else:
            while len(engines) >= 3:
                engines.pop(next(iter(engines))).close()
            if stock:
                import vllm

                engines[key] = Engine(vllm.LLM(str(embedded), **(COMMON | options)))
            else:
                import vllm_tangram

                engines[key] = Engine(vllm_tangram.LLM(str(embedded), **(COMMON | options)))
        return engines[key]

    yield make
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="session")
def skewed_profile(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A profile of the embedded model whose heads differ by more than 40x, for any scorer."""
    from vllm_tangram.engine.resolve import model_identity

    identity = model_identity(str(embedded), {})
    folder = tmp_path_factory.mktemp("profiles")
    rng = np.random.default_rng(7)
    retentions = np.array([0.1, 0.25, 0.5, 0.75])
    strength = rng.lognormal(0, 1.5, (30, 3))

    def kept_at(retention: float) -> np.ndarray:
        low, high = 0.0, 1e4
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if np.minimum(1, strength * middle).mean() < retention else (low, middle)
        return np.minimum(1, strength * low)

    base = np.stack([kept_at(r) for r in retentions])
    kept = np.clip(base * rng.uniform(0.8, 1.2, (6, 1, 30, 3)), 0, 1).astype(np.float32)

    def profile(scorer: str) -> str:
        path = folder / f"{scorer}.safetensors"
        if not path.exists():
            RetentionProfile(
                retentions=retentions,
                kept=np.maximum.accumulate(kept, axis=1),
                scorer=scorer,
                model=identity,
                sinks=4,
                window=16,
                chunk_size=128,
                gate=Gate.load(find_gate(None, identity)).digest() if needs_gate(scorer) else None,
                info={"samples": "made up"},
            ).save(path)
        return str(path)

    return profile


@pytest.fixture(scope="session")
def token_ids(embedded: Path) -> list[int]:
    """A long real text, tokenised."""
    import pydoc_data.topics

    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(str(embedded)).encode("\n".join(pydoc_data.topics.topics.values()))
    return list(ids)
