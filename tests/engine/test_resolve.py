# SPDX-License-Identifier: Apache-2.0
"""Which scorer an engine takes if the user names none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.compression.gates import MODEL, untrained_gate

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm_tangram import TangramConfig, TangramError
from vllm_tangram.compression import shipped
from vllm_tangram.engine.resolve import resolve_scorer


@pytest.fixture(autouse=True)
def gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path))
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "none")
    folder = tmp_path / "gates"
    folder.mkdir()
    return folder


def test_a_model_with_a_gate_is_scored_by_it(gates: Path) -> None:
    assert resolve_scorer(TangramConfig.parse({"alpha": 1.0}), MODEL).scorer == "keydiff"
    untrained_gate(MODEL).save(gates / "own.safetensors")
    resolved = resolve_scorer(TangramConfig.parse({"alpha": 1.0, "chunk_size": 512}), MODEL)
    assert (resolved.scorer, resolved.alpha, resolved.chunk_size) == ("fastkvzip", 1.0, 512)
    assert resolve_scorer(TangramConfig.parse({}), MODEL | {"weights": "xyz"}).scorer == "keydiff"


@pytest.mark.parametrize("scorer", ["keydiff", "snapkv"])
def test_what_the_user_names_stays(scorer: str, gates: Path) -> None:
    untrained_gate(MODEL).save(gates / "own.safetensors")
    assert resolve_scorer(TangramConfig.parse({"scorer": scorer}), MODEL).scorer == scorer


def test_a_profile_says_what_it_is_for(skewed_profile: Callable[[str], str], tmp_path: Path, gates: Path) -> None:
    untrained_gate(MODEL).save(gates / "own.safetensors")
    assert resolve_scorer(TangramConfig.parse({"profile": skewed_profile("snapkv")}), MODEL).scorer == "snapkv"
    with pytest.raises(TangramError, match="there is no"):
        resolve_scorer(TangramConfig.parse({"profile": str(tmp_path / "absent")}), MODEL)
