# SPDX-License-Identifier: Apache-2.0
"""Where the package keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from vllm_tangram.errors import TangramError

CACHE_VARIABLE = "TANGRAM_CACHE"


def cache_dir() -> Path:
    """The cache folder: ``$TANGRAM_CACHE``, or the user's cache folder of the platform. It may not exist yet."""
    override = os.environ.get(CACHE_VARIABLE)
    return Path(override).expanduser().resolve() if override else platformdirs.user_cache_path("vllm-tangram")


def writable_cache_dir() -> Path:
    """The cache folder, made if needed, for its owner alone: whoever writes there says which tokens are kept.

    Raises:
        TangramError: it cannot be made or written to.

    """
    folder = cache_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error.strerror) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(folder, "no permission to write")
    return folder


def _unwritable(folder: Path, why: str | None) -> TangramError:
    return TangramError(
        f"cache folder {folder} cannot be used: {why}; set {CACHE_VARIABLE} to a folder that you can write to"
    )
