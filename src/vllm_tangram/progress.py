# SPDX-License-Identifier: Apache-2.0
"""Progress bars on stderr, for what takes minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class StartBar(Protocol):
    """Starts a bar."""

    def __call__(self, what: str, times: int, done: int = 0) -> Callable[[], None]:
        """What is done, how often, how often before; what it gives is called after every time."""
        ...


@contextmanager
def progress_bars() -> Iterator[StartBar]:
    """Show bars while the block runs; what it gives starts one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def start(what: str, times: int, done: int = 0) -> Callable[[], None]:
            bar = progress.add_task(what, total=times, completed=done)
            return lambda: progress.advance(bar)

        yield start
