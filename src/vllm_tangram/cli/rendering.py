# SPDX-License-Identifier: Apache-2.0
"""What all commands share to print: tables for people, one JSON object for programs, errors on stderr."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """A console on the stdout of this moment (tests and pipes replace it)."""
    return Console(highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """One red line on stderr."""
    line = Text.assemble(("error: ", "bold red"), (message, "red"))
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout. Numbers that JSON lacks (NaN, infinity) become null."""
    print(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def finite(value: Any) -> Any:
    """The same JSON value with None instead of numbers that JSON lacks."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: bool = True) -> Table:
    """A plain table: the first column to the left, the others to the right where they are numbers.

    Columns without names make a table without a head.
    """
    result = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        show_header=any(columns),
    )
    for index, column in enumerate(columns):
        result.add_column(column, justify="right" if numeric and index else "left", header_style="dim", overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell) for cell in row))
    return result


def human_bytes(count: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_tokens(count: int) -> str:
    """``16384`` -> ``"16k"``; a count that is not a whole number of 1024s as it is."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


def percent(fraction: float) -> str:
    """``0.25`` -> ``"25.0 %"``; not a number -> ``"-"``."""
    return f"{100 * fraction:.1f} %" if math.isfinite(fraction) else "-"
