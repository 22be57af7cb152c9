"""Who gives memory: the order, the shortest prefix that is enough, and never online work."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.cache.preemption import Holder, enough, preemption_order


@st.composite
def any_holders(draw: st.DrawFn) -> list[Holder]:
    facts = st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 50), st.booleans())
    return [
        Holder(f"r{number}", is_parked, uncached, held, number, is_online)
        for number, (is_parked, uncached, held, is_online) in enumerate(draw(st.lists(facts)))
    ]


def holder(
    sequence: int, *, is_parked: bool = False, uncached: int = 10, held: int = 100
) -> Holder:
    return Holder(f"r{sequence}", is_parked, uncached, held, sequence)


def test_parked_before_running_then_least_lost_then_last_started():
    holders = [
        holder(1, uncached=0),
        holder(2, uncached=50),
        holder(3, is_parked=True, uncached=99),
        holder(4, is_parked=True, uncached=5),
        holder(5, uncached=50),
    ]
    assert preemption_order(holders) == ["r4", "r3", "r1", "r5", "r2"]


@given(any_holders(), st.integers(0, 99))
def test_the_order_holds_every_offline_request_once_however_they_are_listed(holders, seed):
    order = preemption_order(holders)
    assert sorted(order) == sorted(one.rid for one in holders if not one.is_online)
    shuffled = random.Random(seed).sample(holders, len(holders))
    assert preemption_order(shuffled) == order


@given(any_holders())
def test_nobody_goes_while_one_that_should_go_first_stays(holders):
    by_rid = {one.rid: one for one in holders}
    order = [by_rid[rid] for rid in preemption_order(holders)]
    for number, one in enumerate(order):
        for later in order[number + 1 :]:
            assert one.is_parked >= later.is_parked
            if one.is_parked == later.is_parked:
                assert one.uncached_tokens <= later.uncached_tokens
                if one.uncached_tokens == later.uncached_tokens:
                    assert one.started_sequence > later.started_sequence


@given(any_holders(), st.integers(-5, 300))
def test_enough_is_the_shortest_prefix_that_frees_what_is_needed(holders, needed_tokens):
    held = {one.rid: one.held_tokens for one in holders}
    order = preemption_order(holders)
    prefixes = [order[:length] for length in range(len(order) + 1)]
    expected = next(
        (one for one in prefixes if sum(held[rid] for rid in one) >= needed_tokens), None
    )
    assert enough(holders, needed_tokens) == expected


def test_nobody_loses_work_when_not_even_all_would_be_enough():
    assert enough([holder(1), holder(2)], 201) is None
    assert enough([], 1) is None


def test_nobody_loses_work_when_nothing_is_needed():
    assert enough([holder(1)], 0) == []
    assert enough([], 0) == []
