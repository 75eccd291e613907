# SPDX-License-Identifier: Apache-2.0
"""Answers on disk, context by context, so that a run that was stopped goes on where it was.

A work file is JSONL: a line that says what is measured, then a line for every context that was asked. Each is written
at once and flushed to disk; one that a crash tore is dropped when the file is read, and its context is asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_tangram.errors import TangramError
from vllm_tangram.eval.run import Answer
from vllm_tangram.eval.settings import Setting
from vllm_tangram.eval.tasks import Case

FORMAT_VERSION = 1
_START = b'{"tangram_eval"'


def digest_of_cases(groups: Mapping[int, Sequence[Case]]) -> str:
    """16 hex digits over all tokens of all cases: other data, lengths, seeds or tokenizers give others."""
    sha = hashlib.sha256()
    for length, cases in groups.items():
        for case in cases:
            parts = [
                case.context,
                *(tokens for question in case.questions for tokens in (question.prompt, question.answer)),
            ]
            sha.update(repr((length, parts)).encode())
    return sha.hexdigest()[:16]


class WorkFile:
    """The answers to contexts that were asked already, and those to come.

    Attributes:
        done: (length, number of the context, part) -> answers, in the order in which they were asked.

    """

    def __init__(self, path: Path | None, setup: Mapping[str, Any]) -> None:
        """Read what the file holds already.

        Args:
            path: the file; None keeps everything in memory.
            setup: all that decides the answers, JSON values; must be what it was when the file was begun.

        Raises:
            TangramError: the file cannot be read or written, is no work file, or holds answers of another setup.

        """
        self.done: dict[tuple[int, int, str], list[Answer]] = {}
        self._path = path
        if path is None:
            return
        # Through JSON and back, so that a tuple equals the list that it is in the file.
        header = {"tangram_eval": FORMAT_VERSION, **json.loads(json.dumps(setup))}
        lines = _whole_lines(path)
        if not lines:
            self._append(header)
            return
        _check(path, lines[0], header)
        for number, line in enumerate(lines[1:], start=2):
            try:
                record = json.loads(line)
                answers = [Answer(**{**item, "setting": Setting(**item["setting"])}) for item in record["answers"]]
                self.done[int(record["length"]), int(record["case"]), str(record["part"])] = answers
            except (ValueError, KeyError, TypeError) as error:
                raise _damaged(path, number, error) from None

    @property
    def answers(self) -> list[Answer]:
        """All answers, by length and context, and within one as they came."""
        return [answer for key in sorted(self.done, key=lambda key: key[:2]) for answer in self.done[key]]

    def add(self, length: int, case: int, answers: Iterable[Answer], part: str = "") -> None:
        """Add a context's answers.

        Args:
            length: of the context.
            case: its number.
            answers: after every setting, or after those of one part of the run.
            part: names that part.

        Raises:
            TangramError: the file cannot be written.

        """
        own = self.done[length, case, part] = list(answers)
        if self._path is not None:
            record = {"length": length, "case": case, "part": part, "answers": [asdict(answer) for answer in own]}
            self._append(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        assert self._path is not None
        line = (json.dumps(record) + "\n").encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                if file.write(line) != len(line):
                    raise OSError("the disk is full")
                os.fsync(file.fileno())
        except OSError as error:
            raise TangramError(f"--work: cannot write {self._path}: {error.strerror or error}") from None


def _whole_lines(path: Path) -> list[str]:
    """Lines of the file; one without an end is cut off the file, so that the next does not continue it."""
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if data[: len(_START)] != _START[: len(data)]:
            raise TangramError(f"--work: {path} is no work file of `tangram eval`; name another file")
        if whole < len(data):
            os.truncate(path, whole)
        return data[:whole].decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TangramError(f"--work: cannot read {path}: {error}") from None


def _check(path: Path, line: str, ours: Mapping[str, Any]) -> None:
    try:
        theirs = dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise _damaged(path, 1, error) from None
    different = [
        f"{name}: {_short(theirs.get(name))} there, {_short(ours.get(name))} here"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if different:
        raise TangramError(
            f"--work: {path} holds answers of another run ({'; '.join(different)}); repeat its options, or name "
            "another file"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _damaged(path: Path, line: int, error: Exception) -> TangramError:
    return TangramError(f"--work: {path}, line {line} is damaged ({error}); remove that line, or name another file")
