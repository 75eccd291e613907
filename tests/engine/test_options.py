# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM that are chosen where the user left them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import CompilationConfig

from vllm_tangram.config import TangramConfig
from vllm_tangram.engine import options
from vllm_tangram.engine.options import engine_options, graph_sizes

CONFIG = TangramConfig(budgets="uniform")


@pytest.mark.parametrize(
    "given", [{}, {"compilation_config": {"mode": 3}}, {"compilation_config": CompilationConfig()}]
)
def test_graphs_reach_mixed_steps(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_platform", lambda: options._CUDA)
    sizes = engine_options(CONFIG, {"max_num_seqs": 96, **given})["cudagraph_capture_sizes"]
    assert sizes == graph_sizes(96)
    assert sizes[:4] == [1, 2, 4, 8]
    assert 192 in sizes
    assert 200 not in sizes, "vLLM captures decode steps of twice the requests, and no more"
    assert sizes[-7:] == [512, 768, 1024, 1280, 1536, 1792, 2048]


@pytest.mark.parametrize(
    "given",
    [
        {"enforce_eager": True},
        {"cudagraph_capture_sizes": [1, 2]},
        {"max_cudagraph_capture_size": 64},
        {"compilation_config": {"cudagraph_capture_sizes": [8]}},
        {"compilation_config": CompilationConfig(max_cudagraph_capture_size=8)},
    ],
)
def test_graphs_of_a_user_stay(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_platform", lambda: options._CUDA)
    made = engine_options(CONFIG, given)
    assert made.get("cudagraph_capture_sizes") == given.get("cudagraph_capture_sizes")


def test_no_graphs_on_a_cpu() -> None:
    assert "cudagraph_capture_sizes" not in engine_options(CONFIG, {})
