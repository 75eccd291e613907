# SPDX-License-Identifier: Apache-2.0
"""Tasks that need no data: what is asked is told, once, and contexts measure what they should."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import get_args

import pytest

from vllm_tangram import TangramError
from vllm_tangram.cli.evaluate import TaskName
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.tasks import TASKS, Case, Question, Request, check_lengths
from vllm_tangram.eval.tasks.kv import kv_cases, kv_records
from vllm_tangram.eval.tasks.likelihood import CONTINUATION, perplexity_cases
from vllm_tangram.eval.tasks.manyshot import manyshot_cases
from vllm_tangram.eval.tasks.needles import haystack, multi_key_cases, multi_value_cases, needle_cases


@pytest.fixture
def grass(tmp_path: Path) -> Path:
    path = tmp_path / "grass.txt"
    path.write_text("grass " * 400)
    return path


def test_the_command_names_all_tasks() -> None:
    assert set(get_args(TaskName)) == TASKS.keys()


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.exact])
def test_exact_and_repeatable(dense: DenseModel, name: str) -> None:
    request = Request(dense.tokenizer, 1500, 9)
    cases = list(TASKS[name].cases(request))
    assert {len(case.context) for case in cases} == {1500}
    assert sum(len(case.questions) for case in cases) == 9
    assert all(len({question.label for question in case.questions}) == len(case.questions) for case in cases)
    assert cases == list(TASKS[name].cases(request))
    assert cases != list(TASKS[name].cases(replace(request, seed=1)))
    with pytest.raises(TangramError, match="--lengths"):
        list(TASKS[name].cases(replace(request, length=20 if name != "perplexity" else 10**7)))


def test_needle_is_told_once_and_asked_for(dense: DenseModel, grass: Path) -> None:
    positions = []
    for case in needle_cases(Request(dense.tokenizer, 1500, 10, grass)):
        (question,) = case.questions
        context, prompt, answer = map(dense.tokenizer.decode, (case.context, question.prompt, question.answer))
        place = prompt.split("access code of ")[1].split("?")[0]
        assert prompt == f"\n\nWhat is the access code of {place}?<assistant>The access code of {place} is"
        assert context.startswith("<user>")
        assert context.count(f"The access code of {place} is{answer}.") == 1
        assert answer.strip().isdecimal()
        positions.append(context.index("The access code"))
    assert positions == sorted(positions)
    assert positions[0] < 200
    assert positions[-1] > 1300


def test_needle_needs_room(dense: DenseModel, grass: Path) -> None:
    with pytest.raises(TangramError, match="--lengths"):
        list(needle_cases(Request(dense.tokenizer, 5000, 1, grass)))


def test_keys_and_values_are_told_and_spread(dense: DenseModel, grass: Path) -> None:
    decode = dense.tokenizer.decode
    for case in multi_key_cases(Request(dense.tokenizer, 2000, 8, grass)):
        context = decode(case.context)
        found = []
        for question in case.questions:
            place = question.label.split(" at ")[0]
            assert context.count(f"The access code of {place} is{decode(question.answer)}.") == 1
            found.append(context.index(f"of {place} is"))
        assert found == sorted(found)
        assert [position * 4 // 2000 for position in found] == [0, 1, 2, 3]
    for case in multi_value_cases(Request(dense.tokenizer, 2000, 4, grass)):
        context = decode(case.context)
        assert context.count("access code") == 6
        for question in case.questions:
            told = [part.split(".")[0] for part in context.split(f"One access code of {question.label} is ")[1:]]
            assert decode(question.answer) == f" {told[0]}, {told[1]} and {told[2]}"


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
    cases = list(kv_cases(Request(tokenizer, 12, 6)))
    assert [len(case.questions) for case in cases] == [4, 2]
    for case in cases:
        context = tokenizer.decode(case.context)
        pairs = dict(line.replace('"', "").split(": ") for line in context.splitlines() if line.startswith('"'))
        assert len(pairs) == 12
        for question in case.questions:
            assert tokenizer.decode(question.answer) == f' "{pairs[question.label]}'
            assert tokenizer.decode(question.prompt).endswith(f'<assistant>"{question.label}":')
    assert cases == list(kv_cases(Request(tokenizer, 12, 6)))


def test_kv_records_of_a_file(dense: DenseModel, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl.gz"
    record = {"ordered_kv_records": [[f"k{i}", f"v{i}"] for i in range(5)]}
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(record) + "\n" + json.dumps(record))
    assert list(kv_records(path, 2)) == [[("k0", "v0"), ("k1", "v1")]] * 2
    with pytest.raises(TangramError, match="line 1 has 5 pairs"):
        list(kv_records(path, 6))
    assert len(list(kv_cases(Request(dense.tokenizer, 5, 8, path)))) == 2
    with pytest.raises(TangramError, match="has 2 records, --samples 9 needs 3"):
        list(kv_cases(Request(dense.tokenizer, 5, 9, path)))
    (tmp_path / "text").write_text("x")
    for name in ("text", "missing"):
        with pytest.raises(TangramError, match="--data"):
            list(islice(kv_records(tmp_path / name, 2), 1))


def test_manyshot_labels_follow_from_the_examples(dense: DenseModel) -> None:
    decode = dense.tokenizer.decode
    kinds = {}
    for case in manyshot_cases(Request(dense.tokenizer, 3000, 8)):
        context = decode(case.context)
        examples = [part.split("\nLabel: ") for part in context.split("Sentence: ")[1:]]
        shown = {sentence: label.strip() for sentence, label in examples}
        labels = set(shown.values())
        assert len(labels) == 6
        counts = [list(shown.values()).count(label) for label in labels]
        assert len(examples) > 30
        assert max(counts) <= 2 * min(counts)
        for question in case.questions:
            word, label = question.label.split(": ")
            assert decode(question.answer) == f" {label}"
            assert label in labels
            sentence = decode(question.prompt).removeprefix("\nSentence: ").removesuffix("\nLabel:")
            assert word in sentence
            assert sentence not in shown
            assert {own for text, own in shown.items() if re.search(rf"\b{word}\b", text)} == {label}
            kinds.setdefault(word, set()).add(label)
    assert len(kinds) > 4


def test_perplexity_continues_the_text(dense: DenseModel) -> None:
    text = "\n\n".join(haystack(None))
    for case in perplexity_cases(Request(dense.tokenizer, 700, 3)):
        (question,) = case.questions
        assert question.prompt == ()
        assert len(question.answer) == CONTINUATION
        assert dense.tokenizer.decode([*case.context, *question.answer]) in text


def test_too_long_for_the_model() -> None:
    case = Case((1,) * 90, (Question("short", (1,), (1,)), Question("long", (1,) * 5, (1,) * 6)))
    check_lengths([case], 101)
    check_lengths([case], None)
    with pytest.raises(TangramError, match=r"has 101 tokens.* takes 100"):
        check_lengths([case], 100)
