# SPDX-License-Identifier: Apache-2.0
"""The picture of ``tangram bench attention``: speed of every engine on every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from vllm_tangram.errors import TangramError

_COLOURS = {
    "stock": "#8d99ae",
    "ours": "#2a6f97",
    "ours-even": "#61a5c2",
    "fa3-ragged": "#e07a1f",
    "flashinfer": "#81b29a",
}
_BAR_GROUP = 0.84  # width, of 1


def plot_attention(path: Path, report: dict[str, Any]) -> None:
    """Write a PNG: per batch one bar for each engine, its height the KV cache read per second.

    Args:
        path: the file to write.
        report: of `bench.attention.measure_attention`.

    Raises:
        TangramError: the file cannot be written.

    """
    cells = [cell for cell in report["cells"] if "engines" in cell]
    names = [name for name in _COLOURS if any(name == entry["engine"] for c in cells for entry in c["engines"])]
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}):
        figure = Figure(figsize=(max(7.0, 1.1 * len(cells)), 4.8), layout="constrained")
        axes = figure.add_subplot()
        width = _BAR_GROUP / max(len(names), 1)
        for index, name in enumerate(names):
            left = (index + 0.5) * width - _BAR_GROUP / 2
            speeds = [
                (place + left, entry["gb_per_second"])
                for place, cell in enumerate(cells)
                for entry in cell["engines"]
                if entry["engine"] == name
            ]
            places, heights = zip(*speeds, strict=True)
            axes.bar(places, heights, width, color=_COLOURS[name], label=name)
        labels = [f"{cell['requests']} x {cell['tokens']}\n{cell['retention']:g}" for cell in cells]
        axes.set_xticks(range(len(cells)), labels)
        axes.set(title=f"Decode attention, {report['device']}", ylabel="GB/s of KV cache")
        axes.set_xlabel("requests x tokens, retention")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False)
        try:
            figure.savefig(path, format="png", dpi=144)
        except OSError as error:
            raise TangramError(f"--plot: {path} cannot be written: {error.strerror}") from error
