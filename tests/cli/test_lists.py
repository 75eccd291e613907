# SPDX-License-Identifier: Apache-2.0
"""Options that take several values in one text."""

from __future__ import annotations

import pytest

from vllm_tangram.cli.lists import items, numbers, token_counts
from vllm_tangram.errors import TangramError


def test_what_stands_between_commas() -> None:
    assert items("--some", "a, b ,c") == ["a", "b", "c"]
    assert numbers("--some", "0.5, 1e-1", float) == [0.5, 0.1]
    assert token_counts("--some", "512,4k,1K") == [512, 4096, 1024]


@pytest.mark.parametrize("value", ["", " ", "1,", ",1", "1,,2"])
def test_an_empty_place(value: str) -> None:
    with pytest.raises(TangramError, match=f"--some: {value!r} names nothing, or has one comma too many"):
        numbers("--some", value, int)


@pytest.mark.parametrize("item", ["four", "k", "-1", "0", "1.5", "1kk", "16385k", "²", "\u0661"])
def test_what_is_no_number_of_tokens(item: str) -> None:
    with pytest.raises(TangramError, match=f"--some: '{item}' is no number; give some such as 4096,16k"):
        token_counts("--some", f"1k,{item}")
