# SPDX-License-Identifier: Apache-2.0
"""Asking every question after every kind of compression, and comparing non-uniform with uniform budgets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product, starmap
from statistics import fmean, stdev

from vllm_tangram.budget import RetentionPlan, RetentionProfile
from vllm_tangram.compression import get_scorer
from vllm_tangram.compression.gate import Gate
from vllm_tangram.config import Budgets, TangramConfig
from vllm_tangram.eval.dense import DenseModel, DenseState
from vllm_tangram.eval.tasks import Case

FULL = "full KV"
BLOCK_SIZE = 32  # the engine's on the CPU
_ROWS = 8  # settings that answer in one pass; more need more memory and are hardly faster


@dataclass(frozen=True)
class Setting:
    """One way to compress: row and column of the result's table.

    Attributes:
        scorer: its name; `FULL` is the reference that keeps everything.
        budgets: "profile" or "uniform".
        retention: fraction of full KV.

    """

    scorer: str
    budgets: Budgets
    retention: float


REFERENCE = Setting(FULL, "uniform", 1.0)


@dataclass(frozen=True)
class Answer:
    """One question asked after one kind of compression.

    Attributes:
        length: what the context was made to measure, in tokens (or the longest of its kind).
        case: number of the context.
        question: what was asked for.
        setting: how the context was compressed.
        held: pages held by the prompt over those of full KV, padding included.
        correct: would greedy decoding give the right answer?
        logprob: mean log-probability of the right answer's tokens.

    """

    length: int
    case: int
    question: str
    setting: Setting
    held: float
    correct: bool
    logprob: float


@dataclass(frozen=True)
class Cell:
    """The answers of one setting at one length."""

    count: int
    correct: int
    logprob: float
    held: float


@dataclass(frozen=True)
class Comparison:
    """The same questions with profiled and with uniform budgets, at the same memory.

    Attributes:
        gained: questions that only profiled budgets answer.
        lost: questions that only uniform budgets answer.
        p_value: two-sided exact sign test of ``gained`` against ``lost`` (McNemar).
        logprob: mean difference of log-probabilities, profiled minus uniform.
        logprob_error: its standard error.

    """

    gained: int
    lost: int
    p_value: float
    logprob: float
    logprob_error: float


def settings(scorers: Sequence[str], budgets: Sequence[Budgets], retentions: Sequence[float]) -> list[Setting]:
    """Every combination, after the reference."""
    return [REFERENCE, *starmap(Setting, product(scorers, budgets, retentions))]


def ask_in_prompt(cases: Iterable[Case]) -> Iterator[Case]:
    """Make the question the end of the context: one case per question."""
    for case in cases:
        for question in case.questions:
            yield Case(case.context + question.prompt, (replace(question, prompt=()),))


class Evaluation:
    """Asks all questions after all kinds of compression.

    Args:
        model: the reference.
        wanted: how to compress.
        profiles: by scorer, of those that are to have profiled budgets.
        config: options that all settings share; its chunk size counts only where ``chunked``.
        gate: of the model, for scorers that need one.
        chunked: compress prompts chunk by chunk; else at once, whatever their length, which is much quicker.

    """

    def __init__(
        self,
        model: DenseModel,
        wanted: Sequence[Setting],
        profiles: Mapping[str, RetentionProfile],
        *,
        config: TangramConfig,
        chunked: bool = False,
        gate: Gate | None = None,
    ) -> None:
        self.model = model
        self.wanted = wanted
        self.profiles = profiles
        self.config = config
        self.chunked = chunked
        names = dict.fromkeys(setting.scorer for setting in wanted if setting != REFERENCE)
        self._scorers = {name: get_scorer(name, gate) for name in names}
        self._plan = lru_cache(maxsize=1024)(self._build_plan)

    def answers(self, cases: Iterable[Case], length: int) -> Iterator[list[Answer]]:
        """The answers of one case after another.

        Args:
            cases: contexts with questions.
            length: what the answers are filed under.

        """
        for number, case in enumerate(cases):
            states = self._compressed(case.context)
            answers = []
            while batch := list(islice(states, _ROWS)):
                for question in case.questions:
                    rows = [state for _, _, state in batch]
                    logprobs, hits = self.model.score_answer(rows, question.prompt, question.answer)
                    answers += [
                        Answer(length, number, question.label, setting, held, bool(hit.all()), float(logprob.mean()))
                        for (setting, held, _), logprob, hit in zip(batch, logprobs, hits, strict=True)
                    ]
            yield answers

    def _compressed(self, ids: Sequence[int]) -> Iterator[tuple[Setting, float, DenseState]]:
        """Every setting, the memory it holds and what it leaves of a prompt."""
        config, in_chunks = self.config, self.chunked and len(ids) > self.config.chunk_size
        scorers = [] if in_chunks else list(self._scorers.values())
        whole = self.model.read(ids, scorers, sinks=config.sinks, window=config.window, after=self.model.empty())
        for setting in self.wanted:
            if setting == REFERENCE:
                yield setting, 1.0, whole.state
                continue
            plan = self._plan(setting, len(ids))
            schedule = plan.schedule(setting.retention)
            if in_chunks:
                state = self.model.prefill(ids, self._scorers[setting.scorer], plan, schedule)
            else:
                state = whole.compress(setting.scorer, plan, schedule, len(ids))
            yield setting, plan.held_fraction(len(ids)), state

    def _build_plan(self, setting: Setting, tokens: int) -> RetentionPlan:
        update = {"scorer": setting.scorer, "budgets": setting.budgets, "retention": setting.retention}
        if not self.chunked:
            update["chunk_size"] = -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
        return RetentionPlan(
            self.config.model_copy(update=update),
            self.profiles[setting.scorer] if setting.budgets == "profile" else None,
            num_layers=self.model.num_layers,
            num_kv_heads=self.model.num_kv_heads,
            block_size=BLOCK_SIZE,
            max_tokens=tokens,
        )


def cells(answers: Iterable[Answer]) -> dict[tuple[int, Setting], Cell]:
    """What each setting got at each length, in the order of first answers."""
    by_cell: defaultdict[tuple[int, Setting], list[Answer]] = defaultdict(list)
    for answer in answers:
        by_cell[answer.length, answer.setting].append(answer)
    return {
        key: Cell(
            count=len(own),
            correct=sum(answer.correct for answer in own),
            logprob=fmean(answer.logprob for answer in own),
            held=fmean(answer.held for answer in own),
        )
        for key, own in by_cell.items()
    }


def compare(answers: Iterable[Answer]) -> dict[tuple[int, str, float], Comparison]:
    """Profiled against uniform budgets by length, scorer and retention, where both were asked for."""
    pairs: defaultdict[tuple[int, str, float], defaultdict[tuple[int, str], dict[str, Answer]]]
    pairs = defaultdict(lambda: defaultdict(dict))
    for answer in answers:
        setting = answer.setting
        pair = pairs[answer.length, setting.scorer, setting.retention][answer.case, answer.question]
        pair[setting.budgets] = answer
    return {
        key: _compare([(pair["profile"], pair["uniform"]) for pair in own.values()])
        for key, own in pairs.items()
        if all(len(pair) == 2 for pair in own.values())
    }


def _compare(pairs: Sequence[tuple[Answer, Answer]]) -> Comparison:
    gained = sum(profiled.correct and not uniform.correct for profiled, uniform in pairs)
    lost = sum(uniform.correct and not profiled.correct for profiled, uniform in pairs)
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1)) / 2**changed
    differences = [profiled.logprob - uniform.logprob for profiled, uniform in pairs]
    error = stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
    return Comparison(gained, lost, min(1.0, 2 * tail), fmean(differences), error)
