# SPDX-License-Identifier: Apache-2.0
"""Retention 1 is stock vLLM, token for token, whatever the page group size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tests.engine.drive import Answer, Engine

pytestmark = pytest.mark.engine

LENGTHS = (1, 2, 31, 33, 700, 1024, 2500, 6000)
CHUNK = 1024
NEW_TOKENS = 12
OPTIONS = {"max_model_len": 6144, "kv_cache_memory_bytes": 700 << 20, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def prompts(token_ids: list[int]) -> list[list[int]]:
    return [token_ids[1000 * number : 1000 * number + length] for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def start_stock(make_engine: Callable[..., Engine]) -> Callable[[], Engine]:
    """Start stock vLLM, or give the running one: engines that were not used for long are stopped."""
    return lambda: make_engine(stock=True, max_num_batched_tokens=CHUNK + 8, **OPTIONS)


@pytest.fixture(scope="module")
def stock(start_stock: Callable[[], Engine], prompts: list[list[int]]) -> list[Answer]:
    engine = start_stock()
    answers = [engine.ask([prompt], NEW_TOKENS)[0] for prompt in prompts]
    assert not any(answer.cached for answer in answers), "no prompt begins like another"
    return answers


def assert_equal(ours: list[Answer], stock: list[Answer], lengths: Sequence[int] = LENGTHS) -> None:
    for length, mine, theirs in zip(lengths, ours, stock, strict=True):
        assert mine.tokens == theirs.tokens, f"prompt of {length} tokens"
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4), f"prompt of {length} tokens"


@pytest.fixture(scope="module")
def ours(make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str]) -> Callable[[int], Engine]:
    """An engine at retention 1 whose groups are those of a profile: pages are shared by heads of different layers."""

    def start(group_size: int) -> Engine:
        return make_engine(
            retention=1.0,
            scorer="snapkv",
            profile=skewed_profile("snapkv"),
            page_group_size=group_size,
            chunk_size=CHUNK,
            **OPTIONS,
        )

    return start


@pytest.mark.parametrize("group_size", [1, 3, 4, 9])
def test_batched(group_size: int, ours: Callable[[int], Engine], prompts: list[list[int]], stock: list[Answer]) -> None:
    """4 does not divide the model's 90 members: the last group is padded."""
    engine = ours(group_size)
    groups = engine.scheduler.plan.groups
    assert groups.num_groups == -(-90 // group_size)
    mixed = [len({layer for layer, _ in groups.members(group)}) > 1 for group in range(groups.num_groups)]
    assert sum(mixed) > 0.8 * groups.num_groups or group_size == 1
    assert_equal(engine.ask(prompts, NEW_TOKENS), stock)


def test_alone(ours: Callable[[int], Engine], prompts: list[list[int]], stock: list[Answer]) -> None:
    engine = ours(4)
    assert_equal([engine.ask([prompt], NEW_TOKENS)[0] for prompt in prompts], stock)


def test_a_conversation_with_reuse_is_that_of_stock_with_its_prefix_cache(
    ours: Callable[[int], Engine], start_stock: Callable[[], Engine], token_ids: list[int]
) -> None:
    """Both begin each turn with what the turns before left: stock with whole blocks, ours with whole chunks."""
    engine = ours(4)
    history, prompts = [], []
    mine: list[Answer] = []
    for turn, new in enumerate((900, 200, 1, 1100, 100)):
        prompts.append(history + token_ids[90_000 + 2000 * turn :][:new])
        mine += engine.ask([prompts[-1]], NEW_TOKENS)
        history = prompts[-1] + mine[-1].tokens
    stock_engine = start_stock()
    theirs = [stock_engine.ask([prompt], NEW_TOKENS)[0] for prompt in prompts]
    assert_equal(mine, theirs, list(map(len, prompts)))
    assert [answer.cached for answer in mine] == [0, 0, 1024, 1024, 2048]
    assert all(answer.cached > 800 for answer in theirs[1:])
