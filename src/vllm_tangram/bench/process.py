# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own: several side by side, and the memory of each gone with it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.engine.stepper import EngineStepper

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE = 10.0  # seconds that an engine gets to end
_LOG_LINES = 15


class EngineProcess:
    """An ``EngineStepper`` in a child process; a context manager.

    The engine starts with the first ``call``. What it logs goes to a file, of which an error shows the end.

    Args:
        name: for messages.
        model: path or name.
        ours: head-group pages, or stock vLLM.
        options: further engine options.
        kv_tokens: KV memory, in tokens of full KV.
        kv_bytes: KV memory in bytes, instead of ``kv_tokens``.
        environment: variables of the child, beside those of this process.

    """

    def __init__(
        self,
        name: str,
        model: str,
        *,
        ours: bool,
        options: dict[str, Any],
        kv_tokens: int = 0,
        kv_bytes: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="tangram-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name) / "log"
        context = multiprocessing.get_context("spawn")  # an engine must not inherit threads
        self._pipe, theirs = context.Pipe()
        engine = {"model": model, "ours": ours, "options": options, "kv_tokens": kv_tokens, "kv_bytes": kv_bytes}
        arguments = (theirs, str(self._log), dict(environment or {}), engine)
        self._process = context.Process(target=_serve, args=arguments)  # no daemon: ranks are its children
        self._process.start()
        theirs.close()

    def call(self, function: Callable[Concatenate[EngineStepper, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function(stepper, ...)`` in the child; function, arguments and result must be picklable.

        Raises:
            TangramError: the engine did not start, or the function failed, or the process ended.

        """
        try:
            self._pipe.send((function, args, kwargs))
            done, result = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_PATIENCE)
            done, result = False, f"its process ended with status {self._process.exitcode}"
        if done:
            return result
        if isinstance(result, TangramError):
            raise result
        raise TangramError(f"the engine {self.name!r} failed: {result}\n{self._log_tail()}")

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-_LOG_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._folder.cleanup()


def _serve(pipe: Connection, log: str, environment: dict[str, str], engine: dict[str, Any]) -> None:
    """The child: an engine, then calls until the parent closes the pipe."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    # As many threads as vLLM gives its own CPU worker; must be set before torch is loaded.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) - 1, 1)))
    stepper: EngineStepper | None = None
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            if stepper is None:
                from vllm_tangram.engine.stepper import EngineStepper

                stepper = EngineStepper(**engine)
            answer = (True, function(stepper, *args, **kwargs))
        except Exception as error:
            answer = (False, error if isinstance(error, TangramError) else f"{type(error).__name__}: {error}")
        pipe.send(answer)
