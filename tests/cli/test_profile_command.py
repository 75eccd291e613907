# SPDX-License-Identifier: Apache-2.0
"""``tangram profile``: what is refused before an engine starts, and what is reported after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_tangram import RetentionProfile
from vllm_tangram.cli.app import app

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of ``make_profile``, which here measures nothing."""
    calls: list[dict[str, Any]] = []

    def make_profile(
        config: Any, model: str, options: dict[str, Any], texts: list[str], source: str, *, max_tokens: int
    ) -> RetentionProfile:
        calls.append({"model": model, "texts": texts, "source": source, "max_tokens": max_tokens, **options})
        kept = np.random.default_rng(0).uniform(size=(3, 2, 4, 2)).astype(np.float32)
        return RetentionProfile(
            retentions=np.array([0.25, 0.5]),
            kept=np.sort(kept, axis=1),
            scorer=config.scorer,
            model={},
            sinks=config.sinks,
            window=config.window,
            chunk_size=config.chunk_size,
            info={"samples": source},
        )

    monkeypatch.setattr("vllm_tangram.engine.resolve.make_profile", make_profile)
    monkeypatch.setattr("vllm_tangram.engine.resolve.model_identity", lambda *_: {"num_hidden_layers": -1})
    return calls


def test_profile_is_written_and_summed_up(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    samples, output = tmp_path / "own.jsonl", tmp_path / "p.safetensors"
    samples.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(5)))
    options = ["--samples", str(samples), "--num-samples", "4", "--scorer", "knorm", "--window", "32", "--json"]
    options += ["-tp", "2"]
    result = CliRunner().invoke(app, ["profile", "some/model", "-o", str(output), *options])
    assert result.exit_code == 0, result.output
    texts = [f"text {i}" for i in range(4)]
    vllms = {"dtype": "auto", "tensor_parallel_size": 2}
    assert calls == [{"model": "some/model", "texts": texts, "source": "own.jsonl", "max_tokens": 2048, **vllms}]
    profile = RetentionProfile.load(output)
    assert (profile.scorer, profile.window) == ("knorm", 32)
    report = json.loads(result.stdout)
    assert (report["file"], report["layers"], report["kv_heads"], report["samples"]) == (str(output), 4, 2, 3)
    assert [row["retention"] for row in report["kept"]] == [0.25, 0.5]
    assert report["kept"][1]["max"] == pytest.approx(profile.mean[1].max())


def test_the_summary_says_what_is_next(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    output = tmp_path / "p.safetensors"
    result = CliRunner().invoke(app, ["profile", "some/model", "-o", str(output), "--num-samples", "2"])
    assert result.exit_code == 0, result.output
    assert calls[0]["source"] == "built-in pilot texts"
    assert len(calls[0]["texts"]) == 2
    assert f"tangram inspect {output}" in result.stdout
    assert f"tangram serve some/model --profile {output}`" in result.stdout
    assert RetentionProfile.load(output).scorer == "keydiff"  # the model has no gate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "no/such/folder/p"], "--output no/such/folder/p cannot be written: No such file"),
        (["-o", "."], "--output . is not a regular file"),
        (["-o", "/dev/null"], "--output /dev/null is not a regular file"),
        (["-o", "p", "--samples", "bad.jsonl"], "bad.jsonl, line 2: not valid JSON"),
        (["-o", "p", "--scorer", "tarot"], "--scorer: unknown scorer 'tarot'"),
        (["-o", "p", "--max-tokens", "100"], "--max-tokens 100 leaves nothing to choose from"),
    ],
)
def test_refused_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]], options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text":\n')
    result = CliRunner().invoke(app, ["profile", "some/model", *options])
    assert (result.exit_code, result.stdout, calls) == (2, "", [])
    assert result.stderr.startswith(f"error: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]
