# SPDX-License-Identifier: Apache-2.0
"""An engine that cannot start; engines that do are in test_demo.py."""

import multiprocessing
from pathlib import Path

import pytest

from vllm_tangram.bench.decode import median_step
from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.errors import TangramError

pytestmark = pytest.mark.engine


def test_engine_that_does_not_start(tmp_path: Path) -> None:
    with EngineProcess("broken", str(tmp_path), ours=False, kv_tokens=1, options={}) as engine:
        with pytest.raises(TangramError, match=r"(?s)the engine 'broken' failed: .*config"):
            engine.call(median_step, 1)
        folder = Path(engine._folder.name)
        assert (folder / "log").exists()
    assert not folder.exists()
    assert not multiprocessing.active_children()
