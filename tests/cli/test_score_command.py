# SPDX-License-Identifier: Apache-2.0
"""``tangram score``: from a text to a file that fits its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.models import make_checkpoint
from typer.testing import CliRunner

from vllm_tangram.cli.app import app
from vllm_tangram.compression.document import DocumentScores
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.gates.documents import document_ids, read_document, score_document


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("place", ["system", "prompt"])
def test_scores_of_a_text(model: Path, tmp_path: Path, place: str) -> None:
    document, output = tmp_path / "rules.txt", tmp_path / "rules.safetensors"
    document.write_text("Answer briefly. " * 9)
    command = ["score", str(model), str(document), "-o", str(output), "--as", place]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    dense = DenseModel.load(model)
    ids = document_ids(dense.tokenizer, read_document(document, place))  # type: ignore[arg-type]
    scored, expected = DocumentScores.load(output), score_document(dense, ids, {})
    assert scored.ids.tolist() == ids
    assert (scored.scores == expected.scores).all()
    assert (scored.info["document"], scored.info["as"]) == ("rules.txt", place)
    assert (told["file"], told["tokens"], told["memory_bytes"]) == (str(output), len(ids), 2 * 3 * 2 * len(ids))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    for words in (f"tokens                                    {len(ids)}", "er briefly. '", "rules.txt"):
        assert words in result.stdout


def test_what_is_wrong_is_said_before_the_model_is_read(model: Path, tmp_path: Path) -> None:
    document = tmp_path / "rules.txt"
    document.write_text("a")
    for arguments, words in (
        ([str(tmp_path / "none.txt"), "-o", str(tmp_path / "o")], "cannot read the document"),
        ([str(document), "-o", str(tmp_path)], "--output"),
        ([str(document), "-o", str(tmp_path / "o"), "--as", "messages"], "not valid JSON"),
    ):
        result = CliRunner().invoke(app, ["score", "/no/model", *arguments])
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert words in result.stderr
    result = CliRunner().invoke(app, ["score", "/no/model", str(document), "-o", str(tmp_path / "o")])
    assert "/no/model is not a checkpoint folder" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rules.txt"]
