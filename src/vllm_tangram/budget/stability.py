# SPDX-License-Identifier: Apache-2.0
"""Is the ranking of the heads a property of the model, or of the text? Only then do static budgets make sense.

Two measures, both at the retention that is served:

- **rank correlation**: Spearman's, of the kept fractions of all members, equal fractions sharing their mean rank
  (C. Spearman, The American Journal of Psychology 15, 1904). Between two samples, averaged over all pairs; and
  between the means of two domains, of which the least pair counts.
- **clipping**: the share of the tokens that members would keep in a free competition (``profile.kept``) for which a
  plan has no room in those members: ``sum(max(0, wanted - held)) / sum(wanted)`` over samples and members.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from vllm_tangram.budget.plan import RetentionPlan
from vllm_tangram.budget.profile import RetentionProfile
from vllm_tangram.config import TangramConfig

STABLE = 0.8
"""Least rank correlation at which the ranking counts as the model's own."""

_ALL = "all samples"
_LONG = 16384  # tokens: a long prompt, of which partial blocks are a small share


@dataclass(frozen=True)
class Stability:
    """How far pilot samples agree on which members matter.

    Attributes:
        samples: mean rank correlation of pairs of samples; NaN where no two samples rank anything.
        domains: least rank correlation of two domains' means; NaN with fewer than two domains.
        least_alike: these two domains; None with fewer than two.

    """

    samples: float
    domains: float
    least_alike: tuple[str, str] | None

    def warning(self) -> str | None:
        """What is wrong and what to do, in a sentence or two; None if the ranking is stable or there is none."""
        if not (self.samples < STABLE or self.domains < STABLE):  # comparisons with NaN are false
            return None
        found = [f"{self.samples:.3f} between samples"]
        if self.least_alike is not None:
            found.append(f"{self.domains:.3f} between {self.least_alike[0]} and {self.least_alike[1]}")
        return (
            f"pilot samples do not agree on which heads matter (rank correlation {', '.join(found)}; {STABLE:g} or "
            "more is stable), so budgets that are fixed beforehand lack room for tokens that heads would keep. Better: "
            "a profile of your own traffic (`tangram profile --samples FILE`), another scorer (best a gate: `tangram "
            "gate train`), or more memory (--retention, --margin on_top)"
        )


@dataclass(frozen=True)
class Clipping:
    """What a plan clips of one domain.

    Attributes:
        domain: its name.
        samples: how many pilot samples are of it.
        seen: clipped by the plan of the whole profile.
        unseen: clipped by a plan of the other domains alone: an estimate for texts that are like no pilot sample; NaN
            with fewer than two domains.

    """

    domain: str
    samples: int
    seen: float
    unseen: float


def rank_stability(profile: RetentionProfile, retention: float) -> Stability:
    """Do samples and domains rank the members alike at a retention in [0, 1]?"""
    wanted = wanted_fractions(profile, retention)
    means = {name: wanted[rows].mean(axis=0) for name, rows in _domains(profile).items()}
    # Two domains of which one ranks nothing cannot disagree.
    pairs = {pair: rank_correlation(means[pair[0]], means[pair[1]]) for pair in combinations(means, 2)}
    known = {pair: value for pair, value in pairs.items() if value == value}
    least = min(known, key=lambda pair: known[pair], default=None)
    return Stability(_mean_pairwise(wanted), float("nan") if least is None else known[least], least)


def clipping(profile: RetentionProfile, config: TangramConfig, block_size: int) -> list[Clipping]:
    """What long prompts of each domain lose to a plan of these options.

    Args:
        profile: the profile.
        config: retention, alpha, margin, grouping and group size; chunk size, sinks and window as profiled.
        block_size: tokens of a block.

    Raises:
        TangramError: the options do not fit each other or the profile.

    """
    wanted = wanted_fractions(profile, config.retention)
    held = held_fractions(profile, config, block_size)
    domains = _domains(profile)
    found = []
    for name, rows in domains.items():
        unseen = float("nan")
        if len(domains) > 1:
            unseen = clipped(wanted[rows], held_fractions(profile.subset(~rows), config, block_size))
        found.append(Clipping(name, int(rows.sum()), clipped(wanted[rows], held), unseen))
    return found


def clipped(wanted: NDArray[np.float64], held: NDArray[np.float64]) -> float:
    """Share of what members want, ``[S, M]``, for which ``held`` ``[M]`` has no room."""
    return float(np.maximum(0, wanted - held).sum() / wanted.sum())


def held_fractions(
    profile: RetentionProfile, config: TangramConfig, block_size: int, span: tuple[int, int] | None = None
) -> NDArray[np.float64]:
    """[M] what each member holds of a prompt's tokens, whole pages and the rest of its group included.

    Args:
        profile: the profile.
        config: the options of a plan.
        block_size: tokens of a block.
        span: from where to where in the prompt; None: all of a long prompt of whole chunks.

    """
    start, stop = span or (0, config.chunk_size * -(-_LONG // config.chunk_size))
    plan = RetentionPlan.of_profile(config, profile, block_size=block_size, max_tokens=stop)
    schedule = plan.schedule(config.retention)
    lengths = schedule.lengths(stop, stop) - schedule.lengths(start, stop)
    return (lengths[plan.groups.group.ravel()] / (stop - start)).astype(np.float64)


def rank_correlation(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """Spearman's rank correlation of two vectors; NaN where one of them is constant."""
    return _mean_pairwise(np.stack([first, second]))


def wanted_fractions(profile: RetentionProfile, retention: float) -> NDArray[np.float64]:
    """[S, M] what members would keep of each sample in a free competition at a retention."""
    return profile.kept_at(retention).reshape(profile.num_samples, -1)


def _domains(profile: RetentionProfile) -> dict[str, NDArray[np.bool_]]:
    """Domain -> [S] which samples are of it, in the order of their first samples; one for all if none is recorded."""
    names = np.array(profile.domains or [_ALL] * profile.num_samples)
    return {str(name): names == name for name in dict.fromkeys(names)}


def _mean_pairwise(samples: NDArray[np.floating]) -> float:
    """Mean Spearman correlation of pairs of the rows of [S, M]; NaN without a pair of rows that vary."""
    ranks = np.stack([_ranks(row) for row in samples])
    ranks -= ranks.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(ranks, axis=1)
    unit = ranks[norms > 0] / norms[norms > 0, None]
    if len(unit) < 2:
        return float("nan")
    pairs = np.triu_indices(len(unit), k=1)
    return float((unit @ unit.T)[pairs].mean())


def _ranks(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]
