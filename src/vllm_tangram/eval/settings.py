# SPDX-License-Identifier: Apache-2.0
"""Ways to compress, and which of them are worth telling apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import Any, Literal, get_args

from vllm_tangram.config import Margin, TangramConfig
from vllm_tangram.errors import TangramError

FULL = "full KV"
Allocation = Literal["profile", "dynamic", "adakv", "uniform"]
ALLOCATIONS: tuple[Allocation, ...] = get_args(Allocation)

_DEFAULT = TangramConfig()


@dataclass(frozen=True)
class Setting:
    """One way to compress: a row of the result's table.

    Attributes:
        scorer: its name; `FULL` is the reference that keeps everything.
        budgets: "profile" (static, of a retention profile) and "uniform" are the engine's; "dynamic" and "adakv" share
            out the memory that "profile" holds, anew for each context (`eval.baselines`).
        retention: fraction of full KV.
        alpha: standard deviations added to a member's mean.
        margin: whether these and the groups are within the retention or come on top.
        page_group_size: heads that share pages, G.

    """

    scorer: str
    budgets: Allocation
    retention: float
    alpha: float = _DEFAULT.alpha
    margin: Margin = _DEFAULT.margin
    page_group_size: int = _DEFAULT.page_group_size

    @property
    def name(self) -> str:
        """One word, for records: all that tells it from others."""
        if self == REFERENCE:
            return "full"
        return f"{self.scorer}/{self.budgets}/r{self.retention:g}/a{self.alpha:g}/{self.margin}/G{self.page_group_size}"

    def config(self, shared: TangramConfig) -> TangramConfig:
        """The engine's options, but for the budgets, which depend on whether there is a profile."""
        return shared.model_copy(
            update={
                "retention": self.retention,
                "alpha": self.alpha,
                "margin": self.margin,
                "page_group_size": self.page_group_size,
            }
        )


REFERENCE = Setting(FULL, "uniform", 1.0)


def settings(
    scorers: Sequence[str],
    budgets: Sequence[Allocation],
    retentions: Sequence[float],
    alphas: Sequence[float] = (_DEFAULT.alpha,),
    margins: Sequence[Margin] = (_DEFAULT.margin,),
    group_sizes: Sequence[int] = (_DEFAULT.page_group_size,),
) -> list[Setting]:
    """Every combination that is worth asking, after the reference.

    Uniform budgets have no margin and gain nothing from groups: they take the first of these options. The baselines
    share out the memory of a plan. Inside the retention all plans hold the same, but for rounding, so one baseline,
    with the first alpha and group size, stands for all of them; on top, each plan has one of its own.
    """
    found = [REFERENCE]
    for scorer, kind, retention in product(scorers, budgets, retentions):
        for alpha, margin, size in product(alphas, margins, group_sizes):
            setting = Setting(scorer, kind, retention, alpha, margin, size)
            if kind == "uniform":
                setting = replace(setting, alpha=alphas[0], margin=margins[0], page_group_size=group_sizes[0])
            elif kind != "profile" and margin == "inside":
                setting = replace(setting, alpha=alphas[0], page_group_size=group_sizes[0])
            if setting not in found:
                found.append(setting)
    return found


def partner(setting: Setting, budgets: Allocation, among: Iterable[Setting]) -> Setting | None:
    """What to compare a setting with: the one with other budgets that differs least from it; None if there is none."""
    own = astuple(replace(setting, budgets=budgets))
    candidates = [
        other
        for other in among
        if (other.scorer, other.budgets, other.retention) == (setting.scorer, budgets, setting.retention)
    ]
    # The margin decides how much is held: it weighs more than the two others together.
    return min(candidates, key=lambda other: _distance(own, astuple(other)), default=None)


def _distance(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[bool, int]:
    different = [x != y for x, y in zip(a[3:], b[3:], strict=True)]
    return different[1], sum(different)


def parse_allocations(names: Iterable[str]) -> Iterator[Allocation]:
    """Names of budgets as users write them.

    Raises:
        TangramError: one is unknown.

    """
    known: dict[str, Allocation] = {kind: kind for kind in ALLOCATIONS}
    for name in names:
        if name not in known:
            raise TangramError(f"--budgets: {name!r} is none of {', '.join(ALLOCATIONS)}")
        yield known[name]
