# SPDX-License-Identifier: Apache-2.0
"""Options."""

from __future__ import annotations

import pytest

from vllm_tangram.config import TangramConfig
from vllm_tangram.errors import TangramError


def test_every_wrong_option_is_named_as_on_the_command_line() -> None:
    with pytest.raises(TangramError) as error:
        TangramConfig.parse({"retention": 2, "page_group_size": 0, "scorer": "x", "colour": 1, "session_ttl": -1})
    for option in ("--retention", "--page-group-size", "--scorer", "--colour", "--session-ttl"):
        assert option in str(error.value)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "soon", None])
def test_a_time_to_live_is_a_number_of_seconds(value: object) -> None:
    with pytest.raises(TangramError, match="--session-ttl: Input should be "):
        TangramConfig.parse({"session_ttl": value})


@pytest.mark.parametrize(("retention", "floor", "lowest"), [(0.25, 0.05, 0.05), (0.1, 0.5, 0.1), (0.01, 0.05, 0.01)])
def test_a_request_may_ask_for_what_the_server_does(retention: float, floor: float, lowest: float) -> None:
    config = TangramConfig(retention=retention, retention_floor=floor)
    assert config.request_retention(lowest) == lowest
    assert config.request_retention(1) == 1.0
    with pytest.raises(TangramError, match=rf"in \[{lowest:g}, 1\]"):
        config.request_retention(lowest * 0.9)
