# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import itertools
import json
import tarfile
from pathlib import Path

import pytest

from vllm_tangram import TangramError
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.tasks import haystack, kv_cases, kv_records, needle_cases


def test_needle_is_told_once_and_asked_for(dense: DenseModel) -> None:
    tokenizer = dense.tokenizer
    cases = list(needle_cases(tokenizer, 1500, 10, ["grass " * 400]))
    positions = []
    for case in cases:
        assert len(case.context) == 1500
        (question,) = case.questions
        context, prompt, answer = map(tokenizer.decode, (case.context, question.prompt, question.answer))
        place = prompt.split("access code of ")[1].split("?")[0]
        assert prompt == f"\n\nWhat is the access code of {place}?<assistant>The access code of {place} is"
        assert context.startswith("<user>")
        assert context.count(f"The access code of {place} is{answer}.") == 1
        assert answer.strip().isdecimal()
        positions.append(context.index("The access code"))
    assert positions == sorted(positions)
    assert positions[0] < 200
    assert positions[-1] > 1300
    assert cases == list(needle_cases(tokenizer, 1500, 10, ["grass " * 400]))
    assert cases != list(needle_cases(tokenizer, 1500, 10, ["grass " * 400], seed=1))


@pytest.mark.parametrize("length", [20, 5000])
def test_needle_needs_room(dense: DenseModel, length: int) -> None:
    with pytest.raises(TangramError, match="--lengths"):
        list(needle_cases(dense.tokenizer, length, 1, ["grass " * 400]))


def test_haystack(tmp_path: Path) -> None:
    assert sum(map(len, haystack(None))) > 100_000
    for name, text in (("b.txt", "second"), ("a.txt", "first")):
        (tmp_path / name).write_text(text)
    assert haystack(tmp_path) == ["first", "second"]
    assert haystack(tmp_path / "b.txt") == ["second"]
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as archive:
        for name in ("b.txt", "a.txt"):
            archive.add(tmp_path / name, arcname=name)
    assert haystack(tmp_path / "t.tar.gz") == ["first", "second"]
    (tmp_path / "broken.tar.gz").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("broken.tar.gz", "missing.txt", "empty"):
        with pytest.raises(TangramError, match="--data"):
            haystack(tmp_path / name)


def test_kv_asks_for_values_of_the_context(dense: DenseModel) -> None:
    tokenizer = dense.tokenizer
    cases = list(kv_cases(tokenizer, kv_records(None, 12), 6))
    assert [len(case.questions) for case in cases] == [4, 2]
    for case in cases:
        context = tokenizer.decode(case.context)
        pairs = dict(line.replace('"', "").split(": ") for line in context.splitlines() if line.startswith('"'))
        assert len(pairs) == 12
        for question in case.questions:
            assert tokenizer.decode(question.answer) == f' "{pairs[question.label]}'
            assert tokenizer.decode(question.prompt).endswith(f'<assistant>"{question.label}":')
    assert cases == list(kv_cases(tokenizer, kv_records(None, 12), 6))


def test_kv_records_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl.gz"
    record = {"ordered_kv_records": [[f"k{i}", f"v{i}"] for i in range(5)]}
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(record) + "\n" + json.dumps(record))
    assert list(kv_records(path, 2)) == [[("k0", "v0"), ("k1", "v1")]] * 2
    with pytest.raises(TangramError, match="has 5 pairs"):
        list(kv_records(path, 6))
    (tmp_path / "text").write_text("x")
    for name in ("text", "missing"):
        with pytest.raises(TangramError, match="--data"):
            list(itertools.islice(kv_records(tmp_path / name, 2), 1))
