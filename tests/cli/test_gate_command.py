# SPDX-License-Identifier: Apache-2.0
"""``tangram gate``: from texts to a gate and its card, and what is refused before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.gates.test_convert import published
from tests.models import make_checkpoint
from typer.testing import CliRunner

from vllm_tangram.cli.app import app
from vllm_tangram.compression.gate import Gate
from vllm_tangram.compression.shipped import known_gate

QUICK = ["--texts", "10", "--tokens", "64", "--steps", "3", "--batch", "32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose shapes are those of the published gate of the tests."""
    options = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 4}
    return make_checkpoint(tmp_path_factory.mktemp("wide"), **options)


def test_train_and_show(model: Path, tmp_path: Path) -> None:
    data, output = tmp_path / "own.jsonl", tmp_path / "gate.safetensors"
    data.write_text("".join(json.dumps({"text": f"text {i} " + "abc " * i + "x" * 60}) + "\n" for i in range(12)))
    command = ["gate", "train", str(model), "-o", str(output), "--data", str(data), *QUICK]
    result = CliRunner().invoke(app, [*command, "--half", "--json"])
    assert result.exit_code == 0, result.output
    card = json.loads(result.stdout)
    assert (card["file"], card["layers"], card["kv_heads"]) == (str(output), 3, 2)
    assert (card["recipe"]["data"], card["recipe"]["texts"], card["recipe"]["steps"]) == ("own.jsonl", 9, 3)
    assert card["digest"] == Gate.load(output).digest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate.safetensors", "own.jsonl"]
    shown = CliRunner().invoke(app, ["gate", "show", str(output)])
    assert shown.exit_code == 0, shown.output
    for word in ("3 layers of 2 KV heads", "LlamaForCausalLM", "own.jsonl", "keydiff", card["digest"][:16]):
        assert word in shown.stdout
    assert json.loads(CliRunner().invoke(app, ["gate", "show", str(output), "--json"]).stdout) == card


def test_built_in_texts_and_a_kept_work_folder(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "gate.safetensors"
    command = ["gate", "train", str(model), "-o", str(output), *QUICK, "--keep-work"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "built-in training texts" in result.stdout
    work = tmp_path / "gate.safetensors.work"
    assert len(list(work.glob("text-*"))) == 10
    before = output.read_bytes()
    assert CliRunner().invoke(app, command).exit_code == 0  # from the folder
    assert output.read_bytes() == before


def test_an_interrupt_says_how_to_go_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    output = tmp_path / "gate.safetensors"
    command = ["gate", "train", str(model), "-o", str(output), *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr("vllm_tangram.gates.make.train_layer", interrupt)
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 130
    assert f"the same command continues with what is in {output}.work" in result.stderr
    assert not output.exists()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["gate.safetensors"]


def test_a_folder_with_something_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    work, output = tmp_path / "thesis", tmp_path / "gate.safetensors"
    work.mkdir()
    (work / "chapter-1.txt").write_text("a year of work")
    command = ["gate", "train", str(model), "-o", str(output), *QUICK, "--work", str(work)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "holds something else" in result.stderr
    assert [path.name for path in work.iterdir()] == ["chapter-1.txt"]


def test_without_a_name_it_goes_where_engines_look(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(app, ["gate", "train", str(model), *QUICK])
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "cache" / "gates").iterdir()
    assert path.name.startswith(f"{model.name}-")
    assert known_gate(Gate.load(path).model) == path


def test_convert(wide: Path, tmp_path: Path) -> None:
    torch.save(published(), tmp_path / "gate.pt")
    output = tmp_path / "gate.safetensors"
    command = ["gate", "convert", str(tmp_path / "gate.pt"), "-o", str(output), "--model", str(wide)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "gate.pt" in result.stdout
    assert Gate.load(output).hidden_size == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "no/such/folder/g"], "--output no/such/folder/g cannot be written: No such file"),
        (["-o", "."], "--output . is not a regular file"),
        (["-o", "g", "--data", "bad.jsonl"], "samples: bad.jsonl, line 2: not valid JSON"),
        (["-o", "g", "--data", "few.jsonl"], "1 texts are too few to train a gate"),
        (["-o", "g", "--device", "cuda:9"], "--device cuda:9 cannot be used"),
    ],
)
def test_refused_before_anything_is_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text":\n')
    Path("few.jsonl").write_text('{"text": "fine, and long enough"}\n')
    result = CliRunner().invoke(app, ["gate", "train", str(model), *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {message}" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "few.jsonl"]


def test_files_and_models_that_are_none(model: Path, wide: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (["show", str(tmp_path / "none")], "there is no gate"),
        (["train", str(tmp_path), "-o", str(tmp_path / "g")], "is not a checkpoint folder"),
        (["convert", str(tmp_path / "n.pt"), "-o", str(tmp_path / "g"), "--model", str(model)], "there is no file"),
    ):
        result = CliRunner().invoke(app, ["gate", *arguments])
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert list(tmp_path.iterdir()) == []
