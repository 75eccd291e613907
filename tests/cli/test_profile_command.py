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
from vllm_tangram.pilot import MIN_CHARACTERS, Sample

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of ``make_profile``, which here measures nothing."""
    calls: list[dict[str, Any]] = []

    def make_profile(
        config: Any, model: str, options: dict[str, Any], samples: list[Sample], source: str, *, max_tokens: int
    ) -> RetentionProfile:
        calls.append({"model": model, "samples": samples, "source": source, "max_tokens": max_tokens, **options})
        kept = np.random.default_rng(0).uniform(size=(len(samples), 2, 4, 2)).astype(np.float32)
        return RetentionProfile(
            retentions=np.array([0.25, 0.5]),
            kept=np.sort(kept, axis=1),
            scorer=config.scorer,
            model={},
            sinks=config.sinks,
            window=config.window,
            chunk_size=config.chunk_size,
            domains=tuple(sample.domain for sample in samples),
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
    taken = [Sample(f"text {i}", "own") for i in range(4)]
    vllms = {"dtype": "auto", "tensor_parallel_size": 2}
    assert calls == [{"model": "some/model", "samples": taken, "source": "own.jsonl", "max_tokens": 2048, **vllms}]
    profile = RetentionProfile.load(output)
    assert (profile.scorer, profile.window) == ("knorm", 32)
    report = json.loads(result.stdout)
    assert (report["file"], report["layers"], report["kv_heads"], report["samples"]) == (str(output), 4, 2, 4)
    assert [row["retention"] for row in report["kept"]] == [0.25, 0.5]
    assert report["kept"][1]["max"] == pytest.approx(profile.mean[1].max())


def test_the_summary_says_what_is_next(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    output = tmp_path / "p.safetensors"
    result = CliRunner().invoke(app, ["profile", "some/model", "-o", str(output), "--num-samples", "2"])
    assert result.exit_code == 0, result.output
    assert calls[0]["source"] == "built-in pilot texts"
    assert [sample.domain for sample in calls[0]["samples"]] == ["prose", "code"]
    assert f"tangram inspect {output}" in result.stdout
    assert f"tangram serve some/model --profile {output}`" in result.stdout
    assert RetentionProfile.load(output).scorer == "keydiff"  # the model has no gate


def test_files_and_lines_are_domains_of_a_mixture(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    for name, lines in (
        ("mail", [{"text": f"mail {i}"} for i in range(9)]),
        ("tickets", [{"text": "ticket 0"}, {"text": "bug 0", "domain": "bugs"}, {"text": "ticket 1"}]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "p.safetensors"
    options = ["--samples", str(tmp_path / "mail.jsonl"), "--samples", str(tmp_path / "tickets.jsonl")]
    result = CliRunner().invoke(app, ["profile", "m", "-o", str(output), *options, "--num-samples", "5", "--json"])
    assert result.exit_code == 0, result.output
    assert [sample.text for sample in calls[0]["samples"]] == ["mail 0", "ticket 0", "bug 0", "mail 1", "ticket 1"]
    assert calls[0]["source"] == "mail.jsonl, tickets.jsonl"
    assert RetentionProfile.load(output).domains == ("mail", "tickets", "bugs", "mail", "tickets")
    report = json.loads(result.stdout)
    assert [(row["domain"], row["samples"]) for row in report["domains"]] == [("mail", 2), ("tickets", 2), ("bugs", 1)]
    assert report["warning"].startswith("pilot samples do not agree")  # they are random
    assert report["stability"][0]["between_domains"] < 0.8


@pytest.mark.parametrize("option", ["--max-tokens", "--chunk-size"])
def test_built_in_texts_are_as_long_as_asked_for(tmp_path: Path, calls: list[dict[str, Any]], option: str) -> None:
    options = ["--num-samples", "1", option, "8192"]
    result = CliRunner().invoke(app, ["profile", "some/model", "-o", str(tmp_path / "p"), *options])
    assert result.exit_code == 0, result.output
    assert calls[0]["max_tokens"] == 8192
    assert len(calls[0]["samples"][0].text) >= 4 * MIN_CHARACTERS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "no/such/folder/p"], "--output no/such/folder/p cannot be written: No such file"),
        (["-o", "."], "--output . is not a regular file"),
        (["-o", "/dev/null"], "--output /dev/null is not a regular file"),
        (["-o", "p", "--samples", "bad.jsonl"], "samples: bad.jsonl, line 2: not valid JSON"),
        (["-o", "p", "--scorer", "tarot"], "--scorer: unknown scorer 'tarot'"),
        (["-o", "p", "--max-tokens", "30"], "--max-tokens 30 leaves nothing to choose from"),
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
