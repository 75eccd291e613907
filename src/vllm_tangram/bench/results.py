# SPDX-License-Identifier: Apache-2.0
"""Results of a benchmark that is measured in several runs: one JSON file, merged engine by engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_tangram.errors import TangramError


class Results:
    """Figures by engine, written to a file whenever one is added.

    Attributes:
        report: ``{"benchmark": ..., "setup": {...}, "engines": {key: figures}}``, JSON values only.

    """

    def __init__(self, benchmark: str, setup: Mapping[str, Any], path: Path | None) -> None:
        """Read what the file holds already.

        Args:
            benchmark: name of the command.
            setup: what decides the figures; must be the same in all runs.
            path: the file; None keeps everything in memory.

        Raises:
            TangramError: the file cannot be read or written, or holds figures of another benchmark or setup.

        """
        # Through JSON and back, so that a tuple equals the list that it is in the file.
        self.report: dict[str, Any] = {"benchmark": benchmark, "setup": json.loads(json.dumps(setup)), "engines": {}}
        self._path = path
        if path is None:
            return
        if not path.resolve().parent.is_dir():
            raise TangramError(f"--output: there is no folder {path.resolve().parent}")
        if path.exists():
            self.report["engines"] = self._read(path)
        self._write()

    def add(self, key: str, figures: Mapping[str, Any]) -> None:
        """Add an engine, or replace what was known of it.

        Raises:
            TangramError: the file cannot be written.

        """
        self.report["engines"][key] = dict(figures)
        self._write()

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text())
            benchmark, setup, engines = found["benchmark"], dict(found["setup"]), dict(found["engines"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TangramError(f"--output: {path} exists and holds no results of `tangram bench`: {error}") from None
        ours = {"benchmark": self.report["benchmark"], **self.report["setup"]}
        theirs = {"benchmark": benchmark, **setup}
        different = [
            f"{name} {theirs.get(name)!r} there, {ours.get(name)!r} here"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
        if different:
            raise TangramError(f"--output: {path} holds results of another setup ({'; '.join(different)})")
        return engines

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            self._path.write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise TangramError(f"--output: {self._path} cannot be written: {error.strerror}") from error
