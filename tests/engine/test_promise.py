# SPDX-License-Identifier: Apache-2.0
"""What a long prompt holds, how many run at once, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.drive import SMALL, Engine
from vllm.v1.request import Request

from vllm_tangram.engine.setup import layout_of
from vllm_tangram.errors import TangramError

pytestmark = pytest.mark.engine

LONG = 6000
WINDOW, BLOCK = 16, 32


@pytest.mark.parametrize("retention", [0.25, 0.5, 0.1])
def test_a_long_prompt_holds_what_was_promised(
    retention: float,
    make_engine: Callable[..., Engine],
    skewed_profile: Callable[[str], str],
    token_ids: list[int],
) -> None:
    """At most retention of full KV, plus one window and one partial block per head (docs/design.md, "The promise")."""
    engine = make_engine(
        retention=0.25,
        profile=skewed_profile("keydiff"),
        scorer="keydiff",
        page_group_size=4,
        max_model_len=LONG + 64,
        kv_cache_memory_bytes=300 << 20,
        max_num_seqs=2,
    )
    plan = engine.scheduler.plan
    engine.add("long", token_ids[:LONG], 2, retention=retention)
    held = 0
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.step()
        held = max(held, engine.total_pages - engine.free_pages)
    full_kv = 30 * 3 * LONG  # tokens of all members
    floor = plan.num_groups * 4 * (-(-WINDOW // BLOCK) + 1) * BLOCK
    assert held * 4 * BLOCK <= retention * full_kv + floor
    # and no less is used than was promised to be useful
    assert held * 4 * BLOCK >= 0.9 * retention * full_kv
    # the share itself, to be read in the log: the floor is what one window and one partial block are
    print(f"retention {retention}: held {held * 4 * BLOCK / full_kv:.4f} of full KV, floor {floor / full_kv:.4f}")


def test_memory_is_foretold(
    make_engine: Callable[..., Engine],
    skewed_profile: Callable[[str], str],
    token_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What arithmetic says of a request is what it gives back when it ends."""
    engine = make_engine(scorer="snapkv", profile=skewed_profile("snapkv"), **SMALL)
    layout = layout_of(engine.llm.llm_engine.vllm_config)
    pages, held = engine.scheduler.pages, 0

    def leave(request: Request) -> None:
        nonlocal held
        held = len(pages.req_to_blocks[request.request_id])
        type(pages).leave(pages, request)

    monkeypatch.setattr(pages, "leave", leave)
    for prompt_len, new, retention in ((700, 40, None), (130, 1, 0.1), (513, 97, 0.7), (31, 2, 1.0)):
        engine.add("foretold", token_ids[:prompt_len], new, retention=retention)
        engine.run()
        foretold = engine.llm.tangram_memory(prompt_len, new, retention)
        assert foretold["pages"] == held
        assert foretold["bytes"] == held * layout.page_bytes
        assert foretold["retention"] == (0.25 if retention is None else retention)
        assert foretold["full_kv_bytes"] == 30 * 3 * -(-(prompt_len + new - 1) // BLOCK) * BLOCK * 2 * 64 * 4
    for prompt_len, new in ((0, 1), (10, -1), (1000, 25)):
        with pytest.raises(TangramError, match=r"at most 1024 tokens in all \(--max-model-len\)"):
            engine.llm.tangram_memory(prompt_len, new)
    with pytest.raises(TangramError, match=r"retention must be in"):
        engine.llm.tangram_memory(10, 1, 1.5)


def peak_running(engine: Engine, prompts: list[list[int]], max_tokens: int) -> int:
    peak = 0

    def before_step(step: int) -> None:
        nonlocal peak
        peak = max(peak, len(engine.scheduler.running))

    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, max_tokens)
    engine.run(before_step)
    return peak


def test_capacity(
    make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str], token_ids: list[int]
) -> None:
    """With the memory in which stock runs K long requests at once, retention 0.25 runs 3.5 K, without a preemption."""
    length, new = 2048, 16
    prompts = [token_ids[700 * i : 700 * i + length] for i in range(7)]
    options = {"max_model_len": 2304, "kv_cache_memory_bytes": 4352 * 30 * 3 * 2 * 64 * 4, "max_num_seqs": 16}
    stock = make_engine(stock=True, **options)
    at_once = peak_running(stock, prompts[:3], new)
    assert at_once == 2

    ours = make_engine(
        retention=0.25, scorer="keydiff", profile=skewed_profile("keydiff"), page_group_size=4, **options
    )
    assert peak_running(ours, prompts, new) >= 3.5 * at_once
    assert ours.scheduler.num_preemptions == 0
    assert ours.llm.tangram_stats()["pages_reclaimed"] == 0


def test_fits_only_when_compressed(
    make_engine: Callable[..., Engine], skewed_profile: Callable[[str], str], token_ids: list[int]
) -> None:
    engine = make_engine(
        retention=0.25,
        scorer="streaming",
        profile=skewed_profile("streaming"),
        page_group_size=4,
        chunk_size=512,
        max_model_len=2304,
        kv_cache_memory_bytes=(1024 + 400) * 30 * 3 * 2 * 64 * 4,
        max_num_seqs=4,
    )
    prompt = token_ids[:2000]
    assert engine.scheduler.plan.full_pages(len(prompt)) > engine.total_pages
    (answer,) = engine.ask([prompt], 4)
    assert len(answer.tokens) == 4

    with pytest.raises(TangramError, match=rf"needs \d+ pages at retention 1, .* has {engine.total_pages}"):
        engine.add("never", prompt, 4, retention=1.0)
    assert not engine.llm.llm_engine.has_unfinished_requests()
    assert len(engine.ask([prompt], 4)[0].tokens) == 4, "the engine serves on"


@pytest.mark.parametrize("retention", [0, -1, 1.5, "half", True, float("nan")])
def test_bad_request_retention(
    retention: object,
    make_engine: Callable[..., Engine],
    skewed_profile: Callable[[str], str],
    token_ids: list[int],
) -> None:
    engine = make_engine(scorer="snapkv", profile=skewed_profile("snapkv"), **SMALL)
    with pytest.raises(TangramError, match="retention must be"):
        engine.add("bad", token_ids[:10], 4, retention=retention)  # type: ignore[arg-type]
    assert not engine.llm.llm_engine.has_unfinished_requests()
