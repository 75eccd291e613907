# SPDX-License-Identifier: Apache-2.0
"""What ``tangram eval`` shows of its answers: tables, one JSON object, a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_tangram.cli.rendering import percent
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.settings import FULL, REFERENCE, Setting
from vllm_tangram.eval.statistics import Cell, Interval, cells, compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vllm_tangram.eval.run import Answer
    from vllm_tangram.eval.settings import Allocation

_OPTIONS = {"alpha": "alpha", "margin": "margin", "page_group_size": "G"}  # shown where they vary
_BASELINES: tuple[Allocation, ...] = ("uniform", "adakv", "dynamic")
_COLORS = ("#2a6f97", "#e07a1f", "#6a994e", "#8d5a97", "#b5838d", "#555555")
_STYLES = {"profile": "o-", "dynamic": "s--", "adakv": "^-.", "uniform": "v:"}


@dataclass(frozen=True)
class Table:
    """A table with a title above it."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The same as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def tables(answers: Sequence[Answer], *, likelihood: bool, unit: str = "tokens") -> list[Table]:
    """A table of results for each length, and one for each kind of budgets that others are compared with.

    Args:
        answers: of any number of lengths and settings.
        likelihood: whether the task measures perplexity instead of right answers.
        unit: of the lengths.

    """
    results = cells(answers)
    varying = _varying([setting for _, setting in results])
    made = []
    for length in dict.fromkeys(length for length, _ in results):
        own = {setting: cell for (at, setting), cell in results.items() if at == length}
        columns = ["scorer", "budgets", *_named(varying), "retention", "held", *_columns(likelihood, own)]
        rows = [
            [*_row(setting, varying), percent(cell.held), *_figures(cell, likelihood)] for setting, cell in own.items()
        ]
        made.append(Table(f"{length} {unit}, with 95 % intervals", columns, rows))
    for baseline in _BASELINES:
        columns = ["scorer", "budgets", *_named(varying), "retention", unit, "right", "p", "logprob"]
        rows = [
            [
                *_row(setting, varying),
                str(length),
                f"+{result.gained} -{result.lost}",
                "< 0.001" if result.p_value < 0.001 else f"{result.p_value:.3f}",
                _with_interval(result.logprob, result.logprob_interval, "{:+.3f}"),
            ]
            for (length, setting), (_, result) in compare(answers, baseline).items()
            # Everything beside uniform budgets, and what an engine can do beside the other baselines.
            if baseline == "uniform" or setting.budgets == "profile"
        ]
        if rows:
            if likelihood:  # nobody answers word for word
                columns, *rows = map(_without_counts, (columns, *rows))
            made.append(Table(f"Against {baseline} budgets: paired differences, with 95 % intervals", columns, rows))
    return made


def report(answers: Sequence[Answer], setup: Mapping[str, Any]) -> dict[str, Any]:
    """Setup, figures with their intervals, paired comparisons and every answer, as JSON values."""
    return {
        **setup,
        "cells": [
            {"length": length, "setting": asdict(setting), **asdict(cell)}
            for (length, setting), cell in cells(answers).items()
        ],
        "comparisons": [
            {"length": length, "setting": asdict(setting), "baseline": asdict(other), **asdict(result)}
            for baseline in _BASELINES
            for (length, setting), (other, result) in compare(answers, baseline).items()
        ],
        "answers": [{**asdict(answer), "correct": answer.correct} for answer in answers],
    }


def plot(path: Path, title: str, answers: Sequence[Answer], *, likelihood: bool, unit: str = "tokens") -> None:
    """Write a PNG: for each length, what was answered over the memory that was held, with 95 % intervals.

    Raises:
        TangramError: the file cannot be written.

    """
    import matplotlib
    from matplotlib.figure import Figure

    results = cells(answers)
    lengths = list(dict.fromkeys(length for length, _ in results))
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}):
        figure = Figure(figsize=(1 + 4.5 * len(lengths), 4.5), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for number, length in enumerate(lengths):
            axes = figure.add_subplot(1, len(lengths), number + 1)
            _panel(axes, {setting: cell for (at, setting), cell in results.items() if at == length}, likelihood)
            axes.set(title=f"{length} {unit}", xlabel="memory over that of full KV")
            if number == 0:
                axes.set_ylabel("perplexity" if likelihood else "right answers")
                axes.legend(frameon=False, fontsize=8)
        try:
            figure.savefig(path, format="png", dpi=144)
        except OSError as error:
            raise TangramError(f"--plot: {path} cannot be written: {error.strerror}") from error


def _panel(axes: Axes, results: Mapping[Setting, Cell], likelihood: bool) -> None:
    scorers = list(dict.fromkeys(setting.scorer for setting in results if setting != REFERENCE))
    series: dict[tuple[Any, ...], list[Cell]] = {}
    for setting, cell in results.items():
        if setting == REFERENCE:
            axes.axhline(_value(cell, likelihood)[0], color="#555555", linewidth=1, linestyle=(0, (4, 3)), label=FULL)
        else:
            line = (setting.scorer, setting.budgets, setting.alpha, setting.margin, setting.page_group_size)
            series.setdefault(line, []).append(cell)
    varying = _varying(results)
    for (scorer, budgets, *options), found in series.items():
        found = sorted(found, key=lambda cell: cell.held)
        middle, low, high = zip(*(_value(cell, likelihood) for cell in found), strict=True)
        errors = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
        shown = [str(value) for name, value in zip(_OPTIONS, options, strict=True) if name in varying]
        axes.errorbar(
            [cell.held for cell in found],
            middle,
            yerr=errors,
            fmt=_STYLES[budgets],
            color=_COLORS[scorers.index(scorer) % len(_COLORS)],
            capsize=2,
            linewidth=1,
            label=" ".join([scorer, budgets, *shown]),
        )
    if likelihood:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.02)


def _value(cell: Cell, likelihood: bool) -> tuple[float, float, float]:
    """What the picture shows of a cell, and its interval; a point where there is none."""
    if not likelihood:
        return cell.correct / cell.count, *cell.share
    middle, (low, high) = math.exp(-cell.logprob), _perplexities(cell.logprob_interval)
    return middle, middle if math.isnan(low) else low, middle if math.isnan(high) else high


def _varying(found: Sequence[Setting] | Mapping[Setting, Cell]) -> list[str]:
    """Options in which the settings differ."""
    asked = [setting for setting in found if setting != REFERENCE]
    return [name for name in _OPTIONS if len({getattr(setting, name) for setting in asked}) > 1]


def _named(varying: Sequence[str]) -> Iterator[str]:
    return (_OPTIONS[name] for name in varying)


def _row(setting: Setting, varying: Sequence[str]) -> list[str]:
    if setting == REFERENCE:
        return [FULL, "", *("" for _ in varying), ""]
    options = [f"{value:g}" if isinstance(value := getattr(setting, name), float) else str(value) for name in varying]
    return [setting.scorer, setting.budgets, *options, f"{setting.retention:g}"]


def _columns(likelihood: bool, results: Mapping[Setting, Cell]) -> list[str]:
    count = next(iter(results.values())).count
    return [f"perplexity of {count}", "first choice"] if likelihood else [f"right of {count}", "logprob"]


def _figures(cell: Cell, likelihood: bool) -> list[str]:
    if likelihood:
        return [
            _with_interval(math.exp(-cell.logprob), _perplexities(cell.logprob_interval), "{:.2f}"),
            percent(cell.hits),
        ]
    share = f"{cell.correct} ({100 * cell.share[0]:.0f}-{100 * cell.share[1]:.0f} %)"
    return [share, _with_interval(cell.logprob, cell.logprob_interval, "{:.2f}")]


def _perplexities(interval: Interval) -> Interval:
    return math.exp(-interval[1]), math.exp(-interval[0])


def _with_interval(value: float, interval: Interval, form: str) -> str:
    """A figure and its interval, as far as there are any."""
    if math.isnan(value):
        return "-"
    ends = "" if math.isnan(interval[0]) else f" ({' '.join(map(form.format, interval))})"
    return form.format(value) + ends


def _without_counts(line: Sequence[str]) -> list[str]:
    """A line of a comparison without right answers and their p."""
    return [*line[:-3], line[-1]]
