# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_tangram.bench.published import import_published, profile_and_shape
from vllm_tangram.bench.shapes import HeadShape, model_folder, shape_fingerprint, shape_names
from vllm_tangram.budget import PROFILE_RETENTIONS, RetentionProfile, model_fingerprint
from vllm_tangram.cli.app import app
from vllm_tangram.errors import TangramError

SIZES = {  # layers, KV heads, query heads, head size
    "llama-3.1-8b": (32, 8, 32, 128),
    "qwen2.5-32b": (64, 8, 40, 128),
    "qwen2.5-7b": (28, 4, 28, 128),
    "qwen3-4b": (36, 8, 32, 128),
}


def _published(path: Path, ratios: np.ndarray | None = None, name: str = "raw_ratio", **other: Any) -> Path:
    if ratios is None:
        ratios = np.random.default_rng().random((1, 3, 36, 8)) ** 6
        ratios[:, :, 5:9] = 0
    np.savez(path, **{name: ratios}, **other)
    return path


def test_shapes() -> None:
    assert {name: tuple(vars(HeadShape.of(shape_fingerprint(name))).values()) for name in shape_names()} == SIZES
    assert all(json.loads((model_folder(n) / "config.json").read_text())["vocab_size"] > 128_000 for n in SIZES)
    with pytest.raises(TangramError, match=r"unknown model shape 'gpt-2'; known: llama-3.1-8b, qwen2.5-32b"):
        model_folder("gpt-2")
    with pytest.raises(TangramError, match="does not say its head_dim"):
        HeadShape.of({**shape_fingerprint("qwen3-4b"), "head_dim": None})


@pytest.mark.parametrize("name", SIZES)
def test_fingerprint_is_that_of_the_loaded_configuration(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoConfig.from_pretrained(model_folder(name))
    assert loaded.max_position_embeddings == 131072
    assert model_fingerprint(loaded.to_dict(), model_folder(name)) == shape_fingerprint(name)


def test_every_sample_keeps_each_retention(tmp_path: Path) -> None:
    path = _published(tmp_path / "p.npz", meta=np.frombuffer(b'{"model_name": "M", "scorer": "s"}', np.uint8))
    profile = import_published(path, shape_fingerprint("qwen3-4b"), "keydiff")
    assert profile.kept.shape == (3, len(PROFILE_RETENTIONS), 36, 8)
    np.testing.assert_allclose(profile.kept.mean(axis=(2, 3)), np.tile(PROFILE_RETENTIONS, (3, 1)), atol=1e-4)
    assert (np.diff(profile.kept, axis=1) >= 0).all()
    with np.load(path) as file:
        ratios = file["raw_ratio"][0]
    for sample, kept in zip(ratios, profile.kept, strict=True):
        assert (np.diff(kept[3].ravel()[np.argsort(sample.ravel())]) >= 0).all()  # who kept more keeps more
    assert profile.info["published_model_name"] == "M"
    profile.save(tmp_path / "p.safetensors")
    RetentionProfile.load(tmp_path / "p.safetensors").check(model=shape_fingerprint("qwen3-4b"), scorer="keydiff")


def test_medians_alone_are_one_sample(tmp_path: Path) -> None:
    path = _published(tmp_path / "p.npz", np.random.default_rng().random((1, 32, 8)), "ratio_per_head")
    profile, shape = profile_and_shape(path, None)
    assert profile is not None
    assert (profile.num_samples, profile.num_layers) == (1, 32)
    assert shape == HeadShape(*SIZES["llama-3.1-8b"])


def test_real_file(shared_data: Path) -> None:
    profile, shape = profile_and_shape(shared_data / "profiles/fastkvzip/qwen3-4b-instruct-2507/profile.npz", None)
    assert profile is not None
    assert (profile.num_samples, shape.layers, shape.kv_heads) == (28, 36, 8)
    assert (profile.mean[PROFILE_RETENTIONS.index(0.25)] < 0.01).mean() > 0.2  # many heads want next to nothing


def test_what_profiles_and_shapes_do_not_fit(tmp_path: Path) -> None:
    assert profile_and_shape(None, None) == (None, HeadShape(*SIZES["qwen3-4b"]))
    path = _published(tmp_path / "p.npz")
    with pytest.raises(TangramError, match="36 layers of 8 KV heads, the model has 64 of 8"):
        profile_and_shape(path, "qwen2.5-32b")
    import_published(path, shape_fingerprint("qwen3-4b"), "knorm").save(tmp_path / "p.safetensors")
    with pytest.raises(TangramError, match=r"36 layers of 8 KV heads, qwen2.5-7b has 28 of 4"):
        profile_and_shape(tmp_path / "p.safetensors", "qwen2.5-7b")
    assert profile_and_shape(tmp_path / "p.safetensors", None)[1] == HeadShape(*SIZES["qwen3-4b"])
    odd = _published(tmp_path / "odd.npz", np.full((1, 2, 5, 3), 0.5))
    with pytest.raises(TangramError, match="5 layers of 3 KV heads; no model shape has"):
        profile_and_shape(odd, None)


@pytest.mark.parametrize(
    ("ratios", "name", "message"),
    [
        (np.full((1, 2, 36, 8), 1.5), "raw_ratio", "is damaged"),
        (np.full((1, 2, 36, 8), np.nan), "raw_ratio", "is damaged"),
        (np.full((36, 8), 0.5), "raw_ratio", "is damaged"),
        (np.full((1, 36, 8), 0.5), "other", "neither raw_ratio nor ratio_per_head"),
    ],
)
def test_damaged_files(tmp_path: Path, ratios: np.ndarray, name: str, message: str) -> None:
    with pytest.raises(TangramError, match=message):
        import_published(_published(tmp_path / "p.npz", ratios, name), shape_fingerprint("qwen3-4b"), "knorm")


@pytest.mark.parametrize("content", [None, b"", b"not an archive", b"PK\x03\x04 torn", "an array"])
def test_unreadable_files(tmp_path: Path, content: bytes | str | None) -> None:
    path = tmp_path / "p.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    with pytest.raises(TangramError, match="cannot be read"):
        import_published(path, shape_fingerprint("qwen3-4b"), "knorm")


def test_command(tmp_path: Path) -> None:
    path, out = _published(tmp_path / "p.npz"), tmp_path / "p.safetensors"
    result = CliRunner().invoke(app, ["bench", "profile", str(path), "qwen3-4b", "snapkv", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert str(model_folder("qwen3-4b")) in result.stdout
    assert RetentionProfile.load(out).scorer == "snapkv"
    refused = CliRunner().invoke(app, ["bench", "profile", str(path), "qwen3-4b", "best", "-o", str(out)])
    assert refused.exit_code == 2
    assert "unknown scorer 'best'" in refused.stderr
