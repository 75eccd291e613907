# SPDX-License-Identifier: Apache-2.0
"""Pictures of benchmarks: bars by engine, lines over a quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#2a6f97", "#e07a1f", "#6a994e", "#8d5a97", "#b5838d", "#555555")


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        title: above it.
        unit: label of the y axis.
        places: labels of the x axis, or numbers for lines over a quantity.
        series: name -> value at each place; None where nothing was measured. Names appear in a legend if several.
        stacked: pile the series of a place up instead of setting them side by side.
        quantity: label of the x axis; the series are then lines.

    """

    title: str
    unit: str
    places: Sequence[str] | Sequence[float]
    series: Mapping[str, Sequence[float | None]]
    stacked: bool = False
    quantity: str = ""


def plot_panels(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write a PNG with the panels side by side.

    Raises:
        TangramError: the file cannot be written.

    """
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}):
        figure = Figure(figsize=(1 + 5 * len(panels), 4.5), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), index + 1)
            (_lines if panel.quantity else _bars)(axes, panel)
            axes.set(title=panel.title, ylabel=panel.unit, xlabel=panel.quantity)
            axes.axhline(0, linewidth=0)  # from zero, with room above the largest value
            axes.set_ylim(bottom=0)
            if len(panel.series) > 1:
                axes.legend(frameon=False)
        try:
            figure.savefig(path, format="png", dpi=144)
        except OSError as error:
            raise TangramError(f"--plot: {path} cannot be written: {error.strerror}") from error


def _bars(axes: Axes, panel: Panel) -> None:
    places = np.arange(len(panel.places))
    width = 0.8 if panel.stacked else 0.8 / len(panel.series)
    base = np.zeros(len(places))
    for number, (name, given) in enumerate(panel.series.items()):
        values = np.array([value or 0.0 for value in given])
        shift = 0.0 if panel.stacked else (number - (len(panel.series) - 1) / 2) * width
        axes.bar(places + shift, values, width, base, color=_COLORS[number % len(_COLORS)], label=name)
        base = base + values if panel.stacked else base
    axes.set_xticks(places, [str(place) for place in panel.places], rotation=30 if len(places) > 5 else 0)


def _lines(axes: Axes, panel: Panel) -> None:
    for number, (name, given) in enumerate(panel.series.items()):
        values = [np.nan if value is None else value for value in given]
        axes.plot(panel.places, values, "o-", color=_COLORS[number % len(_COLORS)], label=name)
