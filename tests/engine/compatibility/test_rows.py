# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md, row by row: what works answers as stock vLLM does at retention 1, what is refused says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.compatibility.lab import Lab, Shared
from tests.engine.compatibility.rows import OPTIONS, REFUSED, REQUESTS, SERVER, Row, document
from tests.models import make_checkpoint

ROWS = REQUESTS + SERVER + OPTIONS + REFUSED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), head_dim=32, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    shared = Shared()
    with shared.stack:
        yield shared


@pytest.mark.engine
@pytest.mark.timeout(1200)  # the first row of a server starts two
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.feature, marks=pytest.mark.slow if row.slow else ()) for row in ROWS]
)
def test_row(row: Row, model: Path, tmp_path: Path, shared: Shared) -> None:
    row.check(Lab(model, tmp_path, shared))


def test_the_page_is_that_of_the_rows() -> None:
    """So no row of it is untested."""
    page = Path(__file__).parents[3] / "docs" / "compatibility.md"
    assert page.read_text() == document(), "run `python -m tests.engine.compatibility.rows > docs/compatibility.md`"
    assert len({row.feature for row in ROWS}) == len(ROWS)
