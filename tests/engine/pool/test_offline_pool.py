"""The pool's own bookkeeping, with the real orders under it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from echo_sgl.engine.cache.node_path import namespace_of
from echo_sgl.engine.pool.offline_pool import OfflinePool
from echo_sgl.policies.order.offline_order import FcfsOrder, PsmOrder


def request(rid: str, tokens: str = "abc", *, extra_key: str | None = None) -> SimpleNamespace:
    prompt = array("q", map(ord, tokens))
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=prompt,
        output_ids=array("q"),
        seqlen=len(prompt),
        extra_key=extra_key,
        cache_salt=None,
        kv=SimpleNamespace(holds_kv=True),
    )


@pytest.fixture
def pool() -> OfflinePool:
    return OfflinePool(FcfsOrder(), capacity=3)


def rids(requests) -> list[str]:
    return [req.rid for req in requests]


def test_tokens_and_fullness_follow_every_change(pool):
    first, second, third = request("a", "xx"), request("b", "yyy"), request("c")
    for entry_s, req in enumerate([first, second, third]):
        pool.add(req, entry_s=entry_s, resumed=False)
    assert (len(pool), pool.num_tokens, pool.is_full) == (3, 8, True)
    pool.take(first)
    assert (len(pool), pool.num_tokens, pool.is_full) == (2, 6, False)
    assert rids(pool.remove("b")) == ["b"]
    assert (len(pool), pool.num_tokens) == (1, 3)
    assert "c" in pool
    assert "b" not in pool


def test_removal_is_of_one_id_or_of_all(pool):
    for rid in ["job-1", "job-10", "job-11", "job-2"]:
        pool.add(request(rid), entry_s=0.0, resumed=False)
    assert rids(pool.remove("job-11")) == ["job-11"]
    assert rids(pool.remove("job-1")) == ["job-1"]
    assert rids(pool.remove("nobody")) == []
    assert rids(pool.remove("")) == []
    assert rids(pool.remove(None)) == ["job-10", "job-2"]


def test_upcoming_looks_without_taking(pool):
    for rid in "abc":
        pool.add(request(rid), entry_s=0.0, resumed=False)
    assert rids(pool.upcoming(2)) == ["a", "b"]
    assert rids(pool.upcoming(0)) == []
    assert len(pool) == 3


def test_a_retracted_request_keeps_its_place_in_line(pool):
    first, second = request("a"), request("b")
    for req in (first, second):
        pool.add(req, entry_s=0.0, resumed=False)
    pool.take(first)
    pool.take(second)
    pool.add(second, entry_s=5.0, resumed=True)
    pool.add(first, entry_s=6.0, resumed=True)
    assert rids(pool.upcoming(9)) == ["a", "b"]


def test_timeouts_see_requests_by_their_latest_entry(pool):
    first, second = request("a"), request("b")
    pool.add(first, entry_s=1.0, resumed=False)
    pool.add(second, entry_s=2.0, resumed=False)
    pool.take(first)
    pool.add(first, entry_s=3.0, resumed=True)
    assert rids(pool.waiting_since_before(2.5)) == ["b"]
    assert rids(pool.waiting_since_before(9.0)) == ["b", "a"]
    assert rids(pool) == ["b", "a"]


def test_the_age_is_that_of_the_first_in_line(pool):
    assert pool.oldest_age_s(10.0) == 0.0
    pool.add(request("a"), entry_s=4.0, resumed=False)
    pool.add(request("b"), entry_s=7.0, resumed=False)
    assert pool.oldest_age_s(10.0) == 6.0


def test_prompts_of_different_cache_namespaces_are_kept_apart():
    pool = OfflinePool(PsmOrder(), capacity=9)
    for rid, key in [("a", "two"), ("b", None), ("c", "two"), ("d", None)]:
        pool.add(request(rid, extra_key=key), entry_s=0.0, resumed=False)
    assert rids(pool.upcoming(4)) == ["b", "d", "a", "c"]


def test_who_started_and_holds_no_kv_any_more_is_forgotten():
    """SGLang ends some without a word; who was retracted and waits again is not meant."""
    pool = OfflinePool(PsmOrder(), capacity=9)
    ended, running, again = (request(rid, "doc" + rid) for rid in "abc")
    for req in (ended, running, again):
        pool.add(req, entry_s=0.0, resumed=False)
        pool.take(req)
    path = ended.origin_input_ids[:3]
    ended.kv.holds_kv = again.kv.holds_kv = False
    pool.add(again, entry_s=1.0, resumed=True)
    assert pool.need(namespace_of(ended), path).num_pending == 3
    pool.forget_ended()
    assert pool.need(namespace_of(ended), path).num_pending == 2
    assert rids(pool.upcoming(9)) == ["c"]
    pool.forget_ended()
    running.kv.holds_kv = False
    pool.forget_ended()
    assert pool.need(namespace_of(ended), path).num_pending == 1


def test_the_cache_is_told_of_every_prompt_that_is_waited_for_otherwise_than_before(pool):
    told: list[tuple[str, int]] = []
    pool.on_change = lambda req, prompt: told.append((req.rid, len(prompt)))
    goes, stays = request("goes"), request("stays", "xy")
    for req in (goes, stays):
        pool.add(req, entry_s=0.0, resumed=False)
    assert told == [("goes", 3), ("stays", 2)]
    pool.take(goes)
    assert told[2:] == [], "it still needs what it waited for"
    goes.output_ids.extend([7, 8])
    pool.add(goes, entry_s=0.0, resumed=True)
    assert told[2:] == [("goes", 3), ("goes", 5)], "it ended, and comes back with its answer so far"
    pool.take(goes)
    assert told[4:] == [("goes", 5)], "nobody is next on its prefix any more"
    pool.end(goes, num_cached_tokens=5)
    assert told[5:] == [], "all of it was cached just now"
    pool.remove("stays")
    assert told[5:] == [("stays", 2)]


def test_a_turn_of_a_session_waits_with_the_prompt_that_it_came_with(pool):
    turn = request("turn")
    turn.session = SimpleNamespace(streaming=True)
    pool.add(turn, entry_s=0.0, resumed=False)
    turn.origin_input_ids.extend([1, 2, 3])
    told: list[int] = []
    pool.on_change = lambda req, prompt: told.append(len(prompt))
    pool.remove("turn")
    assert told == [3]
