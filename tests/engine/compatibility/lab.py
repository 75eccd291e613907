# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM beside ours, as engines and as servers: what the checks of docs/compatibility.md are made with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.engine.drive import Engine
from tests.serving import STOCK, Server, serving

from vllm_tangram.errors import TangramError

Ask = Callable[[Any], Any]

#: Options of both engines; ours keeps everything, so it must answer as stock does.
BOTH: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 4096,  # a prompt a step: stock cannot draw with a seed after half of one, on a CPU
    "kv_cache_memory_bytes": 32 << 20,
}
OURS: dict[str, Any] = {"retention": 1.0, "budgets": "uniform", "chunk_size": 64, "window": 16, "page_group_size": 4}
SERVED = "small"
TOLERANCE = 1e-4  # of log-probabilities in float32


@dataclass
class Lab:
    """What a check may use.

    Attributes:
        model: a small random model with one token per byte.
        folder: an empty folder.
        shared: engines and servers that several checks use; they run until it is closed.

    """

    model: Path
    folder: Path
    shared: Shared

    def same(
        self, ask: Ask, *, tolerance: float = TOLERANCE, ours: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        """Both engines give the same answer, which is returned.

        Args:
            ask: a list, dictionary, number or text from an ``LLM``.
            tolerance: of the numbers in it that are no integers.
            ours: further options of our engine.
            options: further options of both; without any the engines are shared.

        """
        with ExitStack() as own:
            if options or self.shared.engines is None:
                pair = self._start(self.shared.stack if not options else own, ours or {}, options)
                self.shared.engines = self.shared.engines if options else pair
            else:
                pair = self.shared.engines
            answer = ask(pair[1].llm)
            assert_equal(answer, ask(pair[0].llm), tolerance)
            assert pair[1].free_pages == pair[1].total_pages
        return answer

    def _start(self, stack: ExitStack, ours: dict[str, Any], options: dict[str, Any]) -> tuple[Engine, Engine]:
        import vllm

        import vllm_tangram

        stock = Engine(vllm.LLM(str(self.model), **{**BOTH, **options}))
        stack.callback(stock.close)
        mine = Engine(vllm_tangram.LLM(str(self.model), **{**BOTH, **OURS, **options, **ours}))
        stack.callback(mine.close)
        return stock, mine

    def served(self, ask: Callable[[Server], Any]) -> Any:
        """Both servers give the same answer, which is returned."""
        if self.shared.servers is None:
            tools = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
            options = [f"--model={self.model}", *_command_line(BOTH), *tools]
            ours = self.shared.stack.enter_context(
                serving(self.folder, [*options, *_command_line(OURS)], model=SERVED, environment={"TANGRAM_CHECK": "1"})
            )
            folder = self.folder / "stock"
            folder.mkdir()
            stock = self.shared.stack.enter_context(serving(folder, options, model=SERVED, command=STOCK))
            self.shared.servers = stock, ours
        stock, ours = self.shared.servers
        answer = ask(ours)
        assert_equal(answer, ask(stock), TOLERANCE)
        return answer

    def refused(self, message: str, model: Path | None = None, **options: Any) -> None:
        """Ours says why it does not start, in one line."""
        import vllm_tangram

        with pytest.raises(TangramError, match=message) as error:
            vllm_tangram.LLM(str(model or self.model), **{**BOTH, **OURS, **options})
        assert "\n" not in str(error.value)


@dataclass
class Shared:
    """(stock, ours) of what several checks use."""

    stack: ExitStack = field(default_factory=ExitStack)
    engines: tuple[Engine, Engine] | None = None
    servers: tuple[Server, Server] | None = None


def _command_line(options: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]


def assert_equal(ours: Any, stock: Any, tolerance: float) -> None:
    if isinstance(stock, dict):
        assert ours.keys() == stock.keys()
        for name in stock:
            assert_equal(ours[name], stock[name], tolerance)
    elif isinstance(stock, list | tuple):
        assert len(ours) == len(stock)
        for mine, theirs in zip(ours, stock, strict=True):
            assert_equal(mine, theirs, tolerance)
    elif isinstance(stock, float):
        assert ours == pytest.approx(stock, abs=tolerance, rel=0)
    else:
        assert ours == stock
