# SPDX-License-Identifier: Apache-2.0
"""Options that take several values in one text, with commas between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm_tangram.errors import TangramError

_N = TypeVar("_N", int, float)
_MOST_TOKENS = 1 << 24


def items(option: str, value: str) -> list[str]:
    """The texts between the commas.

    Raises:
        TangramError: one is empty.

    """
    found = [item.strip() for item in value.split(",")]
    if not all(found):
        raise TangramError(f"{option}: {value!r} names nothing, or has one comma too many")
    return found


def numbers(option: str, value: str, kind: Callable[[str], _N], example: str = "1,2") -> list[_N]:
    """The numbers between the commas.

    Args:
        option: for messages.
        value: what was given.
        kind: makes one of a text, or raises ValueError.
        example: of such a list.

    Raises:
        TangramError: an item is not of the kind, or empty.

    """
    found = []
    for item in items(option, value):
        try:
            found.append(kind(item))
        except ValueError:
            raise TangramError(f"{option}: {item!r} is no number; give some such as {example}") from None
    return found


def token_counts(option: str, value: str) -> list[int]:
    """Numbers of tokens between the commas, such as 4096 or 4k.

    Raises:
        TangramError: as ``numbers``.

    """
    return numbers(option, value, _token_count, "4096,16k")


def _token_count(text: str) -> int:
    digits = text.lower().removesuffix("k")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(text)
    count = int(digits) * (1024 if digits != text.lower() else 1)
    if not 0 < count <= _MOST_TOKENS:
        raise ValueError(text)
    return count
