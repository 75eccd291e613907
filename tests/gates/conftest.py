# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models import make_checkpoint

from vllm_tangram.eval.dense import DenseModel


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def dense(checkpoint: Path) -> DenseModel:
    return DenseModel.load(checkpoint, dtype=torch.float32)
