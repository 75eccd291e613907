# SPDX-License-Identifier: Apache-2.0
"""What can be asked. A new task needs its function, its line in `TASKS` and its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_tangram.errors import TangramError
from vllm_tangram.eval.tasks.base import Case, Question, Request
from vllm_tangram.eval.tasks.kv import kv_cases
from vllm_tangram.eval.tasks.likelihood import dialogue_cases, perplexity_cases
from vllm_tangram.eval.tasks.manyshot import manyshot_cases
from vllm_tangram.eval.tasks.needles import multi_key_cases, multi_value_cases, needle_cases
from vllm_tangram.eval.tasks.retrieval import line_cases, topic_cases

__all__ = ["TASKS", "Case", "Question", "Request", "Task", "check_lengths"]


@dataclass(frozen=True)
class Task:
    """One kind of question.

    Attributes:
        cases: makes them.
        lengths: default lengths.
        likelihood: whether answers are free text, of which only the likelihood says something.
        exact: whether contexts have exactly the length asked for.

    """

    cases: Callable[[Request], Iterator[Case]]
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    likelihood: bool = False
    exact: bool = False


TASKS = {
    "needle": Task(needle_cases, exact=True),
    "multikey": Task(multi_key_cases, exact=True),
    "multivalue": Task(multi_value_cases, exact=True),
    "kv": Task(kv_cases, lengths=(30,)),
    "lines": Task(line_cases, lengths=(2048,)),
    "topics": Task(topic_cases, lengths=(2048,)),
    "manyshot": Task(manyshot_cases, exact=True),
    "dialogues": Task(dialogue_cases, lengths=(512,), likelihood=True),
    "perplexity": Task(perplexity_cases, likelihood=True, exact=True),
}


def check_lengths(cases: list[Case], most: int | None) -> None:
    """Refuse what the model was not made for.

    Args:
        cases: contexts with questions.
        most: tokens that the model takes; None if it does not say.

    Raises:
        TangramError: a context with a question and its answer is longer.

    """
    longest = max(
        len(case.context) + len(question.prompt) + len(question.answer) for case in cases for question in case.questions
    )
    if most is not None and longest > most:
        raise TangramError(
            f"--lengths: the longest context has {longest} tokens with its question and answer, the model takes "
            f"{most}; choose shorter ones"
        )
