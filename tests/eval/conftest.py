# SPDX-License-Identifier: Apache-2.0
"""The tests' model and a profile of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models import make_checkpoint

from vllm_tangram.budget import RetentionProfile
from vllm_tangram.eval.dense import DenseModel


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of two KV heads."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def dense(checkpoint: Path) -> DenseModel:
    return DenseModel.load(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="session")
def skewed(dense: DenseModel) -> RetentionProfile:
    """A profile whose heads keep from a tenth to nine tenths at one half."""
    kept = np.array([0.1, 0.3, 0.9, 0.5, 0.7, 0.5]).reshape(1, 1, 3, 2)
    return RetentionProfile([0.5], kept, "snapkv", dense.fingerprint, sinks=4, window=64, chunk_size=2048)
