# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM that are chosen where the user left them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig

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
    assert sizes == graph_sizes(96, 8192 + 96)
    assert sizes[:4] == [1, 2, 4, 8]
    assert 192 in sizes
    assert 200 not in sizes, "vLLM captures decode steps of twice the requests, and no more"
    assert sizes[-7:] == [512, 768, 1024, 1280, 1536, 1792, 2048]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 100, 128, 250, 300, 512])
@pytest.mark.parametrize("step_tokens", [600, 1152, 8320])
def test_no_graph_of_vllm_is_missing(max_num_seqs: int, step_tokens: int) -> None:
    """Those that vLLM captures where nobody says anything; and what is asked for is what it captures."""

    def captured(**asked: list[int]) -> list[int]:
        compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, **asked)
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=step_tokens),
            compilation_config=compilation,
            uniform_decode_query_len=1,
            performance_mode="balanced",
        )
        VllmConfig._set_cudagraph_sizes(config)
        return list(compilation.cudagraph_capture_sizes)

    sizes = graph_sizes(max_num_seqs, step_tokens)
    assert set(captured()) <= set(sizes)
    assert captured(cudagraph_capture_sizes=sizes) == sizes
    assert sizes[-1] == min(step_tokens, 2048)


@pytest.mark.parametrize(
    "given",
    [
        {"enforce_eager": True},
        {"performance_mode": "interactivity"},
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
