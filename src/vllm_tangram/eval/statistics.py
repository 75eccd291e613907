# SPDX-License-Identifier: Apache-2.0
"""From answers to figures, each with a 95 % confidence interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

import numpy as np

from vllm_tangram.eval.run import Answer
from vllm_tangram.eval.settings import REFERENCE, Allocation, Setting, partner

Interval = tuple[float, float]
T = TypeVar("T")

_Z = 1.959964  # of a normal distribution, 95 % lie within so many standard deviations
_DRAWS = 2000


@dataclass(frozen=True)
class Cell:
    """The answers of one setting at one length.

    Attributes:
        count: questions.
        correct: of them, answered.
        share: interval of the share of right answers (Wilson).
        logprob: mean log-probability of an answer's tokens, over questions.
        logprob_interval: of the mean (bootstrap over contexts).
        hits: mean share of an answer's tokens that are the most likely ones.
        held: mean memory over that of full KV.
        kept: mean share of the tokens that heads keep.

    """

    count: int
    correct: int
    share: Interval
    logprob: float
    logprob_interval: Interval
    hits: float
    held: float
    kept: float


@dataclass(frozen=True)
class Comparison:
    """The same questions after two settings that differ in their budgets.

    Attributes:
        gained: questions that only the first answers.
        lost: questions that only the second answers.
        p_value: two-sided exact sign test of ``gained`` against ``lost`` (McNemar).
        logprob: mean difference of log-probabilities, first minus second.
        logprob_interval: of that mean (bootstrap over contexts).

    """

    gained: int
    lost: int
    p_value: float
    logprob: float
    logprob_interval: Interval


def wilson(correct: int, count: int) -> Interval:
    """95 % interval of a share (Wilson's score interval).

    Unlike the normal approximation it stays within [0, 1] and has a width at none and at all of ``count``.
    """
    share, spread = correct / count, _Z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Sequence[float], clusters: Sequence[int]) -> Interval:
    """95 % interval of a mean: percentiles of the means of contexts drawn again, with all their questions.

    Questions about one context are not independent of each other, so contexts are drawn and not questions. NaN with
    fewer than two of them. The same values give the same interval.
    """
    groups: dict[int, list[float]] = defaultdict(list)
    for value, cluster in zip(values, clusters, strict=True):
        groups[cluster].append(value)
    if len(groups) < 2:
        return math.nan, math.nan
    sums = np.array([sum(own) for own in groups.values()])
    counts = np.array([len(own) for own in groups.values()])
    drawn = np.random.default_rng(0).integers(len(groups), size=(_DRAWS, len(groups)))
    low, high = np.percentile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), [2.5, 97.5])
    return float(low), float(high)


def cells(answers: Iterable[Answer]) -> dict[tuple[int, Setting], Cell]:
    """What each setting got at each length, in the order of first answers."""
    return {
        key: Cell(
            count=len(own),
            correct=(correct := sum(answer.correct for answer in own)),
            share=wilson(correct, len(own)),
            logprob=fmean(answer.logprob for answer in own),
            logprob_interval=bootstrap([answer.logprob for answer in own], [answer.case for answer in own]),
            hits=fmean(answer.hits / answer.tokens for answer in own),
            held=fmean(answer.held for answer in own),
            kept=fmean(answer.kept for answer in own),
        )
        for key, own in _grouped(answers, lambda answer: (answer.length, answer.setting)).items()
    }


def compare(answers: Iterable[Answer], baseline: Allocation) -> dict[tuple[int, Setting], tuple[Setting, Comparison]]:
    """Every setting with other budgets against the one with ``baseline`` that differs least from it, if any.

    Returns:
        (length, setting) -> what it is compared with, and the result.

    """
    results = {}
    by_setting = _grouped(answers, lambda answer: (answer.length, answer.setting))
    for (length, setting), own in by_setting.items():
        if setting == REFERENCE or setting.budgets == baseline:
            continue
        other = partner(setting, baseline, (found for at, found in by_setting if at == length and found != REFERENCE))
        if other is not None:
            results[length, setting] = other, _compare(own, by_setting[length, other])
    return results


def _compare(first: Sequence[Answer], second: Sequence[Answer]) -> Comparison:
    asked = {(answer.case, answer.question): answer for answer in second}
    pairs = [(answer, asked[answer.case, answer.question]) for answer in first]
    gained = sum(one.correct and not other.correct for one, other in pairs)
    lost = sum(other.correct and not one.correct for one, other in pairs)
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1)) / 2**changed
    differences = [one.logprob - other.logprob for one, other in pairs]
    interval = bootstrap(differences, [one.case for one, _ in pairs])
    return Comparison(gained, lost, min(1.0, 2 * tail), fmean(differences), interval)


def _grouped(answers: Iterable[Answer], key: Callable[[Answer], T]) -> dict[T, list[Answer]]:
    groups: defaultdict[T, list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[key(answer)].append(answer)
    return groups
