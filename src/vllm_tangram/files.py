# SPDX-License-Identifier: Apache-2.0
"""Writing a file whole or not at all, and finding out beforehand whether that could be done."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from vllm_tangram.errors import TangramError


def check_target(path: Path, name: str) -> None:
    """Find out whether a file could be written to ``path``, without touching what is there.

    Args:
        path: the file.
        name: what to call it in an error, such as the option that named it.

    Raises:
        TangramError: it is no regular file (a folder, a device, a link), or its folder cannot be written to.

    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise TangramError(f"{name} {path} is not a regular file and will not be replaced: give another name")
    temporary = _temporary(path)
    try:
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise TangramError(f"{name} {path} cannot be written: {error.strerror}") from error


def write_atomically(path: Path, data: bytes, name: str) -> None:
    """Write a file, all of it or nothing.

    Args:
        path: the file; what is there is replaced.
        data: its content.
        name: what to call it in an error.

    Raises:
        TangramError: it cannot be written; what was there is untouched.

    """
    check_target(path, name)
    temporary = _temporary(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise TangramError(f"cannot write {name} {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    # In the same folder, or the rename would be a copy; not by tempfile, whose files only their owner may read. Opened
    # only if it is new, so that no link that somebody put there is followed; hence never the name of one left behind.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
