# SPDX-License-Identifier: Apache-2.0
"""The picture of a retention profile: budgets per head, what grouping adds, what prompts hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vllm_tangram.cli.rendering import human_tokens
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from vllm_tangram.budget import RetentionPlan

_HEAD = "#2a6f97"
_GROUP = "#e07a1f"


def plot_profile(
    path: Path, *, title: str, budgets: NDArray[np.float64], plan: RetentionPlan, tokens: NDArray[np.int64]
) -> None:
    """Write a PNG with three panels.

    Args:
        path: the file to write.
        title: one line above the panels.
        budgets: [L, H] budget of each member at the retention of ``plan``.
        plan: gives the head groups and the held fractions.
        tokens: [T] prompt lengths of the third panel, ascending.

    Raises:
        TangramError: the file cannot be written.

    """
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.15))
        _heat_map(figure, figure.add_subplot(grid[0, :]), budgets)
        _sorted_budgets(figure.add_subplot(grid[1, 0]), budgets, plan)
        _held(figure.add_subplot(grid[1, 1]), plan, tokens)
        try:
            figure.savefig(path, format="png", dpi=144)
        except OSError as error:
            raise TangramError(f"--plot: {path} cannot be written: {error.strerror}") from error


def _heat_map(figure: Figure, axes: Axes, budgets: NDArray[np.float64]) -> None:
    image = axes.imshow(budgets.T, aspect="auto", cmap="viridis", vmin=0, origin="lower")
    figure.colorbar(image, ax=axes, label="fraction of tokens", pad=0.01)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="Budget of each KV head", xlabel="layer", ylabel="KV head")


def _sorted_budgets(axes: Axes, budgets: NDArray[np.float64], plan: RetentionPlan) -> None:
    """Members in the order of their groups, so that the area between the curves is what grouping adds."""
    flat, group = budgets.ravel(), plan.groups.group.ravel()
    of_group = plan.groups.group_max(flat)
    order = np.lexsort((flat, group, of_group[group]))
    ranks = np.arange(flat.size)
    axes.fill_between(ranks, of_group[group][order], step="mid", color=_GROUP, alpha=0.25, linewidth=0)
    axes.step(ranks, of_group[group][order], where="mid", color=_GROUP, label=f"group of {plan.groups.size}")
    axes.plot(ranks, flat[order], ".", markersize=3, color=_HEAD, label="KV head")
    axes.set(title="Budgets in the order of the groups", xlabel="KV heads of all layers", ylabel="fraction of tokens")
    axes.set_xlim(0, max(flat.size - 1, 1))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


def _held(axes: Axes, plan: RetentionPlan, tokens: NDArray[np.int64]) -> None:
    held = [plan.held_fraction(int(count)) for count in tokens]
    retention = plan.config.retention
    axes.plot(tokens, held, color=_HEAD)
    axes.axhline(retention, color="#555555", linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"retention {retention:g}",
        (1, retention),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        color="#555555",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda count, _: human_tokens(round(count)))
    axes.set_xlim(tokens[0], tokens[-1])
    axes.set_ylim(0, 1.02 * max(1.0, *held))
    axes.set(title="KV cache that a prompt holds", xlabel="prompt tokens", ylabel="fraction of the full KV cache")
