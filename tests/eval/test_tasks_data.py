# SPDX-License-Identifier: Apache-2.0
"""Tasks made from files: on small files of the same schemas, and on the real ones where they are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_tangram import TangramError
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.tasks import TASKS, Case, Request
from vllm_tangram.eval.tasks.likelihood import dialogue_cases
from vllm_tangram.eval.tasks.retrieval import line_cases, topic_cases

Make = Callable[[Request], Iterator[Case]]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lines_record(count: int) -> dict[str, str]:
    lines = "".join(f"line word-{i}: REGISTER_CONTENT is <{1000 + i}>\n" for i in range(count))
    return {"prompt": f"Now the record start:\n\n{lines}\nNow the record is over. Tell me the number in line word-3?"}


def topics_record(count: int) -> dict[str, str]:
    parts = [
        f"USER: I would like to discuss the topic of the history of subject {i}. \n ASSISTANT: {'Sure. ' * 30}\n "
        f"USER: Great, this is the end of our discussion on the history of subject {i}. "
        for i in range(count)
    ]
    return {"prompt": f"Now the record start. {''.join(parts)}Now the record ends. What is the first topic?"}


DIALOGUE = {
    "task": "GR",
    "id": 7,
    "history": [{"user": f"Question {i}?", "bot": f"Reply {i}: " + "well " * 20} for i in range(4)],
}


def test_lines_are_whole_and_asked_for(dense: DenseModel, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [lines_record(60)] * 3)
    cases = list(line_cases(Request(dense.tokenizer, 1000, 10, path)))
    assert [len(case.questions) for case in cases] == [4, 4, 2]
    assert cases[0].questions != cases[1].questions
    for case in cases:
        assert 950 < len(case.context) <= 1000
        context = dense.tokenizer.decode(case.context)
        assert context.endswith(">\n")
        assert "Tell me" not in context
        for question in case.questions:
            answer = dense.tokenizer.decode(question.answer)
            assert context.count(f"line {question.label}: REGISTER_CONTENT is{answer}\n") == 1
            assert dense.tokenizer.decode(question.prompt).endswith(
                f"<assistant>line {question.label}: REGISTER_CONTENT is"
            )


def test_topics_are_whole_and_asked_for(dense: DenseModel, tmp_path: Path) -> None:
    path = write(tmp_path / "topics.jsonl", [topics_record(6)] * 2)
    (case, _) = topic_cases(Request(dense.tokenizer, 1700, 6, path))
    context = dense.tokenizer.decode(case.context)
    assert context.count("I would like to discuss") == 4
    assert len(case.questions) == 4
    for question in case.questions:
        number = int(question.label.split()[1])
        assert dense.tokenizer.decode(question.answer) == f" the history of subject {number - 1}"


def test_last_reply_of_a_conversation(dense: DenseModel, tmp_path: Path) -> None:
    short = {**DIALOGUE, "history": DIALOGUE["history"][:2]}
    path = write(tmp_path / "dialogues.jsonl", [short, DIALOGUE, short])
    (case,) = dialogue_cases(Request(dense.tokenizer, 300, 1, path))
    (question,) = case.questions
    decode = dense.tokenizer.decode
    text = decode([*case.context, *question.prompt, *question.answer])
    turns = "".join(f"<user>{turn['user']}<assistant>{turn['bot']}" for turn in DIALOGUE["history"])
    assert text == turns
    assert decode(question.answer) == DIALOGUE["history"][-1]["bot"]
    assert decode(case.context).endswith("<user>")
    with pytest.raises(TangramError, match="has 1 conversations with a history of 300"):
        list(dialogue_cases(Request(dense.tokenizer, 300, 2, path)))


@pytest.mark.parametrize("name", ["lines", "topics", "dialogues"])
def test_needs_a_file(dense: DenseModel, name: str) -> None:
    with pytest.raises(TangramError, match="--data"):
        list(TASKS[name].cases(Request(dense.tokenizer, 500, 1)))


BROKEN = [
    ("lines", lines_record(60), "{", r"line 2: "),
    ("lines", lines_record(60), "[]", r"line 2: expected a JSON object"),
    ("lines", lines_record(60), '{"text": 1}', r'line 2: "prompt"'),
    ("lines", lines_record(60), '{"prompt": "nothing"}', r"line 2: this is no record of lines"),
    ("topics", topics_record(4), '{"prompt": "nothing"}', r"line 2: this is no record of topics"),
    ("dialogues", DIALOGUE, '{"history": []}', r'line 2: "history"'),
    ("dialogues", DIALOGUE, '{"history": [{"user": "a"}]}', r'line 2: "bot"'),
    ("kv", {"ordered_kv_records": [["a", "b"]] * 900}, '{"ordered_kv_records": [["a"]]}', "line 2: .ordered_kv"),
]


@pytest.mark.parametrize(("name", "good", "bad", "message"), BROKEN)
def test_names_the_broken_line(
    dense: DenseModel, tmp_path: Path, name: str, good: dict[str, Any], bad: str, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(good) + "\n" + bad + "\n")
    with pytest.raises(TangramError, match=rf"data\.jsonl, {message}"):
        list(TASKS[name].cases(Request(dense.tokenizer, 900, 8, path)))


def test_too_short_files(dense: DenseModel, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [lines_record(60)])
    with pytest.raises(TangramError, match="records for 4 questions"):
        list(line_cases(Request(dense.tokenizer, 1000, 5, path)))
    with pytest.raises(TangramError, match="ask for fewer"):
        list(line_cases(Request(dense.tokenizer, 10_000, 1, path)))
    with pytest.raises(TangramError, match="do not hold two"):
        list(line_cases(Request(dense.tokenizer, 100, 1, path)))
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes())[:-20])
    with pytest.raises(TangramError, match=r"--data: .*cannot be read"):
        list(line_cases(Request(dense.tokenizer, 1000, 40, packed)))


@pytest.fixture(scope="module")
def data() -> Path:
    for parent in Path(__file__).resolve().parents:
        if (parent / "shared" / "data" / "README.md").is_file():
            return parent / "shared" / "data"
    pytest.skip("there is no shared/data beside the repository")


@pytest.mark.parametrize(
    ("name", "file", "length"),
    [
        ("lines", "longeval_lines/200_lines.jsonl.gz", 4000),
        ("topics", "longeval_topics/5_topics.jsonl.gz", 9000),
        ("dialogues", "mtbench101/mtbench101.jsonl.gz", 2000),
        ("kv", "litm_kv/kv-retrieval-75_keys.jsonl.gz", 30),
        ("needle", "niah_pg_essays/essays.tar.gz", 4000),
        ("perplexity", "niah_pg_essays/essays.tar.gz", 4000),
    ],
)
def test_real_files(dense: DenseModel, data: Path, name: str, file: str, length: int) -> None:
    """Every record of 40 questions is read; what is asked for is in the context, but for free text."""
    cases = list(TASKS[name].cases(Request(dense.tokenizer, length, 40, data / file)))
    assert sum(len(case.questions) for case in cases) == 40
    for case in cases:
        context = dense.tokenizer.decode(case.context)
        for question in case.questions:
            assert question.answer
            if not TASKS[name].likelihood:
                assert dense.tokenizer.decode(question.answer).strip().strip('"') in context
