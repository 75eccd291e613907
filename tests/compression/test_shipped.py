# SPDX-License-Identifier: Apache-2.0
"""Which gate a model gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.compression.gates import MODEL, untrained_gate

from vllm_tangram import TangramConfig, TangramError
from vllm_tangram.compression import shipped
from vllm_tangram.compression.shipped import find_gate

OTHER = MODEL | {"weights": "xyz"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gates of both models and a damaged one come with the package."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "a-damaged.safetensors").write_bytes(b"not a gate")
    untrained_gate(OTHER).save(folder / "b-other.safetensors")
    untrained_gate(MODEL).save(folder / "c-own.safetensors")
    monkeypatch.setattr(shipped, "FOLDER", folder)
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    return folder


def test_the_shipped_gate_of_the_model(folder: Path) -> None:
    assert find_gate(None, MODEL) == folder / "c-own.safetensors"
    assert find_gate(None, OTHER) == folder / "b-other.safetensors"


def test_a_gate_that_was_trained_here_comes_before_a_shipped_one(tmp_path: Path) -> None:
    trained = tmp_path / "cache" / "gates"
    trained.mkdir(parents=True)
    untrained_gate(MODEL, seed=1).save(trained / "mine.safetensors")
    assert find_gate(None, MODEL) == trained / "mine.safetensors"
    assert find_gate(None, OTHER).parent == tmp_path / "shipped"


def test_what_nobody_chose_is_for_the_very_weights(tmp_path: Path) -> None:
    unknown = MODEL | {"weights": None}
    with pytest.raises(TangramError, match="there is none of this model"):
        find_gate(None, unknown)
    untrained_gate(unknown).save(tmp_path / "unknown.safetensors")
    assert find_gate(tmp_path / "unknown.safetensors", MODEL) == tmp_path / "unknown.safetensors"


def test_the_given_gate_comes_first(tmp_path: Path) -> None:
    untrained_gate(MODEL, seed=1).save(tmp_path / "mine.safetensors")
    assert find_gate(str(tmp_path / "mine.safetensors"), MODEL) == tmp_path / "mine.safetensors"


def test_refuses_a_given_gate_of_another_model(folder: Path) -> None:
    with pytest.raises(TangramError, match=r"b-other.* does not fit .*weights"):
        find_gate(folder / "b-other.safetensors", MODEL)
    with pytest.raises(TangramError, match="there is no gate"):
        find_gate(folder / "absent.safetensors", MODEL)


def test_says_what_to_do_without_one() -> None:
    with pytest.raises(TangramError, match=r"tangram gate train MODEL.*tangram gate convert"):
        find_gate(None, MODEL | {"num_hidden_layers": 3})


def test_the_option_is_refused_where_nothing_would_read_it() -> None:
    assert TangramConfig.parse({"scorer": "fastkvzip", "gate": "g"}).gate == "g"
    assert TangramConfig.parse({"gate": "g"}).scorer == "fastkvzip"
    with pytest.raises(TangramError, match="keydiff is not"):
        TangramConfig.parse({"scorer": "keydiff", "gate": "g"})
