# SPDX-License-Identifier: Apache-2.0
"""Recorded dialogues become the prompts that the model's chat template makes of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from vllm_tangram.bench.dialogues import Dialogues, Turn, read_dialogues, tokenizer_of
from vllm_tangram.bench.ttft import Due
from vllm_tangram.errors import TangramError

HISTORIES = [
    [("Who is there?", "It is only me, the postman."), ("And now?", "Still me."), ("Come in.", "Thank you!")],
    [("Count to three.", "One, two, three.")],
    [("Name a colour.", "Blue."), ("Another one: \u00e9\u4e2d \U0001f600", "Red, as in <roses>.")],
]


@pytest.fixture(scope="module")
def tokenizer(embedded: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(embedded))


def lines(histories: list[list[tuple[str, str]]]) -> str:
    return "".join(
        json.dumps({"task": "X", "id": 1, "history": [{"user": user, "bot": bot} for user, bot in history]}) + "\n"
        for history in histories
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "some.jsonl.gz").write_bytes(gzip.compress(lines(HISTORIES).encode()))
    (tmp_path / "SOURCE.txt").write_text("somewhere")
    return tmp_path / "some.jsonl.gz"


def prompts_of(dialogues: Dialogues, answers: dict[str, list[int]]) -> dict[str, list[int]]:
    """Prompts of all requests if each is answered as ``answers`` says."""
    queue, prompts = dialogues.first(), {}
    for request in queue:
        prompts[request.name] = list(request.prompt)
        following = dialogues.following(request, answers[request.name], 7.0)
        if following is not None:
            assert following.seconds == 7.0
            queue.append(following)
    return prompts


@pytest.mark.parametrize("folder", [True, False])
def test_prompts_are_those_of_the_template(path: Path, tokenizer: Any, folder: bool) -> None:
    """With the recorded answers in place of the engine's, a prompt is the template of all that was said."""
    dialogues = read_dialogues(path.parent if folder else path, tokenizer, limit=100, longest=4096)
    assert (dialogues.requests, len(dialogues.dialogues)) == (6, 3)
    order = [next(i for i, h in enumerate(HISTORIES) if len(h) == len(turns)) for turns in dialogues.dialogues]
    assert sorted(order) == [0, 1, 2]
    answers, expected = {}, {}
    for number, which in enumerate(order):
        messages: list[dict[str, str]] = []
        for turn, (user, bot) in enumerate(HISTORIES[which]):
            messages.append({"role": "user", "content": user})
            name = f"{number}/{turn}"
            answers[name] = tokenizer.encode(bot, add_special_tokens=False)
            assert dialogues.dialogues[number][turn].answer_tokens == len(answers[name])
            expected[name] = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            messages.append({"role": "assistant", "content": bot})
    prompts = prompts_of(dialogues, answers)
    assert {name: tokenizer.decode(prompt) for name, prompt in prompts.items()} == expected
    ends = [max(len(p) + len(answers[n]) for n, p in prompts.items() if n[0] == str(k)) for k in range(3)]
    assert (dialogues.max_model_len, dialogues.working_set) == (max(ends), sum(ends))
    assert dialogues == read_dialogues(path, tokenizer, limit=100, longest=4096), "the same for every engine"


def test_answers_of_the_engine_are_repeated() -> None:
    talk = Dialogues(((Turn((1, 2), 3), Turn((4,), 1)), (Turn((5,), 2),)), {})
    assert talk.first() == [Due(0.0, "0/0", [1, 2], 3), Due(0.0, "1/0", [5], 2)]
    second = talk.following(talk.first()[0], [7, 8, 9], 2.5)
    assert second == Due(2.5, "0/1", [1, 2, 7, 8, 9, 4], 1)
    assert talk.following(second, [6], 3.0) is None
    assert talk.following(talk.first()[1], [6, 6], 3.0) is None


def test_part_of_them(path: Path, tokenizer: Any) -> None:
    """Whole dialogues, so many turns at most, none longer than asked for."""
    assert read_dialogues(path, tokenizer, limit=5, longest=4096).requests <= 5
    whole = read_dialogues(path, tokenizer, limit=100, longest=4096)
    shorter = read_dialogues(path, tokenizer, limit=100, longest=whole.max_model_len - 1)
    assert (len(shorter.dialogues), shorter.max_model_len) == (2, sorted(map(length, whole.dialogues))[1])
    with pytest.raises(TangramError, match=r"no dialogue of at most 6 turns \(--limit\) and 5 tokens"):
        read_dialogues(path, tokenizer, limit=6, longest=5)


def length(turns: tuple[Turn, ...]) -> int:
    return sum(len(turn.tokens) + turn.answer_tokens for turn in turns)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected a JSON object"),
        ("{}", "no 'history'"),
        ('{"history": {}}', "history must be a list of turns"),
        ('{"history": []}', "history must have a turn"),
        ('{"history": [{"user": "a"}]}', "no 'bot'"),
        ('{"history": [{"user": "a", "bot": 1}]}', "user and bot of each must be text"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, tokenizer: Any, line: str, message: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(lines(HISTORIES[:1]) + line + "\n")
    with pytest.raises(TangramError, match=r"--dialogues: .*some.jsonl, line 2: ") as raised:
        read_dialogues(path, tokenizer, 10, 4096)
    assert message in str(raised.value)


def test_what_cannot_be_read(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(TangramError, match=r"has 0 files \.jsonl"):
        read_dialogues(tmp_path, tokenizer, 10, 4096)
    with pytest.raises(TangramError, match=r"--dialogues: .*nothing cannot be read"):
        read_dialogues(tmp_path / "nothing", tokenizer, 10, 4096)
    with pytest.raises(TangramError, match="no chat template"):
        read_dialogues(tmp_path, SimpleNamespace(chat_template=None), 10, 4096)  # type: ignore[arg-type]
    with pytest.raises(TangramError, match=r"--dialogues: .* has no tokenizer"):
        tokenizer_of(str(tmp_path))


def test_a_template_that_changes_earlier_turns(path: Path, tokenizer: Any) -> None:
    """Such as one that leaves out earlier answers: no prompt would begin with the one before it."""
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}A:"
    )
    try:
        with pytest.raises(TangramError, match="changes earlier turns"):
            read_dialogues(path, tokenizer, 10, 4096)
    finally:
        tokenizer.chat_template = template


def test_real_dialogues(shared_data: Path, tokenizer: Any) -> None:
    dialogues = read_dialogues(shared_data / "mtbench101", tokenizer, limit=200, longest=2048)
    assert 195 <= dialogues.requests <= 200
    assert dialogues.max_model_len <= 2048
    assert min(len(turns) for turns in dialogues.dialogues) >= 2
