# SPDX-License-Identifier: Apache-2.0
"""Lines of a record and topics of a conversation: the data of LongEval (LongChat, https://arxiv.org/abs/2306.05685)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random

from vllm_tangram.errors import TangramError
from vllm_tangram.eval.tasks.base import Case, Question, Request, field, needs_data
from vllm_tangram.json_lines import read_json_lines

QUESTIONS = 4

_LINE = re.compile(r"^line (\S+): REGISTER_CONTENT is <(\d+)>$", re.MULTILINE)
_TOPIC = re.compile(r"USER: I would like to discuss the topic of (.+?)\. ")
_OVER = re.compile(r"Now the record (?:is over|ends)")  # here the files go on with a question of their own


def line_cases(request: Request) -> Iterator[Case]:
    """A record of lines, cut to whole lines within the length, and questions for the numbers of some of them.

    Raises:
        TangramError: no file is given, a line of it is wrong, or it has too few or too short records.

    """
    before, after = request.frame()

    def questions(lines: Sequence[re.Match[str]], random: Random, count: int) -> Iterator[Question]:
        for number in sorted(random.sample(range(len(lines)), min(count, len(lines)))):
            name, value = lines[number].groups()
            prompt = f"\n\nWhat is the REGISTER_CONTENT in line {name}?{after}line {name}: REGISTER_CONTENT is"
            yield request.question(name, prompt, f" <{value}>")

    head = f"{before}Remember the number of every line of this record.\n\n"
    yield from _records(request, "lines of LongEval", _LINE, head, questions)


def topic_cases(request: Request) -> Iterator[Case]:
    """A conversation on several topics, cut to whole topics within the length, and questions for their names.

    Raises:
        TangramError: as `line_cases`.

    """
    before, after = request.frame()

    def questions(topics: Sequence[re.Match[str]], random: Random, count: int) -> Iterator[Question]:
        for number in sorted(random.sample(range(len(topics)), min(count, len(topics)))):
            prompt = (
                f"\n\nWhich topic did we discuss as number {number + 1} in this conversation?{after}"
                f"Topic number {number + 1} was"
            )
            yield request.question(f"topic {number + 1}", prompt, f" {topics[number].group(1)}")

    head = f"{before}Remember the topics of this conversation.\n\n"
    yield from _records(request, "topics of LongEval", _TOPIC, head, questions)


def _records(
    request: Request,
    what: str,
    pattern: re.Pattern[str],
    head: str,
    questions: Callable[[Sequence[re.Match[str]], Random, int], Iterator[Question]],
) -> Iterator[Case]:
    """Cases of records that consist of parts, each of which begins with what the pattern matches."""
    path, left = needs_data(request, what), request.count
    for index, (where, record) in enumerate(read_json_lines(path, "--data")):
        if left <= 0:
            return
        text = _OVER.split(field(record, "prompt", where))[0]
        found = list(pattern.finditer(text))
        if not found:
            raise TangramError(f"--data: {where}: this is no record of {what}")
        ends = [*(match.start() for match in found[1:]), len(text)]
        parts = [text[match.start() : end] for match, end in zip(found, ends, strict=True)]
        context, fitting = _fitting(request, head, parts)
        if fitting < 2:
            raise TangramError(f"--lengths: {request.length} tokens do not hold two parts of {where}; ask for more")
        if fitting == len(parts) and len(context) < 0.75 * request.length:
            raise TangramError(
                f"--lengths: {where} has {len(context)} tokens, not {request.length}; ask for fewer, or give a longer "
                "record with --data"
            )
        own = tuple(questions(found[:fitting], Random(f"{what}/{request.seed}/{index}"), min(QUESTIONS, left)))
        left -= len(own)
        yield Case(tuple(context), own)
    if left > 0:
        raise TangramError(f"--data: {path} has records for {request.count - left} questions, --samples asks for more")


def _fitting(request: Request, head: str, parts: Sequence[str]) -> tuple[list[int], int]:
    """Tokens of the head and of as many parts as the length holds, and their number."""
    context, number = request.ids(head), 0
    for part in parts:
        own = request.ids(part)
        if len(context) + len(own) > request.length:
            break
        context += own
        number += 1
    return context, number
