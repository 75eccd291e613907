# SPDX-License-Identifier: Apache-2.0
"""Files of document scores: what comes back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.compression.documents import MODEL, random_scores

from vllm_tangram import TangramError
from vllm_tangram.compression.document import DocumentScores


def test_a_file_brings_everything_back(tmp_path: Path) -> None:
    scores, path = random_scores([7, 1, 0, 1]), tmp_path / "file.safetensors"
    scores.save(path)
    again = DocumentScores.load(path)
    assert again.ids.tolist() == [7, 1, 0, 1]
    assert torch.equal(again.scores, scores.scores)
    assert (again.model, again.recipe, again.info) == (MODEL, scores.recipe, scores.info)
    assert again.source == str(path)
    assert again.num_bytes == 2 * 2 * 3 * 4
    assert [file.name for file in tmp_path.iterdir()] == ["file.safetensors"]


def test_a_part_is_what_a_rank_holds() -> None:
    scores = random_scores([7, 1, 0, 1])
    part = scores.part(slice(1, 2), slice(0, 2), "cpu")
    assert torch.equal(part.scores, scores.scores[1:2, 0:2])
    assert part.num_bytes == 2 * 2 * 4
    assert part.ids is scores.ids


def test_check_names_what_differs() -> None:
    scores = replace(random_scores([1, 2]), source="file")
    scores.check(model=MODEL)
    scores.check(model=MODEL | {"weights": None})
    with pytest.raises(TangramError, match=r"--document-scores: file does not fit \(weights: .*tangram score"):
        scores.check(model=MODEL | {"weights": "xyz"})
    with pytest.raises(TangramError, match=r"num_key_value_heads: the scores are for 3, served 4\)"):
        scores.check(model=MODEL | {"num_key_value_heads": 4})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.array([1, 2, 3], np.int32)}, "scores 2 tokens and names 3"),
        ({"ids": np.array([[1], [2]], np.int32)}, r"ids are \[2, 1\]"),
        ({"ids": np.array([1, -2], np.int32)}, "negative token ids"),
        ({"ids": np.array([1, 2], np.int64)}, "types torch.float16 and int64"),
        ({"scores": torch.zeros(2, 3, 2)}, "types torch.float32 and int32"),
        ({"scores": torch.zeros(3, 2).half()}, r"scores \[3, 2\], not \[L, H, T\]"),
        ({"scores": torch.full((2, 3, 2), float("nan")).half()}, "not finite"),
        ({"scores": torch.zeros(2, 3, 0).half(), "ids": np.zeros(0, np.int32)}, "not"),
    ],
)
def test_what_cannot_be_scores_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TangramError, match=f"document scores .* is damaged: .*{message}.*tangram score"):
        replace(random_scores([1, 2]), **change)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TangramError, match=r"--document-scores: there is no file .*/none"):
        DocumentScores.load(tmp_path / "none")
    path = tmp_path / "file"
    torch.save({"scores": torch.zeros(2, 3, 2).half(), "ids": torch.zeros(2).int()}, path)  # a pickle
    with pytest.raises(TangramError, match=r"document scores .*/file cannot be read"):
        DocumentScores.load(path)
    tensors = {"scores": torch.zeros(2, 3, 2).half(), "ids": torch.zeros(2).int()}
    save_file(tensors, path)
    with pytest.raises(TangramError, match="is not a file of document scores; make one with `tangram score`"):
        DocumentScores.load(path)
    header: dict[str, Any] = {"format_version": 1, "model": MODEL, "recipe": {}}
    save_file(tensors, path, metadata={"tangram_document": json.dumps(header)})
    with pytest.raises(TangramError, match="lacks 'info'"):
        DocumentScores.load(path)
    save_file(tensors, path, metadata={"tangram_document": json.dumps(header | {"format_version": 2})})
    with pytest.raises(TangramError, match="format version 2, this vllm-tangram reads version 1"):
        DocumentScores.load(path)
