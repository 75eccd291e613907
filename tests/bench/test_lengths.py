# SPDX-License-Identifier: Apache-2.0
"""Pieces of one pass are scored as chunks that the model reads one by one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models import make_checkpoint
from typer.testing import CliRunner

from vllm_tangram.bench.lengths import Piece, measure_lengths, pieces_of
from vllm_tangram.cli.app import app
from vllm_tangram.compression import get_scorer
from vllm_tangram.compression.competition import compete
from vllm_tangram.config import TangramConfig
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.pilot import Sample, pilot_samples

CONFIG = TangramConfig(sinks=4, window=16, page_group_size=1, retention=0.25)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def dense(checkpoint: Path) -> DenseModel:
    return DenseModel.load(checkpoint, dtype=torch.float32)


def test_pieces() -> None:
    found = pieces_of([512, 256, 1024], 512)
    assert found == [Piece(0, 512), Piece(0, 256), Piece(0, 1024), Piece(512, 1024)]
    for lengths in ([100, 512], [512, 1000]):
        with pytest.raises(TangramError, match="--lengths"):
            pieces_of(lengths, 512)


@pytest.mark.parametrize("name", ["keydiff", "snapkv", "expected_attention"])
def test_pieces_are_scored_as_chunks(dense: DenseModel, name: str) -> None:
    samples = pilot_samples(2)
    scorer = get_scorer(name)
    found, _ = measure_lengths(dense, [scorer], samples, pieces_of([256, 768], 256), CONFIG)[name]
    assert [(effect.piece.start, effect.piece.stop) for effect in found] == [(0, 256), (0, 768), (256, 512), (512, 768)]

    wanted: dict[int, list[np.ndarray]] = {0: [], 256: [], 512: []}
    for sample in samples:
        ids, state = dense.tokenizer.encode(sample.text)[:768], dense.empty()
        for start, kept in wanted.items():
            read = dense.read(ids[start : start + 256], [scorer], sinks=4, window=16, after=state)
            counts = compete(read.scores[name], [0.25], protect_head=0 if start else 4, protect_tail=16)
            kept.append(counts.numpy().ravel() / 256)
            state = read.state
    means = {start: np.mean(kept, axis=0) for start, kept in wanted.items()}
    for effect in (found[0], found[2], found[3]):
        moved = np.abs(means[effect.piece.start] - means[0]).sum() / 2 / means[0].sum()
        assert effect.moved == pytest.approx(moved, abs=1e-3)  # rounding may swap a token
    assert found[0].rank_correlation == pytest.approx(1)
    assert found[0].clipped == found[0].clipped_own


def test_what_cannot_be_measured(dense: DenseModel) -> None:
    with pytest.raises(TangramError, match="8192 tokens are more than the 4096"):
        measure_lengths(dense, [get_scorer("knorm")], pilot_samples(1), [Piece(0, 8192)], CONFIG)
    with pytest.raises(TangramError, match="text 1 has 5 tokens, 256 are needed"):
        measure_lengths(dense, [get_scorer("knorm")], [Sample("short", "prose")], [Piece(0, 256)], CONFIG)


def test_command(checkpoint: Path) -> None:
    options = ["--scorer", "knorm", "--lengths", "512,1024", "--chunk-size", "512", "--num-samples", "2"]
    result = CliRunner().invoke(app, ["bench", "lengths", str(checkpoint), *options, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["piece"]["stop"] for row in report["scorers"]["knorm"]["pieces"]] == [512, 1024, 1024]
    result = CliRunner().invoke(app, ["bench", "lengths", str(checkpoint), *options])
    assert "512 to 1k" in result.stdout
    refused = CliRunner().invoke(app, ["bench", "lengths", str(checkpoint), "--lengths", "many"])
    assert (refused.exit_code, "--lengths: 'many'" in refused.stderr) == (2, True)
    unknown = CliRunner().invoke(app, ["bench", "lengths", str(checkpoint), "--scorer", "best"])
    assert (unknown.exit_code, "--scorer: unknown scorer 'best'" in unknown.stderr) == (2, True)
