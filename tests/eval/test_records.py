# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_tangram import TangramError
from vllm_tangram.eval.records import WorkFile, digest_of_cases
from vllm_tangram.eval.run import Answer
from vllm_tangram.eval.settings import REFERENCE, Setting
from vllm_tangram.eval.tasks import Case, Question

SETUP = {"model": {"layers": 3, "weights": None}, "settings": ("a", "b")}


def answers(case: int) -> list[Answer]:
    found = [REFERENCE, Setting("knorm", "dynamic", 0.25, 0.0, "on_top", 8)]
    return [Answer(512, case, "q", setting, 0.1, 0.3, 5, 4, -1 / 3) for setting in found]


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    first = WorkFile(path, SETUP)
    assert first.done == {}
    first.add(512, 1, answers(1))
    first.add(512, 0, answers(0))
    again = WorkFile(path, SETUP)
    assert again.done == first.done == {(512, 0, ""): answers(0), (512, 1, ""): answers(1)}
    assert again.answers == answers(0) + answers(1)
    again.add(64, 0, answers(5))
    assert len(WorkFile(path, SETUP).done) == 3
    assert len(path.read_text().splitlines()) == 4


def test_parts_come_in_the_order_in_which_they_were_asked(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    work = WorkFile(path, SETUP)
    for case, part in ((1, "z"), (0, "z"), (1, "a"), (0, "a")):
        work.add(512, case, answers(case)[part == "a" :][:1], part)
    assert [answer.setting for answer in WorkFile(path, SETUP).answers] == [a.setting for a in answers(0)] * 2


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_torn_line_is_asked_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "work.jsonl"
    work = WorkFile(path, SETUP)
    work.add(512, 0, answers(0))
    whole = path.read_bytes()
    work.add(512, 1, answers(1))
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    again = WorkFile(path, SETUP)
    assert set(again.done) == {(512, 0, "")}
    assert path.read_bytes() == whole
    again.add(512, 1, answers(1))
    assert set(WorkFile(path, SETUP).done) == {(512, 0, ""), (512, 1, "")}


def test_a_torn_first_line_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    WorkFile(path, SETUP)
    whole = path.read_bytes()
    for cut in (0, 5, 30):
        path.write_bytes(whole[:cut])
        assert WorkFile(path, SETUP).done == {}
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ({**SETUP, "model": {"layers": 4, "weights": None}}, r"model: .*3.* there, .*4.* here"),
        ({**SETUP, "settings": ["a"]}, "settings"),
        ({**SETUP, "seed": 1}, "seed: null there, 1 here"),
    ],
)
def test_does_not_mix_runs(tmp_path: Path, setup: dict[str, object], message: str) -> None:
    path = tmp_path / "work.jsonl"
    WorkFile(path, SETUP).add(512, 0, answers(0))
    before = path.read_bytes()
    with pytest.raises(TangramError, match=message):
        WorkFile(path, setup)
    assert path.read_bytes() == before


def test_leaves_other_files_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no end of line")
    with pytest.raises(TangramError, match="is no work file"):
        WorkFile(path, SETUP)
    assert path.read_text() == "no end of line"
    with pytest.raises(TangramError, match="cannot write"):
        WorkFile(tmp_path / "missing" / "work.jsonl", SETUP)


def test_names_the_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    work = WorkFile(path, SETUP)
    work.add(512, 0, answers(0))
    header, line = path.read_text().splitlines()
    record = json.loads(line)
    del record["answers"][0]["hits"]
    path.write_text(f"{header}\n{line}\n{json.dumps(record)}\n")
    with pytest.raises(TangramError, match="line 3 is damaged"):
        WorkFile(path, SETUP)


def test_digest_tells_cases_apart() -> None:
    def digest(context: tuple[int, ...], prompt: tuple[int, ...], answer: tuple[int, ...], length: int = 9) -> str:
        return digest_of_cases({length: [Case(context, (Question("q", prompt, answer),))]})

    found = [
        digest((1, 2), (3,), (4,)),
        digest((1,), (2, 3), (4,)),
        digest((1, 2), (), (3, 4)),
        digest((1, 2), (3,), (5,)),
        digest((1, 2), (3,), (4,), 8),
    ]
    assert len(set(found)) == 5
    assert digest((1, 2), (3,), (4,)) == found[0]
