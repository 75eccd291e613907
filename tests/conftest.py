# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

# Kernels run in Triton's interpreter where there is no GPU; Triton reads this when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

# The machine's load decides how long an example takes, and must not decide whether a test passes.
settings.register_profile("tangram", deadline=None)
settings.load_profile("tangram")

_REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Measured data that is not part of the repository: ``$TANGRAM_SHARED/data``, else ``../shared/data`` beside it."""
    folder = Path(os.environ.get("TANGRAM_SHARED", _REPOSITORY.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder} (set TANGRAM_SHARED)")
    return folder


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The embedded model's checkpoint."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_tangram.embedded import embedded_model

    return embedded_model()
