"""Every eviction order against sorting by hand, on random histories."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.cache.eviction_order import (
    EvictionOrder,
    KeyedOrder,
    LeafFacts,
    Worth,
    create_eviction_order,
    echo_key,
    lru_key,
    worth_of,
)
from echo_sgl.policies.prefix_index import PrefixKey
from echo_sgl.types import Task

CURSOR: PrefixKey = ("", array("q", [50]), 7)


def order_at(name: str, cursor: PrefixKey | None = CURSOR) -> EvictionOrder:
    return create_eviction_order(name, cursor=lambda: cursor)


def leaf(number: int, **facts: object) -> LeafFacts:
    return LeafFacts(number, last_access=float(number), **facts)  # type: ignore[arg-type]


def wanted(number: int, first_token: int, **facts: object) -> LeafFacts:
    key = ("", array("q", [first_token, number]), number)
    return leaf(number, num_pending=1, walk_key=key, task=Task.OFFLINE, **facts)


facts_of_leaves = st.lists(
    st.builds(
        LeafFacts,
        leaf=st.integers(0, 20),
        last_access=st.integers(0, 50).map(float),
        task=st.sampled_from(Task),
        is_protected=st.booleans(),
        num_pending=st.integers(0, 3),
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", ["lru", "echo", "next-use"])
@given(history=facts_of_leaves, dropped=st.sets(st.integers(0, 20)))
def test_an_order_holds_the_last_facts_of_every_leaf_once(name, history, dropped):
    order = order_at(name)
    for facts in history:
        order.put(facts)
    for number in dropped:
        order.drop(number)
    left = {facts.leaf for facts in history} - dropped
    assert sorted(order.victims()) == sorted(left)
    assert len(order) == len(left)


@pytest.mark.parametrize(("name", "key"), [("lru", lru_key), ("echo", echo_key)])
@given(history=facts_of_leaves)
def test_victims_come_by_their_key(name, key, history):
    order = order_at(name)
    for facts in history:
        order.put(facts)
    last = {facts.leaf: facts for facts in history}
    assert list(order.victims()) == sorted(last, key=lambda number: (*key(last[number]), number))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=200, max_size=300))
def test_leaves_that_move_and_go_again_and_again_leave_nothing_behind(history):
    order, here = KeyedOrder(lru_key), {}
    for number, access in history:
        if access == here.pop(number, None):
            order.drop(number)
        else:
            here[number] = access
            order.put(LeafFacts(number, last_access=float(access)))
        assert list(order.victims()) == sorted(here, key=lambda one: (here[one], one))
    assert len(order._heap) <= 2 * 10 + 64


def test_echo_evicts_finished_offline_then_finished_online_then_by_reference_count():
    order = order_at("echo")
    for facts in (
        leaf(1, num_pending=3, task=Task.OFFLINE),
        leaf(2, num_pending=1, task=Task.OFFLINE),
        leaf(3, task=Task.ONLINE),
        leaf(9, task=Task.OFFLINE),
        leaf(4, task=Task.ONLINE, is_protected=True),
        leaf(8, task=Task.OFFLINE),
    ):
        order.put(facts)
    assert list(order.victims()) == [8, 9, 3, 2, 1, 4]


def test_worth_falls_again_when_the_reason_is_gone():
    order = order_at("echo")
    order.put(leaf(1, num_pending=2, task=Task.OFFLINE))
    order.put(leaf(2, task=Task.ONLINE))
    assert list(order.victims()) == [2, 1]
    order.put(leaf(1, num_pending=0, task=Task.OFFLINE))
    assert list(order.victims()) == [1, 2]


def test_next_use_evicts_what_the_walk_passed_last_and_keeps_what_comes_next():
    order = order_at("next-use")
    for number, first_token in ((1, 10), (2, 40), (3, 60), (4, 90)):
        order.put(wanted(number, first_token))
    # The walk stands at 50: 60 comes next, then 90, then around to 10 and 40.
    assert list(order.victims()) == [2, 1, 4, 3]


def test_before_the_first_pick_the_walk_starts_at_the_front():
    order = order_at("next-use", cursor=None)
    for number, first_token in ((1, 10), (2, 40), (3, 60)):
        order.put(wanted(number, first_token))
    assert list(order.victims()) == [3, 2, 1]


def test_what_is_resumed_or_protected_outlives_what_is_on_the_walk():
    order = order_at("next-use")
    order.put(leaf(1, num_pending=1, is_next=True))
    order.put(leaf(2, is_protected=True))
    order.put(wanted(3, 60))
    order.put(leaf(4))
    assert list(order.victims()) == [4, 3, 1, 2]


def test_recency_does_not_look_at_the_offline_requests():
    assert not order_at("lru").needs_pending
    assert order_at("echo").needs_pending and order_at("next-use").needs_pending


def test_worth_is_that_of_the_strongest_reason():
    assert worth_of(leaf(1, task=Task.OFFLINE)) is Worth.DONE_OFFLINE
    assert worth_of(leaf(1, task=Task.ONLINE)) is Worth.DONE_ONLINE
    assert worth_of(leaf(1, task=Task.ONLINE, num_pending=1)) is Worth.PENDING
    assert worth_of(leaf(1, num_pending=1, is_protected=True)) is Worth.PROTECTED


def test_an_unknown_order_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'fifo'.*lru, echo, next-use"):
        order_at("fifo")
