# SPDX-License-Identifier: Apache-2.0
"""What expires, what is listed and what is dropped; no engine: vLLM's page pool, or pages that only count holders."""

from __future__ import annotations

from argparse import Namespace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.engine.test_session_pages import Traffic
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins
from vllm.v1.core.block_pool import BlockPool

from vllm_tangram.engine.control import DROP, LIST, install_endpoints
from vllm_tangram.engine.manager import HeadGroupManager, RequestBudget
from vllm_tangram.engine.sessions import Key, SessionCache

CHUNK = 100
TTL = 60.0


class Pages(list[Any]):
    """A page list; ``held`` of them from the beginning are in use."""

    def hold(self, held: int) -> None:
        for index, page in enumerate(self):
            page.ref_cnt = int(index < held)


class Cache:
    """A ``SessionCache`` with a clock that stands still, filled by made-up conversations of one page per chunk."""

    def __init__(self, ttl: float = TTL, host_pages: int = 0) -> None:
        self.now = 1000.0
        self.cache = SessionCache(ttl, lambda: self.now, host_pages)
        self.pages = 0

    def key(self, text: str, retention: float = 0.25) -> Key:
        return text.encode(), retention

    def say(self, text: str, *, known: int = 0, first: Pages | None = None, retention: float = 0.25) -> Pages:
        """A request computes the prefix ``text``, a letter a chunk; its first ``known`` chunks are in ``first``."""
        pages = Pages((first or ())[:known])
        for end in range(known + 1, len(text) + 1):
            self.pages += 1
            pages.append(SimpleNamespace(block_id=self.pages, ref_cnt=1))
            parent = self.key(text[: end - 1], retention) if end > 1 else None
            self.cache.remember(self.key(text[:end], retention), CHUNK * end, pages, end, parent, end - 1)
        return pages

    def end(self, text: str, pages: Pages) -> None:
        pages.hold(0)
        found = self.cache.find([self.key(text)])
        assert found is not None
        self.cache.used(found.longest)

    def begin(self, text: str) -> Pages:
        """A request begins with what is in the pool of it."""
        found = self.cache.find([self.key(text)])
        assert found is not None
        pages = Pages(found.pages)
        self.cache.began_with(found.longest, pages)
        return pages

    def known(self) -> set[str]:
        self.cache.expire()
        return {checkpoint.key[0].decode() for checkpoint in self.cache.checkpoints()}

    def hand_out(self, pages: Pages) -> None:
        """To others, from the end on."""
        pages.hold(0)
        self.cache.handed_out(reversed(pages))

    def on_host(self) -> set[str]:
        known = self.known()
        return {text for text in known if self.key(text) in self.cache.host}

    def restore(self, text: str) -> Pages:
        """A request begins with all of it."""
        hit = self.cache.find([self.key(text)])
        assert hit is not None
        pages = Pages(hit.pages)
        for _ in range(len(text) - len(pages)):
            self.pages += 1
            pages.append(SimpleNamespace(block_id=self.pages, ref_cnt=1))
        self.cache.restore(hit, pages)
        return pages

    def ids(self) -> dict[str, str]:
        """Text of a session -> its id; the texts differ in length."""
        texts = self.known()
        ends = {CHUNK * len(text): text for text in texts if not any(other[:-1] == text for other in texts)}
        return {ends[session.tokens]: session.id for session in self.cache.listing()}


def test_what_nobody_uses_expires() -> None:
    made = Cache()
    made.end("ab", made.say("ab"))
    made.now += TTL - 1
    made.end("xyz", made.say("xyz"))
    assert made.known() == {"a", "ab", "x", "xy", "xyz"}
    made.now += 1
    assert made.known() == {"x", "xy", "xyz"}
    assert made.cache.find([made.key("ab"), made.key("a")]) is None
    made.now += TTL
    assert made.known() == set()
    assert made.cache.evicted == 0


def test_without_a_time_to_live_nothing_expires() -> None:
    made = Cache(ttl=0)
    made.end("ab", made.say("ab"))
    made.now += 1e9
    assert made.known() == {"a", "ab"}
    assert made.cache.listing()[0].idle_seconds == 1e9


def test_beginning_with_a_state_is_a_use_of_all_that_it_extends() -> None:
    made = Cache()
    made.end("abc", made.say("abc"))
    made.now += TTL - 1
    made.begin("ab")
    made.now += 1
    assert made.known() == {"a", "ab"}
    made.now += TTL - 1
    assert made.known() == set()


def test_what_a_request_begins_with_shares_its_page_list() -> None:
    """As far as it is in these very pages; or every turn of a conversation would leave a list behind."""
    made = Cache()
    made.say("abc")
    whole = made.say("xyz")
    first, second = made.say("s"), made.say("st")  # two requests computed the same beginning
    begun, other = made.begin("ab"), made.begin("st")
    lists = {checkpoint.key[0].decode(): checkpoint.pages for checkpoint in made.cache.checkpoints()}
    assert lists["a"] is lists["ab"] is begun
    assert lists["abc"] is not begun
    assert lists["abc"][:2] == begun
    assert lists["xyz"] is lists["x"] is whole
    assert (lists["s"], lists["st"]) == (first, second)
    assert lists["s"] is first
    assert lists["st"] is other


def test_what_a_request_holds_is_in_use() -> None:
    """Also a state that was computed long before the request ends; and the time to live counts from that end."""
    made = Cache()
    pages = made.say("abc")
    made.now += 10 * TTL
    assert made.known() == {"a", "ab", "abc"}
    assert made.cache.listing()[0].idle_seconds == 0
    pages.hold(1)
    made.now += TTL
    assert made.known() == {"a"}
    made.end("a", pages)
    made.now += TTL - 1
    assert made.known() == {"a"}
    made.now += 1
    assert made.known() == set()


def test_the_longest_expires_first() -> None:
    """Computed a chunk at a time; in no order of expiry is a state without those that it extends."""
    random = Random(3)
    made = Cache()
    for turn in range(200):
        text = "".join(random.choices("ab", k=random.randrange(1, 7)))
        known = next((n for n in range(len(text), 0, -1) if made.cache.find([made.key(text[:n])])), 0)
        if known:
            made.begin(text[:known])
        pages = made.say(text, known=known, first=Pages(SimpleNamespace(block_id=-i, ref_cnt=1) for i in range(known)))
        made.now += random.random()
        made.end(text, pages)
        made.now += random.choice([0, 1, TTL / 4])
        known_texts = made.known()
        assert all(text[:-1] in known_texts for text in known_texts if len(text) > 1)
        if turn > 100:
            assert 0 < len(known_texts) < 126


def test_listing() -> None:
    made = Cache()
    shared = made.say("ab")
    made.begin("a")
    made.end("ab", shared)
    made.now += 5
    made.begin("ab")
    made.end("abcde", made.say("abcde", known=2, first=shared))
    made.now += 2
    made.begin("ab")
    made.say("abf", known=2, first=shared)
    made.now += 3
    last, first = made.cache.listing()
    assert (last.tokens, last.retention, last.pages, last.idle_seconds, last.hits) == (300, 0.25, 3, 0, 3)
    assert (first.tokens, first.retention, first.pages, first.idle_seconds, first.hits) == (500, 0.25, 5, 5, 3)
    assert last.id != first.id
    assert all(len(session.id) == 16 and int(session.id, 16) >= 0 for session in (last, first))


def test_an_id_is_of_a_text_and_a_retention() -> None:
    made, other = Cache(), Cache()
    made.say("ab")
    made.say("ab", retention=0.5)
    other.say("xy")
    other.say("ab")
    ours, theirs = ({session.id for session in each.cache.listing()} for each in (made, other))
    assert len(ours) == len(theirs) == 2
    assert len(ours & theirs) == 1


def test_dropping_leaves_what_others_extend() -> None:
    made = Cache()
    shared = made.say("ab")
    made.say("abcde", known=2, first=shared)
    made.say("abfg", known=2, first=shared)
    ids = made.ids()
    assert set(ids) == {"abcde", "abfg"}
    assert made.cache.drop([ids["abcde"]]) == (1, [])
    assert made.known() == {"a", "ab", "abf", "abfg"}
    assert made.cache.drop([ids["abcde"], ids["abfg"], "0" * 16]) == (0, [ids["abcde"], "0" * 16])
    assert made.known() == {"a", "ab", "abf", "abfg"}
    assert made.cache.drop([ids["abfg"], ids["abfg"]]) == (1, [])
    assert made.known() == set()
    assert made.cache.listing() == []
    made.say("ab")
    assert [session.tokens for session in made.cache.listing()] == [200]


def test_dropping_all() -> None:
    made = Cache()
    assert made.cache.drop() == (0, [])
    shared = made.say("ab")
    made.say("abc", known=2, first=shared)
    made.say("xyzt")
    assert made.cache.drop([]) == (0, [])
    assert made.cache.drop() == (2, [])
    assert len(made.cache) == 0


def test_a_state_that_was_dropped_and_computed_again_outlives_its_old_pages() -> None:
    made = Cache()
    old = made.say("ab")
    made.cache.drop()
    new = made.say("ab")
    made.cache.handed_out(old)
    assert made.known() == {"a", "ab"}
    assert made.cache.evicted == 0
    made.cache.handed_out(new)
    assert made.known() == set()
    assert made.cache.evicted == 2


def test_the_host_gives_up_the_longest_of_what_left_the_pool_first() -> None:
    made = Cache(host_pages=4)
    made.hand_out(made.say("ab"))
    assert made.on_host() == made.known() == {"a", "ab"}
    pages = made.restore("ab")
    assert made.on_host() == {"a", "ab"}
    made.hand_out(made.say("abc", known=2, first=pages))
    assert made.on_host() == {"a", "ab", "abc"}
    assert len(made.cache.take_copies().runs) == 3, "out, back, and only the new one out"
    made.hand_out(made.say("x"))
    made.hand_out(made.say("y"))
    assert made.on_host() == made.known() == {"a", "ab", "x", "y"}
    made.hand_out(made.say("z"))
    assert made.on_host() == {"a", "x", "y", "z"}
    assert made.cache.evicted == 2
    assert made.cache.restored == 1


def test_what_is_in_the_pool_again_leaves_the_host_first() -> None:
    made = Cache(host_pages=2)
    made.hand_out(made.say("a"))
    made.hand_out(made.say("x"))
    made.restore("a")
    made.hand_out(made.say("y"))
    assert made.on_host() == {"x", "y"}
    assert made.known() == {"a", "x", "y"}
    assert made.cache.evicted == 0


def test_no_state_takes_the_room_of_one_that_it_needs() -> None:
    """Two requests computed the same beginning; the pages of the one that it was found by are handed out first."""
    made = Cache(host_pages=1)
    first = made.say("a")
    second = made.say("ab")
    made.hand_out(first)
    assert (made.on_host(), made.known()) == ({"a"}, {"a", "ab"})
    made.hand_out(second)
    assert made.on_host() == made.known() == {"a"}


def test_a_state_is_lost_with_one_that_it_needs() -> None:
    """What began with a state that was dropped meanwhile cannot be used from the host; in the pool it can."""
    made = Cache(host_pages=9)
    running = made.say("ab")
    assert made.cache.drop() == (1, [])
    running = made.say("abc", known=2, first=running)
    assert made.known() == {"abc"}
    made.hand_out(running)
    assert made.known() == set()
    assert made.cache.host.num_used == 0


def test_time_and_people_reach_the_host() -> None:
    made = Cache(host_pages=9)
    made.hand_out(made.say("ab"))
    made.now += TTL / 2
    made.hand_out(made.say("xyz"))
    made.now += TTL / 2
    assert made.on_host() == made.known() == {"x", "xy", "xyz"}
    made.now += TTL / 2
    assert made.on_host() == set()
    made.hand_out(made.say("ab"))
    pages = made.say("abc", known=2, first=made.restore("ab"))
    [session] = made.cache.listing()
    assert (session.pages, session.spilled_pages) == (3, 0)
    pages.hold(2)
    made.cache.handed_out(pages[2:])
    [session] = made.cache.listing()
    assert (session.pages, session.spilled_pages) == (3, 1)
    assert made.cache.drop([session.id]) == (1, [])
    assert made.cache.host.num_used == 0
    made.hand_out(made.say("ab"))
    made.cache.clear()
    assert made.cache.host.num_used == 0


class Requests:
    """Requests of one page per chunk over vLLM's page pool."""

    def __init__(self, num_pages: int) -> None:
        self.pool = BlockPool(num_pages, enable_caching=True, hash_block_size=CHUNK)
        spec: Any = SimpleNamespace(block_size=CHUNK, dcp_sharded=False)
        self.manager = HeadGroupManager(spec, self.pool, True, 0, CHUNK)
        self.holds: dict[int, str] = {}  # page -> text that it was computed from

    def start(self, name: str, text: str) -> Any:
        """Begin with what is known of ``text``, a letter a chunk."""
        schedule: Any = SimpleNamespace(num_pages=lambda tokens, _: -(-tokens // CHUNK))
        hashes = [text[: i + 1].encode() for i in range(len(text))]
        request: Any = SimpleNamespace(
            request_id=name, text=text, num_tokens=CHUNK * len(text), num_computed_tokens=0, block_hashes=hashes
        )
        self.manager.announce(name, RequestBudget(request.num_tokens, schedule, 0.25, CHUNK))
        if found := self.manager.find(request):
            for index, page in enumerate(found.pages):
                assert self.holds[page.block_id] == text[: index + 1]
            self.manager.add_local_computed_blocks(name, found.pages, found.tokens, 0)
            request.num_computed_tokens = found.tokens
        return request

    def compute(self, request: Any) -> None:
        """All that is left."""
        tokens = request.num_tokens
        for page in self.manager.allocate_new_blocks(request.request_id, tokens, tokens):
            request.num_computed_tokens += CHUNK
            self.holds[page.block_id] = request.text[: request.num_computed_tokens // CHUNK]
        self.manager.remember(request)

    def end(self, request: Any) -> None:
        self.manager.leave(request)
        self.manager.free(request.request_id)
        self.manager.withdraw(request.request_id)


@pytest.mark.parametrize("order", ["longer first", "shorter first"])
def test_dropped_pages_that_a_longer_state_begins_with_are_not_handed_out_before_it(order: str) -> None:
    """Two requests hold a prefix when it is dropped; one of them goes on and is remembered."""
    requests = Requests(num_pages=1 + 20)
    first = requests.start("first", "abc")
    requests.compute(first)
    requests.end(first)
    shorter, longer = requests.start("shorter", "abcx"), requests.start("longer", "abcde")
    assert requests.manager.sessions.drop() == (1, [])
    requests.compute(longer)
    for request in (longer, shorter) if order == "longer first" else (shorter, longer):
        requests.end(request)
    assert requests.manager.sessions.reused == 2
    other = requests.start("other", "xy")  # takes the pages that are handed out first
    requests.compute(other)
    assert requests.start("again", "abcdef").num_computed_tokens == 5 * CHUNK


def test_hits_and_the_time_of_the_end() -> None:
    requests = Requests(num_pages=1 + 20)
    sessions = requests.manager.sessions
    now = 0.0
    sessions._clock = lambda: now
    first = requests.start("first", "abc")
    requests.compute(first)
    now = 50
    requests.end(first)
    now = 60
    [session] = sessions.listing()
    assert (session.tokens, session.pages, session.hits, session.idle_seconds) == (300, 3, 0, 10)
    waiting = requests.start("second", "abcd")
    requests.compute(waiting)
    assert [(s.tokens, s.hits, s.idle_seconds) for s in sessions.listing()] == [(400, 1, 0)]
    now = 70
    requests.end(waiting)
    now = 75
    assert [(s.tokens, s.hits, s.idle_seconds) for s in sessions.listing()] == [(400, 1, 5)]
    sessions.ttl = 10
    third = requests.start("third", "abcd")
    assert third.num_computed_tokens == 300
    now = 200
    fourth = requests.start("fourth", "abcde")
    assert fourth.num_computed_tokens == 300, "the third holds this much, and nobody more"
    requests.end(third)
    requests.end(fourth)
    now = 210
    assert requests.start("fifth", "abcde").num_computed_tokens == 0


class OperatedTraffic(Traffic):
    """Random traffic while sessions expire and are dropped: what is found is still right, and page counts exact."""

    host_pages = 40

    def new_sessions(self) -> SessionCache:
        self.now = 0.0
        return SessionCache(ttl=30, clock=lambda: self.now, host_pages=self.host_pages)

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.3, 1]))
    def drop(self, seed: int, share: float) -> None:
        ids = [session.id for session in self.manager.sessions.listing()]
        some = Random(seed).sample(ids, int(share * len(ids)))
        assert self.manager.sessions.drop(some) == (len(some), [])


OperatedTraffic.TestCase.settings = settings(Traffic.TestCase.settings, max_examples=40)
TestOperatedTraffic = OperatedTraffic.TestCase


class _Core:
    """What the endpoints call of an engine core's client."""

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if method == LIST:
            return [{"id": "1" * 16}]
        assert method == DROP
        [ids] = args
        return (3, []) if ids is None else (1, []) if ids == ["abc"] else (0, ids)


def client(**args: Any) -> TestClient:
    """Our routes where vLLM adds them, behind its API key and with its error messages."""
    install_endpoints()
    app = FastAPI()
    app.state.args = Namespace(
        **{"additional_config": {"tangram": {}}, "enable_prefix_caching": True, "log_error_stack": False, **args}
    )
    app.state.engine_client = SimpleNamespace(engine_core=_Core())
    attach_endpoint_plugins(app, ("generate",))
    init_exception_handler(app)
    app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
    return TestClient(app, headers={"Authorization": "Bearer secret"})


def test_endpoints() -> None:
    http = client()
    assert http.get("/v1/tangram/sessions").json()["data"] == [{"id": "1" * 16}]
    assert http.delete("/v1/tangram/sessions/abc").json() == {"dropped": 1}
    assert http.delete("/v1/tangram/sessions").json() == {"dropped": 3}
    refused = http.delete("/v1/tangram/sessions/unknown")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].startswith("there is no session unknown")


@pytest.mark.parametrize("path", ["/", "//", "/abc/", "/%2F", "/abc/def"])
def test_dropping_what_is_no_id_drops_nothing(path: str) -> None:
    """Least of all everything, by a redirect to the route without an id, which clients follow."""
    assert client().delete(f"/v1/tangram/sessions{path}", follow_redirects=True).status_code == 404


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_endpoints_want_the_api_key(method: str) -> None:
    http = client()
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
        assert http.request(method, "/v1/tangram/sessions", headers=headers).status_code == 401


@pytest.mark.parametrize(
    "args", [{"additional_config": {}}, {"additional_config": None}, {"enable_prefix_caching": False}]
)
def test_other_servers_have_no_endpoints(args: dict[str, Any]) -> None:
    assert client(**args).get("/v1/tangram/sessions").status_code == 404
