"""The protected online working set: bounded by tokens and by age."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.cache.working_set import WorkingSet

uses = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=60)


def test_the_least_recently_used_leave_when_the_share_is_full():
    working = WorkingSet(limit_tokens=100, window_s=60)
    for number in range(4):
        working.use(number, 40, now_s=float(number))
    assert working.expire(now_s=4) == [0, 1]
    assert working.num_tokens == 80


def test_what_was_not_used_within_the_window_leaves_and_lends_its_share():
    working = WorkingSet(limit_tokens=100, window_s=60)
    working.use(1, 40, now_s=0)
    working.use(2, 40, now_s=50)
    assert working.expire(now_s=61) == [1]
    assert 1 not in working and 2 in working
    assert working.num_tokens == 40


def test_using_again_renews_and_does_not_count_twice():
    working = WorkingSet(limit_tokens=100, window_s=60)
    working.use(1, 40, now_s=0)
    working.use(2, 40, now_s=1)
    working.use(1, 40, now_s=2)
    assert working.num_tokens == 80
    assert working.expire(now_s=61.5) == [2]


def test_what_somebody_comes_back_to_stays_beyond_the_share_until_it_is_used():
    working = WorkingSet(limit_tokens=50, window_s=60)
    working.use(1, 40, now_s=0, is_awaited=True)
    for number in (2, 3, 4):
        working.use(number, 40, now_s=float(number))
    assert working.expire(now_s=4) == [2, 3]
    assert 1 in working and working.num_tokens == 40
    working.use(1, 40, now_s=5)
    assert working.expire(now_s=5) == [4] and working.num_tokens == 40


def test_nobody_is_awaited_for_longer_than_the_window():
    working = WorkingSet(limit_tokens=50, window_s=60)
    working.use(1, 40, now_s=0, is_awaited=True)
    working.use(2, 40, now_s=30, is_awaited=True)
    working.split(1, upper=3, upper_tokens=10)
    working.forget(1)
    assert working.expire(now_s=61) == [3]
    assert 2 in working and working.num_tokens == 0
    working.forget(2)
    assert not len(working) and working.expire(now_s=1000) == []


def test_a_split_keeps_both_parts_with_the_tokens_they_have():
    working = WorkingSet(limit_tokens=100, window_s=60)
    working.use(1, 40, now_s=0)
    working.split(1, upper=2, upper_tokens=30)
    assert working.num_tokens == 40
    working.forget(1)
    assert working.num_tokens == 30 and 2 in working


def test_a_split_is_no_use():
    """Offline prompts split what online ones left: neither part is younger for it."""
    working = WorkingSet(limit_tokens=100, window_s=60)
    working.use(1, 40, now_s=0)
    working.use(2, 40, now_s=50)
    working.split(1, upper=3, upper_tokens=30)
    assert working.expire(now_s=61) == [1, 3]
    assert working.num_tokens == 40


def test_where_the_share_is_full_a_split_node_leaves_before_younger_ones_end_first():
    working = WorkingSet(limit_tokens=75, window_s=60)
    working.use(1, 40, now_s=0)
    working.use(2, 40, now_s=1)
    working.split(1, upper=3, upper_tokens=30)
    assert working.expire(now_s=2) == [1], "the end of it is enough"
    working.use(4, 30, now_s=3)
    assert working.expire(now_s=4) == [3]
    working.split(2, upper=5, upper_tokens=10)
    working.use(5, 10, now_s=5)
    assert working.expire(now_s=62) == [2], "the part that was used again is younger"
    working.clear()
    assert working.expire(now_s=900) == [] and len(working) == working.num_tokens == 0


def test_splitting_a_node_that_is_not_protected_protects_nothing():
    working = WorkingSet(limit_tokens=100, window_s=60)
    working.split(1, upper=2, upper_tokens=30)
    assert len(working) == working.num_tokens == 0


@given(uses=uses, limit=st.integers(0, 100), window=st.integers(0, 20))
def test_after_expiry_both_bounds_hold_and_nothing_is_dropped_early(uses, limit, window):
    working = WorkingSet(limit_tokens=limit, window_s=window)
    last: dict[int, tuple[int, int]] = {}
    for now_s, (node, num_tokens) in enumerate(uses):
        working.use(node, num_tokens, float(now_s))
        last.pop(node, None)
        last[node] = num_tokens, now_s
    now_s = len(uses)
    working.expire(float(now_s))
    expected, total = set(), 0
    for node, (num_tokens, used_s) in reversed(last.items()):
        total += num_tokens
        if total > limit or used_s < now_s - window:
            break
        expected.add(node)
    assert {node for node in last if node in working} == expected
    assert working.num_tokens == sum(last[node][0] for node in expected) <= limit


def test_users_who_never_return_earn_little_protection_and_returning_ones_all_of_it():
    working = WorkingSet(limit_tokens=1000, window_s=60)
    assert working.limit_tokens == 1000
    for _ in range(300):
        working.observe_hits(0, 500)
    assert working.limit_tokens == 100
    for _ in range(300):
        working.observe_hits(125, 500)
    assert working.limit_tokens == pytest.approx(500, abs=1), "a quarter of a prompt is half of it"
    for _ in range(100):
        working.observe_hits(300, 500)
    assert working.limit_tokens == 1000


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(100, 200)), max_size=50))
def test_the_earned_share_stays_within_its_bounds(hits):
    working = WorkingSet(limit_tokens=1000, window_s=60)
    for num_cached, num_tokens in hits:
        working.observe_hits(num_cached, num_tokens)
        assert 100 <= working.limit_tokens <= 1000
