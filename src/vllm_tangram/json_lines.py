# SPDX-License-Identifier: Apache-2.0
"""Files with a JSON object a line, from wherever a user has them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_tangram.errors import TangramError


def read_json_lines(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place for messages: "FILE, line N". Blank lines are skipped.

    Args:
        path: gzipped if its name ends in ``.gz``.
        name: what to call it in an error, such as the option that named it.

    Raises:
        TangramError: names the file, and the line where one is wrong.

    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _object(line, f"{name}: {where}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TangramError(f"{name}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TangramError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise TangramError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record
