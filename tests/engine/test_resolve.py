# SPDX-License-Identifier: Apache-2.0
"""Which scorer an engine takes if the user names none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.compression.gates import MODEL, untrained_gate

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import LoadConfig, ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import DefaultModelLoader

from vllm_tangram import TangramConfig, TangramError
from vllm_tangram.compression import shipped
from vllm_tangram.engine.resolve import model_identity, resolve_scorer
from vllm_tangram.engine.setup import fingerprint_of


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


@pytest.fixture
def hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: Path) -> Path:
    """The embedded model as one of the hub, of which only the configuration is here yet: its snapshot."""
    repository = tmp_path / "hub" / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(embedded / "config.json")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def of_hub(embedded: Path, name: str = "org/model") -> ModelConfig:
    loaded = EngineArgs(model=str(embedded)).create_model_config()
    loaded.model = name
    return loaded


def test_weights_of_the_hub_are_fetched_before_the_model_is_told(
    hub_model: Path, embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def download(_loader: DefaultModelLoader, model: ModelConfig) -> None:
        fetched.append(model.model)
        for file in embedded.glob("*.safetensors"):
            (hub_model / file.name).symlink_to(file)

    monkeypatch.setattr(DefaultModelLoader, "download_model", download)
    model = of_hub(embedded)
    # Nothing is fetched for weights that are made up.
    assert fingerprint_of(model, LoadConfig(load_format="dummy"))["weights"] is None
    assert not fetched
    identity = fingerprint_of(model, LoadConfig())
    assert identity == model_identity(str(embedded), {})
    assert fingerprint_of(model, LoadConfig()) == identity
    assert fetched == ["org/model"]  # once: the second start knows them


def test_weights_in_a_download_folder_are_found(hub_model: Path, embedded: Path) -> None:
    for file in embedded.glob("*.safetensors"):
        (hub_model / file.name).symlink_to(file)
    folder = hub_model.parents[2].rename(hub_model.parents[3] / "elsewhere")
    found = fingerprint_of(of_hub(embedded), LoadConfig(download_dir=str(folder)))
    assert found == model_identity(str(embedded), {})
