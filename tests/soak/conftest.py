# SPDX-License-Identifier: Apache-2.0
"""The same surroundings as the engine tests, and one small server with an API key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine import conftest as _engine  # noqa: F401 (sets what vLLM reads when it is imported)
from tests.models import make_checkpoint
from tests.serving import Server, serving, stop
from tests.soak.traffic import SERVER_OPTIONS

API_KEY = "none"  # what the tests' clients send


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), head_dim=32, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def small_server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It verifies all pages at every step."""
    options = [str(small_model), *SERVER_OPTIONS, f"--api-key={API_KEY}"]
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, options, model="small", environment={"TANGRAM_CHECK": "1"}) as server:
        server.http.headers["Authorization"] = f"Bearer {API_KEY}"
        yield server
        stop(server)
