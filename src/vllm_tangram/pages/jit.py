# SPDX-License-Identifier: Apache-2.0
"""The one way this package compiles a loop: no Python objects, cached on disk, without the interpreter lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., object])

    def jit(function: F) -> F:
        """Compile ``function`` with numba; to the type checker it stays what it was."""
        return function

else:
    import numba
    from llvmlite.binding.ffi import lib

    jit = numba.njit(cache=True, nogil=True)

    # vLLM's CPU worker asks every object of every module for ``__dict__["kernel"]`` before it starts. llvmlite's
    # library wrapper answers any attribute, ``__dict__`` too, with a C function, and the engine's start fails. An entry
    # in its function table makes that answer an empty dictionary.
    lib._fntab.setdefault("__dict__", {})
