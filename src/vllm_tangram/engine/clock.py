# SPDX-License-Identifier: Apache-2.0
"""Where the host's time of an engine step goes, and how much a step computes: for benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SCHEDULE, MODEL, UPDATE = "schedule", "model", "update"
PARTS = (SCHEDULE, MODEL, UPDATE)


class StepClock:
    """Times the calls that an in-process engine core makes in a step. It wraps them on these objects alone.

    ``model`` is the runner's call: on CUDA it prepares inputs and launches, and does not wait for the GPU; on the CPU
    it is the model itself. With several ranks it is handing the step to their processes.

    Attributes:
        rows: requests of the batch that was scheduled last.
        tokens: tokens of that batch.
        seconds: part -> seconds since the last ``take``.

    """

    def __init__(self, scheduler: Any, executor: Any) -> None:
        self.rows = self.tokens = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._wrap(scheduler, "schedule", SCHEDULE, self._scheduled)
        self._wrap(executor, "execute_model", MODEL)
        self._wrap(executor, "sample_tokens", MODEL)
        self._wrap(scheduler, "update_from_output", UPDATE)

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken

    def _scheduled(self, output: Any) -> None:
        self.rows, self.tokens = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens

    def _wrap(self, owner: Any, name: str, part: str, seen: Callable[[Any], None] = lambda _: None) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            self.seconds[part] += time.perf_counter() - start
            seen(result)
            return result

        setattr(owner, name, timed)
