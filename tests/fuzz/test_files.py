# SPDX-License-Identifier: Apache-2.0
"""Profiles, gates and document scores from anywhere: a file is refused with a reason, or what it says can be used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.budget.strategies import make_profile
from tests.compression.documents import random_scores
from tests.compression.gates import MODEL, untrained_gate
from tests.fuzz.mutations import VALUES, damaged_bytes, damaged_header
from tests.gates.test_convert import MODEL_OF_GATE, published
from typer.testing import CliRunner

from vllm_tangram import RetentionProfile, TangramConfig, TangramError
from vllm_tangram.budget import RetentionPlan
from vllm_tangram.cli.app import app
from vllm_tangram.compression.document import DocumentScores
from vllm_tangram.compression.gate import Gate
from vllm_tangram.compression.known import KnownPrefix
from vllm_tangram.compression.shipped import find_gate, known_gate
from vllm_tangram.gates.convert import convert

MANY = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def saved(save: Callable[[Path], None], folder: Path) -> bytes:
    save(folder / "original")
    return (folder / "original").read_bytes()


@pytest.fixture(scope="module")
def profile_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return saved(make_profile(gate="abc", scorer="fastkvzip").save, tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def gate_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return saved(untrained_gate(MODEL).save, tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def document_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return saved(random_scores([5, 6, 7, 8]).save, tmp_path_factory.mktemp("document"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "file.safetensors"


@contextmanager
def or_refused(*words: str) -> Iterator[None]:
    """The only exception that may come out, and its message has one of the words."""
    message = None
    try:
        yield
    except TangramError as error:
        message = str(error)
    assert message is None or any(word in message for word in words), message


def damaged(data: st.DataObject, original: bytes, key: str) -> bytes:
    return data.draw(st.one_of(damaged_bytes(original), damaged_header(original, key)))


@MANY
@given(data=st.data())
def test_profiles(data: st.DataObject, profile_bytes: bytes, file: Path) -> None:
    file.write_bytes(damaged(data, profile_bytes, "tangram_profile"))
    with or_refused("file.safetensors"):
        profile = RetentionProfile.load(file)
        assert ((profile.kept >= 0) & (profile.kept <= 1)).all()
        assert profile.mean.shape == (len(profile.retentions), profile.num_layers, profile.num_kv_heads)
        usable(profile)
        again = file.with_name("again.safetensors")
        profile.save(again)
        assert same(vars(RetentionProfile.load(again)), vars(profile))


def usable(profile: RetentionProfile) -> None:
    """An engine can be planned with it, or it does not fit, which is said."""
    plan = RetentionPlan.of_profile(
        TangramConfig(scorer="keydiff", page_group_size=2, chunk_size=128, window=16),
        profile,
        block_size=32,
        max_tokens=512,
    )
    assert 0 < plan.schedule(0.25).num_pages(512, 512) <= plan.full_pages(512) + plan.num_groups
    with pytest.raises(TangramError, match="does not fit"):
        profile.check(model={"num_hidden_layers": 3}, scorer="keydiff", gate=None)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal but for the file's name; NaN is NaN."""

    def equal(name: str) -> bool:
        if isinstance(one[name], np.ndarray):
            return bool(np.array_equal(one[name], other[name]))
        return json.dumps(one[name], sort_keys=True) == json.dumps(other[name], sort_keys=True)

    return all(equal(name) for name in one if name != "source")


@MANY
@given(data=st.data())
def test_gates(data: st.DataObject, gate_bytes: bytes, file: Path) -> None:
    file.write_bytes(damaged(data, gate_bytes, "tangram_gate"))
    with or_refused("file.safetensors"):
        Gate.model_of(file)
    with or_refused("file.safetensors"):
        gate = Gate.load(file)
        scores = gate.scores(0, torch.ones(3, gate.hidden_size))
        assert scores.shape == (gate.num_kv_heads, 3)
        again = file.with_name("again.safetensors")
        gate.save(again)
        assert Gate.load(again).digest() == gate.digest()


@MANY
@given(data=st.data())
def test_documents(data: st.DataObject, document_bytes: bytes, file: Path) -> None:
    file.write_bytes(damaged(data, document_bytes, "tangram_document"))
    with or_refused("file.safetensors"):
        document = DocumentScores.load(file)
        prompt = [*document.ids.tolist(), 1]
        known = KnownPrefix.of(prompt, [document])
        assert known is not None
        scores = known.scores(0, len(prompt))
        assert scores is not None
        assert torch.equal(scores, document.scores)
        again = file.with_name("again.safetensors")
        document.save(again)
        assert torch.equal(DocumentScores.load(again).scores, document.scores)


@MANY
@given(data=st.data())
def test_a_damaged_gate_in_the_cache_disturbs_nobody(
    data: st.DataObject, gate_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked into at every start of any model."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    (cache / "gates").mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TANGRAM_CACHE", str(cache))
    file = cache / "gates" / "file.safetensors"
    file.write_bytes(damaged(data, gate_bytes, "tangram_gate"))
    found = known_gate({**MODEL, "weights": "of another model"})
    assert found is None
    if known_gate(MODEL) is not None:
        assert find_gate(None, MODEL) == file
        Gate.load(file)


@pytest.fixture(scope="module", params=[True, False], ids=["zip", "pickle"])
def checkpoint_bytes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A published gate, in torch's present and in its old format."""
    path = tmp_path_factory.mktemp("checkpoint") / "gate.pt"
    torch.save(published(), path, _use_new_zipfile_serialization=request.param)
    return path.read_bytes()


@MANY
@given(data=st.data())
def test_published_gates(data: st.DataObject, checkpoint_bytes: bytes, file: Path) -> None:
    file.write_bytes(data.draw(damaged_bytes(checkpoint_bytes)))
    with or_refused("file.safetensors"):
        assert convert(file, MODEL_OF_GATE).num_layers == MODEL_OF_GATE["num_hidden_layers"]


@settings(MANY, max_examples=60)
@given(data=st.data())
def test_the_command_line_says_so_in_one_line(data: st.DataObject, profile_bytes: bytes, file: Path) -> None:
    file.write_bytes(damaged(data, profile_bytes, "tangram_profile"))
    result = CliRunner().invoke(app, ["inspect", str(file), "--json"])
    if result.exit_code:
        assert result.exit_code == 2, result.exception
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


OPTION_VALUES = VALUES | st.floats(0, 1) | st.integers(-1, 9000) | st.sampled_from(["snapkv", "keydiff", "uniform"])


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from([*TangramConfig.model_fields, "retentoin"]), OPTION_VALUES, max_size=5))
def test_options(options: dict[str, Any]) -> None:
    """Options from anywhere: a configuration that survives the way to the workers, or an error that names each."""
    with or_refused(*(f"--{name.replace('_', '-')}" for name in options), "options"):
        config = TangramConfig.parse(options)
        assert TangramConfig.parse(config.model_dump(exclude_unset=True)) == config
        assert 0 < config.retention <= 1


@settings(max_examples=300)
@given(VALUES | st.floats(-1, 2))
def test_retention_of_a_request(value: object) -> None:
    config = TangramConfig(retention=0.25, retention_floor=0.1)
    with or_refused("retention must be"):
        assert 0.1 <= config.request_retention(value) <= 1
