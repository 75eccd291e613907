# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_tangram.budget import RetentionProfile
from vllm_tangram.cli.app import app

LAYERS, HEADS, HEAD_DIM = 6, 3, 64


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four samples that agree on which heads matter, with budgets from a few per cent to nearly all."""
    rng = np.random.default_rng(0)
    retentions = np.array([0.1, 0.25, 0.5])
    weight = rng.gamma(0.6, size=(LAYERS, HEADS))
    kept = retentions[:, None, None] * weight / weight.mean()
    kept = np.clip(kept * rng.uniform(0.9, 1.1, size=(4, 1, LAYERS, HEADS)), 0.01, 1)
    path = tmp_path_factory.mktemp("profile") / "p.safetensors"
    RetentionProfile(
        retentions=retentions,
        kept=kept.astype(np.float32),
        scorer="snapkv",
        model={"architectures": ["LlamaForCausalLM"], "head_dim": HEAD_DIM},
        sinks=4,
        window=64,
        chunk_size=2048,
        info={"date": "2026-01-02"},
    ).save(path)
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def report(*arguments: object) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_json(profile: Path) -> None:
    found = report(profile, "--tokens", "1k,4096", "--tokens", "64k")
    assert [prompt["tokens"] for prompt in found["prompts"]] == [1024, 4096, 65536]
    assert (found["scorer"], found["samples"], found["groups"]) == ("snapkv", 4, 5)
    assert found["budgets"]["spread"] == pytest.approx(found["budgets"]["max"] / found["budgets"]["min"])
    over = found["over_allocation"]
    assert 1 <= over["global"] < over["layer"]
    assert over["global"] < over["neighbours"]
    by_ranks = found["over_allocation_by_tensor_parallel_size"]
    assert list(by_ranks) == [str(size) for size in range(1, HEADS + 1) if HEADS % size == 0]
    assert over["global"] == by_ranks["1"] <= by_ranks[str(HEADS)]
    assert all(0.8 < row["rank_correlation"] <= 1 for row in found["stability"])
    for prompt in found["prompts"]:
        assert prompt["full_bytes"] == LAYERS * HEADS * prompt["tokens"] * 2 * HEAD_DIM * 2
        assert prompt["bytes"] == prompt["pages"] * 4 * 32 * 2 * HEAD_DIM * 2
        assert prompt["fraction"] == pytest.approx(prompt["bytes"] / prompt["full_bytes"])
    assert found["prompts"][-1]["promise"] == 0.25


@pytest.mark.parametrize("retention", [0.05, 0.25, 0.6, 1])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_promise_is_kept(profile: Path, retention: float, size: int) -> None:
    """At chunk ends, one token and one block beside them, and at lengths that fit nothing."""
    lengths = "1,31,33,68,69,500,2047,2048,2049,2080,3000,4096,4200,10000,65536,65600"
    found = report(profile, "--retention", retention, "--page-group-size", size, "--tokens", lengths)
    for prompt in found["prompts"]:
        assert prompt["fraction"] <= prompt["promise"] + 1e-9, prompt
    long = next(prompt for prompt in found["prompts"] if prompt["tokens"] == 65536)
    padding = found["groups"] * size / (LAYERS * HEADS)
    assert long["promise"] == pytest.approx(padding if retention == 1 else retention)


def test_margin_on_top_promises_nothing(profile: Path) -> None:
    inside, on_top = (report(profile, "--margin", margin)["prompts"][-1] for margin in ("inside", "on_top"))
    assert on_top["promise"] is None
    assert on_top["fraction"] > inside["fraction"]


def test_text(profile: Path) -> None:
    code, out, _ = run(profile, "--retention", 0.5, "--grouping", "layer")
    assert code == 0
    for part in ("snapkv", "LlamaForCausalLM", "2026-01-02", "retention 0.5", "64k", "6 layers of 3 KV heads"):
        assert part in out
    assert "nan" not in out


def test_one_sample_of_an_unknown_model(profile: Path, tmp_path: Path) -> None:
    known = RetentionProfile.load(profile)
    path = tmp_path / "one.safetensors"
    RetentionProfile(known.retentions, known.kept[:1], "snapkv", {}, 4, 64, 2048).save(path)
    found = report(path)
    assert found["prompts"][0]["bytes"] is None
    assert found["stability"][0]["rank_correlation"] is None
    assert found["warning"] is None
    assert run(path)[0] == 0


def test_domains_and_what_is_clipped(profile: Path, tmp_path: Path) -> None:
    """Two domains that want the opposite: each is clipped, the more so the other's budgets alone."""
    known = RetentionProfile.load(profile)
    kept = known.kept.copy()
    kept[2:] = kept[2:, :, ::-1, ::-1]
    path = tmp_path / "two.safetensors"
    replace(known, kept=kept, domains=("code", "code", "mail", "mail")).save(path)
    found = report(path)
    assert [row["domain"] for row in found["domains"]] == ["code", "mail"]
    for row in found["domains"]:
        assert report(profile)["domains"][0]["clipped"] < row["clipped"] < row["clipped_unseen"] < 1
    assert found["stability"][1]["least_alike"] == ["code", "mail"]
    assert "between code and mail" in found["warning"]
    code, out, _ = run(path)
    assert (code, "warning: pilot samples do not agree" in out) == (0, True)
    assert report(profile)["warning"] is None
    assert "warning" not in run(profile)[1]
    assert report(path, "--retention", 1)["domains"][0]["clipped"] == 0


def test_plot(profile: Path, tmp_path: Path) -> None:
    png = tmp_path / "p.png"
    assert report(profile, "--plot", png)["plot"] == str(png)
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"Picture: {png}" in run(profile, "--tokens", 64, "--plot", png)[1].replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "four"], "--tokens: 'four' is no number; give some such as 4096,16k"),
        (["--tokens", "0"], "--tokens: '0'"),
        (["--tokens", "1k,,2k"], "--tokens: '1k,,2k' names nothing, or has one comma too many"),
        (["--retention", "1.5"], "--retention: "),
        (["--page-group-size", "19"], "--page-group-size must be from 1 to 18"),
        (["--block-size", "48"], "must be a multiple of --block-size (48)"),
        (["--plot", "/no/such/folder/p.png"], "--plot: /no/such/folder/p.png cannot be written"),
    ],
)
def test_errors(profile: Path, arguments: list[str], message: str) -> None:
    code, out, err = run(profile, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


def test_missing_and_damaged_file(profile: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "none")[0] == 2
    (tmp_path / "half").write_bytes(profile.read_bytes()[:100])
    code, out, err = run(tmp_path / "half")
    assert (code, out) == (2, "")
    assert "half" in err
