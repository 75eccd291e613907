# SPDX-License-Identifier: Apache-2.0
"""What a task is made of: contexts, and questions that are asked after the context was compressed.

Contexts, questions and answers are token ids: the same ones for every scorer and budget. The same seed makes the same
cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tangram.errors import TangramError
from vllm_tangram.eval.chat import chat_frame


@dataclass(frozen=True)
class Question:
    """What is asked after the context.

    Attributes:
        label: what it asks for, for the records.
        prompt: tokens between the context and the answer, maybe none.
        answer: tokens of the right answer, or of the reference whose likelihood is measured.

    """

    label: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A context with its questions."""

    context: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Request:
    """Which cases to make.

    Attributes:
        tokenizer: that of the model; its chat template is used if it has one.
        length: tokens of a context (of ``kv``: pairs; of ``dialogues``: at least).
        count: questions in all.
        data: file or folder that the cases are made from; None for what is built in.
        seed: of everything that is drawn.

    """

    tokenizer: Any
    length: int
    count: int
    data: Path | None = None
    seed: int = 0

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, without any that the tokenizer would add."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def question(self, label: str, prompt: str, answer: str) -> Question:
        """A question from texts."""
        return Question(label, tuple(self.ids(prompt)), tuple(self.ids(answer)))

    def frame(self) -> tuple[str, str]:
        """What the model expects before a user's message, and between it and its answer."""
        return chat_frame(self.tokenizer)

    def contexts(self, questions: int) -> range:
        """Numbers of the contexts that it takes to ask ``count`` questions, so many of each."""
        return range(-(-self.count // questions))

    def asked(self, index: int, questions: int) -> int:
        """How many questions context ``index`` is asked, of at most ``questions``."""
        return min(questions, self.count - questions * index)


def needs_data(request: Request, what: str) -> Path:
    """The file of a task that has nothing built in.

    Raises:
        TangramError: none is given.

    """
    if request.data is None:
        raise TangramError(f"this task needs {what}: give the file with --data")
    return request.data


def field(record: Mapping[str, Any], name: str, where: str) -> str:
    """A text of a record.

    Raises:
        TangramError: there is none.

    """
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise TangramError(f'--data: {where}: "{name}" must be a string that is not empty')
    return value
