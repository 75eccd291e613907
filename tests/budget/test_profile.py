# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.budget.strategies import make_profile

from vllm_tangram.budget import FORMAT_VERSION, RetentionProfile
from vllm_tangram.errors import TangramError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "profile.safetensors"
    make_profile().save(path)
    return path


def _rewrite(path: Path, header: dict[str, Any] | None = None, **tensors: np.ndarray | None) -> None:
    """Change header fields and tensors of a saved profile; None removes one."""
    with safe_open(path, framework="numpy") as file:
        fields = json.loads(file.metadata()["tangram_profile"])
    fields = {name: value for name, value in {**fields, **(header or {})}.items() if value is not None}
    merged = {name: value for name, value in {**load_file(path), **tensors}.items() if value is not None}
    save_file(merged, path, metadata={"tangram_profile": json.dumps(fields)})


def test_round_trip(saved: Path) -> None:
    original, loaded = make_profile(), RetentionProfile.load(saved)
    np.testing.assert_array_equal(loaded.kept, original.kept)
    np.testing.assert_array_equal(loaded.retentions, original.retentions)
    np.testing.assert_array_equal(loaded.mean, original.mean)
    for name in ("scorer", "model", "sinks", "window", "chunk_size", "info"):
        assert getattr(loaded, name) == getattr(original, name)
    assert loaded.source == str(saved)
    assert (loaded.num_samples, loaded.num_layers, loaded.num_kv_heads) == (3, 3, 2)
    assert set(load_file(saved)) == {"retentions", "kept", "mean", "std"}
    assert RetentionProfile.load(str(saved)).scorer == "snapkv"


def test_mean_and_std_are_over_samples() -> None:
    profile = make_profile(kept=np.array([0.25, 0.75]).reshape(2, 1, 1, 1), retentions=np.array([0.5]))
    assert profile.mean.tolist() == [[[0.5]]]
    assert profile.std.tolist() == [[[0.25]]]
    assert not profile.kept.flags.writeable


def test_a_failed_save_leaves_the_old_file_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full_disk(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(TangramError, match=r"cannot write profile .*No space left"):
        make_profile(seed=1).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_saving_into_no_folder(tmp_path: Path) -> None:
    with pytest.raises(TangramError, match="cannot be written"):
        make_profile().save(tmp_path / "absent" / "profile.safetensors")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TangramError, match=r"there is no file .*tangram profile"):
        RetentionProfile.load(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("size", [0, 4, 50, 400, -1])
def test_truncated_file(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    with pytest.raises(TangramError, match="cannot be read"):
        RetentionProfile.load(saved)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(os.urandom(1000))
    with pytest.raises(TangramError, match="cannot be read"):
        RetentionProfile.load(path)
    save_file({"weight": np.zeros(3)}, path)
    with pytest.raises(TangramError, match="is not a retention profile"):
        RetentionProfile.load(path)
    save_file({"weight": np.zeros(3)}, path, metadata={"tangram_profile": "{"})
    with pytest.raises(TangramError, match="cannot be read"):
        RetentionProfile.load(path)


def test_newer_format(saved: Path) -> None:
    _rewrite(saved, {"format_version": FORMAT_VERSION + 1})
    with pytest.raises(TangramError, match=r"format version 2.*reads version 1; upgrade vllm-tangram"):
        RetentionProfile.load(saved)


@pytest.mark.parametrize("field", ["scorer", "model", "sinks", "window", "chunk_size", "info"])
def test_missing_fields(saved: Path, field: str) -> None:
    _rewrite(saved, {field: None})
    with pytest.raises(TangramError, match=f"lacks '{field}'"):
        RetentionProfile.load(saved)


@pytest.mark.parametrize("field", ["sinks", "model", "info"])
def test_fields_of_the_wrong_type(saved: Path, field: str) -> None:
    _rewrite(saved, {field: "many"})
    with pytest.raises(TangramError, match="is damaged"):
        RetentionProfile.load(saved)


@pytest.mark.parametrize("name", ["retentions", "kept", "mean", "std"])
def test_missing_tensors(saved: Path, name: str) -> None:
    _rewrite(saved, **{name: None})
    with pytest.raises(TangramError, match=f"lacks '{name}'"):
        RetentionProfile.load(saved)


KEPT = make_profile().kept


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"kept": KEPT[:, :2]}, "are not"),
        ({"kept": KEPT[0]}, "are not"),
        ({"kept": KEPT[:0]}, "are not"),
        ({"kept": KEPT * 20}, "outside"),
        ({"kept": -KEPT}, "outside"),
        ({"kept": np.where(KEPT.max() > KEPT, KEPT, np.nan)}, "outside"),
        ({"retentions": np.array([0.1, 0.5, 0.25])}, "do not increase"),
        ({"retentions": np.array([0.1, 0.5, 1.0])}, "do not increase"),
        ({"retentions": np.array([0.1, np.nan, 0.5])}, "do not increase"),
        ({"mean": np.zeros((3, 3, 2))}, "mean does not follow"),
        ({"std": np.zeros((3, 2))}, "std does not follow"),
    ],
)
def test_damaged_tensors(saved: Path, tensors: dict[str, np.ndarray], reason: str) -> None:
    _rewrite(saved, **tensors)
    with pytest.raises(TangramError, match=f"profile .*{saved.name} is damaged: .*{reason}"):
        RetentionProfile.load(saved)


def test_a_profile_belongs_to_a_gate(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "gated.safetensors"
    make_profile(scorer="fastkvzip", gate="abc123").save(path)
    gated = RetentionProfile.load(path)
    gated.check(model=gated.model, scorer="fastkvzip", gate="abc123")
    with pytest.raises(TangramError, match="gate: recorded abc123, served def456"):
        gated.check(model=gated.model, scorer="fastkvzip", gate="def456")
    with pytest.raises(TangramError, match="gate: recorded abc123, served none"):
        gated.check(model=gated.model, scorer="fastkvzip")
    without = RetentionProfile.load(saved)
    assert without.gate is None
    with pytest.raises(TangramError, match="gate: recorded none, served abc123"):
        without.check(model=without.model, scorer="snapkv", gate="abc123")


def test_check(saved: Path) -> None:
    profile = RetentionProfile.load(saved)
    served = dict(profile.model)
    profile.check(model=served, scorer="snapkv")
    profile.check(model={**served, "weights": "abc"}, scorer="snapkv")
    with pytest.raises(TangramError, match=r"profile\.safetensors .*scorer: recorded snapkv, served keydiff"):
        profile.check(model=served, scorer="keydiff")
    with pytest.raises(TangramError, match="layers x KV heads: recorded 3 x 2, served 4 x 2"):
        profile.check(model={**served, "num_hidden_layers": 4}, scorer="snapkv")
    with pytest.raises(TangramError, match="vocab_size: recorded None, served 5"):
        profile.check(model={**served, "vocab_size": 5}, scorer="snapkv")


def test_between_levels_what_is_kept_is_linear() -> None:
    profile = make_profile()
    kept = profile.kept.astype(np.float64)
    for x, expected in (
        (0, 0 * kept[:, 0]),
        (0.05, kept[:, 0] / 2),
        (0.1, kept[:, 0]),
        (0.2, (kept[:, 0] + 2 * kept[:, 1]) / 3),
        (0.5, kept[:, 2]),
        (0.9, (0.2 * kept[:, 2] + 0.8)),
        (1, np.ones_like(kept[:, 0])),
    ):
        np.testing.assert_allclose(profile.kept_at(x), expected, atol=1e-12)


def test_domains_are_kept(saved: Path, tmp_path: Path) -> None:
    assert RetentionProfile.load(saved).domains == ()  # as in files that are older than domains
    profile = replace(make_profile(), domains=("code", "mail", "code"))
    profile.save(tmp_path / "domains")
    assert RetentionProfile.load(tmp_path / "domains").domains == ("code", "mail", "code")
    some = profile.subset(np.array([True, False, True]))
    assert some.domains == ("code", "code")
    np.testing.assert_array_equal(some.kept, profile.kept[[0, 2]])
    assert make_profile().subset(np.array([False, True, False])).domains == ()


@pytest.mark.parametrize("domains", [["code"], "code", [1, 2, 3], {"code": 3}])
def test_damaged_domains(saved: Path, domains: object) -> None:
    _rewrite(saved, {"domains": domains})
    with pytest.raises(TangramError, match=r"is damaged: .*domains"):
        RetentionProfile.load(saved)


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    """Writing by renaming would turn a device or a link into a file."""
    profile = RetentionProfile(np.array([0.5]), np.full((1, 1, 2, 2), 0.5, np.float32), "snapkv", {}, 4, 64, 2048)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "."):
        with pytest.raises(TangramError, match="not a regular file"):
            profile.save(tmp_path / name)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(TangramError, match="cannot be written"):
        profile.save(tmp_path / ("x" * 250))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "file", "link"]


@pytest.mark.parametrize("model", [{"architectures": 5}, {"architectures": [5]}, {"head_dim": "abc"}])
def test_a_model_that_cannot_be_read_is_damage(tmp_path: Path, model: dict[str, object]) -> None:
    profile = RetentionProfile(np.array([0.5]), np.full((1, 1, 2, 2), 0.5, np.float32), "snapkv", model, 4, 64, 2048)
    profile.save(tmp_path / "p")
    with pytest.raises(TangramError, match=r"is damaged: (architectures|head_dim) must be"):
        RetentionProfile.load(tmp_path / "p")
