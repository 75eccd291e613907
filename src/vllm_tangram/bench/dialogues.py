# SPDX-License-Identifier: Apache-2.0
"""Real dialogues as traffic: the user's turns as they were written, the answers those of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from vllm_tangram.bench.sizing import model_options
from vllm_tangram.bench.traffic import read_records
from vllm_tangram.bench.ttft import Due
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\x02answer\x03"  # stands for an answer while the template is laid around it


@dataclass(frozen=True)
class Turn:
    """What one turn adds to a dialogue.

    Attributes:
        tokens: what comes between the answer before, or the beginning, and this turn's answer.
        answer_tokens: length of the answer.

    """

    tokens: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True)
class Dialogues:
    """Dialogues that begin at one time; a turn is sent as soon as the one before it is answered.

    A turn's prompt is the one before it, the engine's answer to that, and the next turn's text in the model's chat
    template. Answers have the lengths of the recorded ones.

    Attributes:
        dialogues: their turns.
        options: what ``described`` says.

    """

    dialogues: tuple[tuple[Turn, ...], ...]
    options: dict[str, Any]

    @property
    def requests(self) -> int:
        return sum(map(len, self.dialogues))

    @property
    def max_model_len(self) -> int:
        return max(map(_length, self.dialogues))

    @property
    def working_set(self) -> int:
        return sum(map(_length, self.dialogues))

    def described(self) -> dict[str, Any]:
        return {**self.options, "conversations": len(self.dialogues)}

    def first(self) -> list[Due]:
        return [
            Due(0.0, f"{number}/0", list(turns[0].tokens), turns[0].answer_tokens)
            for number, turns in enumerate(self.dialogues)
        ]

    def following(self, request: Due, answer: Sequence[int], now: float) -> Due | None:
        number, place = map(int, request.name.split("/"))
        if place + 1 == len(self.dialogues[number]):
            return None
        turn = self.dialogues[number][place + 1]
        return Due(now, f"{number}/{place + 1}", [*request.prompt, *answer, *turn.tokens], turn.answer_tokens)


def read_dialogues(path: Path, tokenizer: PreTrainedTokenizerBase, limit: int, longest: int) -> Dialogues:
    """Dialogues in the format of MT-Bench-101 (https://github.com/mtbench101/mt-bench-101).

    Whole dialogues are chosen at random, the same ones every time.

    Args:
        path: lines of ``{"history": [{"user": text, "bot": text}, ...]}``, gzipped if it ends in ``.gz``; or a folder
            with one such file.
        tokenizer: of the model, with a chat template.
        limit: so many turns, at most.
        longest: no dialogue of more tokens, answers included.

    Raises:
        TangramError: the file cannot be read, a line is no dialogue, the model has no chat template or one that changes
            what was said before, or nothing is left.

    """
    if not tokenizer.chat_template:
        raise TangramError("--dialogues: the model has no chat template to lay around a user's turn")
    file = _file_of(path)
    histories = list(read_records("--dialogues", file, _history))
    Random(0).shuffle(histories)
    chosen: list[tuple[Turn, ...]] = []
    left = limit
    for history in histories:
        if len(history) <= left and _length(turns := _turns(history, tokenizer)) <= longest:
            chosen.append(turns)
            left -= len(turns)
        if not left:
            break
    if not chosen:
        raise TangramError(
            f"--dialogues: {file} has no dialogue of at most {limit} turns (--limit) and {longest} tokens (--longest)"
        )
    return Dialogues(tuple(chosen), {"dialogues": file.name, "limit": limit, "longest": longest})


def tokenizer_of(model: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        TangramError: it has none here.

    """
    from transformers import AutoTokenizer

    path, _ = model_options(model)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise TangramError(f"--dialogues: {model} has no tokenizer that can be read: {error}") from None


def _length(turns: Sequence[Turn]) -> int:
    return sum(len(turn.tokens) + turn.answer_tokens for turn in turns)


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = [file for file in sorted(path.iterdir()) if file.name.endswith((".jsonl", ".jsonl.gz"))]
    if len(files) != 1:
        raise TangramError(f"--dialogues: {path} has {len(files)} files .jsonl or .jsonl.gz: name the one to take")
    return files[0]


def _history(given: dict[str, Any]) -> list[tuple[str, str]]:
    """(User's text, answer) of every turn; KeyError, TypeError or ValueError if it is no dialogue."""
    history = given["history"]
    if not isinstance(history, list) or not all(isinstance(turn, dict) for turn in history):
        raise TypeError("history must be a list of turns")
    turns = [(turn["user"], turn["bot"]) for turn in history]
    if not turns or not all(isinstance(text, str) and _MARK not in text for turn in turns for text in turn):
        raise ValueError("history must have a turn, and user and bot of each must be text")
    return turns


def _turns(history: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> tuple[Turn, ...]:
    messages: list[dict[str, str]] = []
    for user, _ in history:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": _MARK}]
    rendered = [
        str(tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=True))
        for end in range(1, len(messages), 2)
    ]
    turns = []
    before = ""
    for text, (_, answer) in zip(rendered, history, strict=True):
        if not text.startswith(before):
            raise TangramError("--dialogues: the model's chat template changes earlier turns when a new one comes")
        new = tokenizer.encode(text.removeprefix(before), add_special_tokens=False)
        turns.append(Turn(tuple(new), max(len(tokenizer.encode(answer, add_special_tokens=False)), 1)))
        before = text + _MARK
    return tuple(turns)
