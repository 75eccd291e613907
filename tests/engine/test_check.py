# SPDX-License-Identifier: Apache-2.0
"""``TANGRAM_CHECK=1``: state that was corrupted on purpose is found, and the request and group at fault are named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.budget.strategies import Case, cases
from tests.engine.drive import Engine
from tests.engine.test_session_pages import BLOCK, PAGES, SCHEDULES, Traffic

from vllm_tangram.engine.check import BrokenInvariant, PageCheck, Planned, check_tables, check_wanted, places
from vllm_tangram.errors import TangramError
from vllm_tangram.pages.table import PageTable

RETENTION = 0.3


def births(kept: np.ndarray, prompt_blocks: int, count: int) -> Iterator[tuple[int, int]]:
    """(group, index) of a request's pages, by the words of docs/design.md."""
    holds = [0] * kept.shape[1]
    n = 0
    while True:
        n += 1
        for group in range(kept.shape[1]):
            if n > prompt_blocks or kept[n, group] > kept[n - 1, group]:
                if count == 0:
                    return
                count -= 1
                yield group, holds[group]
                holds[group] += 1


@given(case=cases(), count=st.integers(0, 300), data=st.data())
def test_places_are_those_of_the_birth_order(case: Case, count: int, data: st.DataObject) -> None:
    kept = case.build().kept
    blocks = data.draw(st.integers(0, len(kept) - 1))
    group, index = places(kept, blocks, count)
    assert list(zip(group.tolist(), index.tolist(), strict=True)) == list(births(kept, blocks, count))


@pytest.fixture
def traffic() -> Traffic:
    """Two running requests, "1" and "2", whose first chunks are the same."""
    traffic = Traffic()
    traffic.prompts = [()]
    for new in (70, 30):
        traffic.submit(3, RETENTION, new, 20, False)
        traffic.prompts = traffic.prompts[-1:]
        for _ in range(20):
            traffic.step(SimpleNamespace(random=lambda: 1.0, randint=min))  # type: ignore[arg-type]
            if traffic.running.get(str(traffic.number)) and _done(traffic.running[str(traffic.number)]):
                break
    one, two = (traffic.manager.req_to_blocks[name] for name in "12")
    assert one[0] is two[0], "they share a chunk"
    assert one[-1] is not two[-1]
    traffic.check.run(traffic.requests())
    return traffic


def _done(request: Any) -> bool:
    return bool(request.num_computed_tokens >= len(request.prompt))


def found(
    traffic: Traffic, message: str, *, page: tuple[str, int] | None = None, check: PageCheck | None = None
) -> None:
    """The check says what matches, of the given (request, place in its list) if there is one."""
    if page is not None:
        name, place = page
        kept = SCHEDULES[RETENTION].kept
        blocks = traffic.manager.budgets[name].prompt_len // BLOCK
        group, index = list(births(kept, blocks, place + 1))[-1]
        message = rf"request {name}, page {index} of group {group}: {message}"
    with pytest.raises(BrokenInvariant, match=f"^TANGRAM_CHECK: {message}"):
        (check or traffic.check).run(traffic.requests())


def pages(traffic: Traffic, name: str) -> list[Any]:
    return traffic.manager.req_to_blocks[name]  # type: ignore[no-any-return]


def test_a_page_of_two_requests(traffic: Traffic) -> None:
    one, two = pages(traffic, "1"), pages(traffic, "2")
    own = next(place for place, (mine, its) in enumerate(zip(one, two, strict=False)) if mine is not its)
    two[own].ref_cnt -= 1
    two[own] = one[own]
    one[own].ref_cnt += 1
    where = f"page {one[own].block_id} is also page .* of group .* of request 1"
    found(traffic, where, page=("2", own), check=PageCheck(traffic.manager))
    found(traffic, "page .* was there in the step before and is not now", page=("2", own))


def test_a_page_at_two_places(traffic: Traffic) -> None:
    """Shared as the design allows, but elsewhere in the list."""
    one, two = pages(traffic, "1"), pages(traffic, "2")
    last = len(two) - 1
    two[last].ref_cnt -= 1
    two[last] = one[0]
    one[0].ref_cnt += 1
    found(traffic, "page .* of request 1", page=("2", last), check=PageCheck(traffic.manager))


def test_a_page_twice_in_one_request(traffic: Traffic) -> None:
    one = pages(traffic, "1")
    one[-1].ref_cnt -= 1
    one[-2].ref_cnt += 1
    one[-1] = one[-2]
    found(traffic, "page .* of request 1", page=("1", len(one) - 1), check=PageCheck(traffic.manager))


@pytest.mark.parametrize("what", ["text", "retention", "caching"])
def test_what_is_shared_must_mean_the_same(traffic: Traffic, what: str) -> None:
    if what == "text":
        traffic.running["2"].block_hashes = [b"another"] * len(traffic.running["2"].block_hashes)
    elif what == "retention":
        budgets = traffic.manager.budgets
        budgets["2"] = type(budgets["2"])(**{**vars(budgets["2"]), "retention": 0.6})
    else:
        traffic.manager.enable_caching = False
    found(traffic, "page .* is also .* of request 1", page=("2", 0))


def test_the_null_page(traffic: Traffic) -> None:
    two = pages(traffic, "2")
    two[-1] = traffic.pool.blocks[0]
    found(traffic, "holds page 0", page=("2", len(two) - 1), check=PageCheck(traffic.manager))


def test_a_page_too_few(traffic: Traffic) -> None:
    lost = pages(traffic, "2").pop()
    count = len(pages(traffic, "2"))
    fault = f"holds {count} pages, not {count + 1}, after .* at retention {RETENTION}; the first page too few"
    found(traffic, fault, page=("2", count), check=PageCheck(traffic.manager))
    found(traffic, f"page {lost.block_id} was there", page=("2", count))


def test_a_page_too_many(traffic: Traffic) -> None:
    count = len(pages(traffic, "1"))
    pages(traffic, "1").extend(traffic.pool.get_new_blocks(1))
    found(traffic, f"holds {count + 1} pages, not {count}, .* too many", page=("1", count))


def test_a_page_that_leaks(traffic: Traffic) -> None:
    page = pages(traffic, "2")[-1]
    traffic.end(traffic.running["2"])
    page.ref_cnt += 1
    found(traffic, f"the pool counts 1 holders of page {page.block_id}, there are 0; the last one was request 2")


def test_a_page_that_others_may_take(traffic: Traffic) -> None:
    pages(traffic, "1")[-1].ref_cnt -= 1
    found(traffic, "the pool counts 0 holders of page .*, there are 1", page=("1", len(pages(traffic, "1")) - 1))


def test_a_page_that_nobody_can_take(traffic: Traffic) -> None:
    traffic.pool.free_block_queue.popleft()
    taken = len({page.block_id for name in "12" for page in pages(traffic, name)})
    found(traffic, f"{PAGES - 2 - taken} of {PAGES - 1} pages are free although requests hold {taken}")


def test_requests_that_are_gone_or_unknown(traffic: Traffic) -> None:
    request = traffic.running.pop("2")
    found(traffic, "request 2 ended, but is still announced")
    traffic.manager.withdraw("2")
    found(traffic, r"request 2 ended and holds \d+ pages")
    traffic.running["2"] = request
    found(traffic, "request 2 was never announced")


def test_a_prompt_of_another_length(traffic: Traffic) -> None:
    traffic.running["2"].num_prompt_tokens += 1
    found(traffic, "was announced with .* prompt tokens", page=("2", 0))


@pytest.fixture
def worker() -> SimpleNamespace:
    """What a worker knows of two requests in slots 2 and 0, and what was planned."""
    schedule = SCHEDULES[RETENTION]
    prompts = {"a": 100, "b": 40}
    rng, planned = Random(1), {}
    free = rng.sample(range(1, 500), 200)
    flat, counts = np.zeros((2, 64), np.int32), np.zeros(2, np.int32)
    table = PageTable(3, schedule.kept.shape[1], 16, block_size=BLOCK, group_size=2)
    slots = np.array([2, 0], np.int32)
    for row, (name, prompt_len) in enumerate(prompts.items()):
        count = schedule.num_pages(prompt_len + 20, prompt_len)
        ids = np.array([free.pop() for _ in range(count)], np.int32)
        planned[name] = Planned(prompt_len, RETENTION, ids)
        flat[row, :count], counts[row] = ids, count
        table.open(int(slots[row]), prompt_len, schedule.kept)
    table.ingest_all(slots, np.arange(2, dtype=np.int32), flat, counts)
    plan = SimpleNamespace(schedule=SCHEDULES.__getitem__, block_size=BLOCK)

    def check() -> None:
        check_tables(planned, plan, table, list(prompts), slots, flat, counts)  # type: ignore[arg-type]

    check()
    return SimpleNamespace(planned=planned, flat=flat, counts=counts, table=table, check=check)


def test_a_page_table_with_another_page(worker: SimpleNamespace) -> None:
    for group, index in set(births(SCHEDULES[RETENTION].kept, 40 // BLOCK, worker.counts[1])):
        page = worker.table.pages[0, group, index]
        worker.table.pages[0, group, index] = 499
        fault = (
            f"request b, page {index} of group {group}: the worker's page table has 499, the scheduler planned {page}"
        )
        with pytest.raises(BrokenInvariant, match=fault):
            worker.check()
        worker.table.pages[0, group, index] = page
    worker.check()


def test_a_page_list_that_differs(worker: SimpleNamespace) -> None:
    worker.flat[0, 5] += 1
    with pytest.raises(BrokenInvariant, match=r"request a, .*: the worker's page list has"):
        worker.check()
    worker.flat[0, 5] -= 1
    worker.counts[1] -= 1
    with pytest.raises(BrokenInvariant, match=r"request b, .* has no page, the scheduler planned \d+"):
        worker.check()
    worker.counts[1] += 2
    with pytest.raises(BrokenInvariant, match=r"request b, .* has 0, the scheduler planned no page"):
        worker.check()


def test_a_request_that_was_not_planned(worker: SimpleNamespace) -> None:
    del worker.planned["b"]
    with pytest.raises(BrokenInvariant, match="request b is in the batch, but holds no pages"):
        worker.check()


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANGRAM_CHECK", raising=False)
    assert not check_wanted()
    for value, wanted in (("0", False), ("", False), ("1", True)):
        monkeypatch.setenv("TANGRAM_CHECK", value)
        assert check_wanted() == wanted
    monkeypatch.setenv("TANGRAM_CHECK", "yes")
    with pytest.raises(TangramError, match="TANGRAM_CHECK must be 0 or 1, got 'yes'"):
        check_wanted()


@pytest.mark.engine
def test_an_engine_finds_what_goes_wrong(
    make_engine: Callable[..., Engine],
    skewed_profile: Callable[[str], str],
    token_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its scheduler, and in its worker before the forward; what is right is not complained about."""
    from tests.engine.drive import SMALL

    engine = make_engine(**SMALL, scorer="snapkv", profile=skewed_profile("snapkv"))
    scheduler, runner = engine.scheduler, engine.runner
    monkeypatch.setattr(scheduler, "check", PageCheck(scheduler.pages))
    engine.ask([token_ids[:300], token_ids[:500], token_ids[700:740]], 20)
    engine.ask([token_ids[:400], token_ids[:500]], 20)

    engine.add("x", token_ids[:200], 50)
    for _ in range(6):
        engine.step()
    (request,) = scheduler.requests
    table = runner.page_table.pages
    slot = runner._slot_of[request]
    table[slot, 5, 0] += 1
    with pytest.raises(
        BrokenInvariant, match=rf"request {re.escape(request)}, page 0 of group 5: the worker's page table"
    ):
        engine.step()
    table[slot, 5, 0] -= 1
    engine.llm.llm_engine.abort_request(["x"])
    monkeypatch.setattr(scheduler, "check", PageCheck(scheduler.pages))
    assert len(engine.ask([token_ids[:100]], 5)[0].tokens) == 5, "the engine, which other tests use, is whole again"
    assert engine.free_pages == engine.total_pages
