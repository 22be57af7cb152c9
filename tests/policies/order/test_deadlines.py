"""Work by deadline against brute force, and the rate at which it gets done."""

from __future__ import annotations

import math
from array import array
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.order.deadlines import DeadlineBook, RateMeter
from echo_sgl.policies.prefix_index import prefix_key
from echo_sgl.types import PendingRequest, Work


def pending(
    sequence: int,
    prompt: list[int] | None = None,
    *,
    deadline_s: float | None,
    work: int = 10,
    answer: int = 0,
) -> PendingRequest:
    tokens = array("q", [sequence] if prompt is None else prompt)
    return PendingRequest(f"r{sequence}", tokens, sequence, "", deadline_s, Work(work, answer))


def book_of(*requests: PendingRequest) -> DeadlineBook:
    book = DeadlineBook()
    for request in requests:
        book.add(request)
    return book


@st.composite
def any_requests(draw: st.DrawFn) -> list[PendingRequest]:
    facts = st.tuples(
        st.lists(st.integers(0, 2), max_size=4),
        st.sampled_from([10.0, 20.0, 30.0, 40.0]),
        st.integers(1, 50),
    )
    drawn = draw(st.lists(facts, max_size=20))
    return [
        pending(number, prompt, deadline_s=deadline_s, work=work)
        for number, (prompt, deadline_s, work) in enumerate(drawn)
    ]


clocks = st.sampled_from([0.0, 10.0, 15.0, 20.0, 39.0, 99.0])
rates = st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0])


def due_work(requests, deadline_s: float, now_s: float) -> int:
    due = [one.work for one in requests if now_s < one.deadline_s <= deadline_s]
    return sum(work.left_tokens(None) for work in due)


@given(any_requests(), clocks, rates, st.sampled_from([1.0, 1.2, 2.0]), st.data())
def test_the_book_agrees_with_a_list_of_all_requests(requests, now_s, rate, safety, data):
    book = book_of(*requests)
    gone = data.draw(st.sets(st.sampled_from(range(len(requests))))) if requests else set()
    for number in gone:
        book.remove(requests[number])
    left = [one for one in requests if one.sequence not in gone]
    deadlines = sorted({one.deadline_s for one in left})
    assert len(book) == len(left)
    assert book.overdue(now_s) == [one for one in deadlines if one <= now_s]
    missed = [
        one
        for one in deadlines
        if one > now_s and due_work(left, one, now_s) * safety > rate * (one - now_s)
    ]
    assert book.urgent_deadline(now_s, rate, safety) == (missed[0] if missed else None)
    for deadline_s in deadlines:
        assert book.work_until(deadline_s, now_s) == due_work(left, deadline_s, now_s)
        own = {one.sequence for one in left if one.deadline_s == deadline_s}
        assert {one.sequence for one in book.walk(deadline_s, None)} == own


@given(any_requests(), any_requests(), clocks, rates, st.data())
def test_what_waits_to_go_on_is_work_that_nobody_walks_to(waits, resumed, now_s, rate, data):
    book = book_of(*waits)
    for one in resumed:
        book.note_resumed(one)
    gone = data.draw(st.sets(st.sampled_from(range(len(resumed))))) if resumed else set()
    for number in gone:
        book.forget_resumed(resumed[number])
    left = [*waits, *(one for one in resumed if one.sequence not in gone)]
    for deadline_s in {one.deadline_s for one in left}:
        assert book.work_until(deadline_s, now_s) == due_work(left, deadline_s, now_s)
        own = {one.sequence for one in waits if one.deadline_s == deadline_s}
        assert {one.sequence for one in book.walk(deadline_s, None)} == own
    assert len(book) == len(waits)
    assert book.is_empty == (not left)


def test_who_starts_and_comes_back_counts_once_between_two_looks() -> None:
    requests = [pending(number, deadline_s=10.0, work=30) for number in range(2)]
    book = book_of(*requests)
    for one in requests:
        book.remove(one)
        book.note_started(one)
    assert book.work_until(10.0, 0.0) == 60
    book.note_resumed(requests[0])
    assert book.work_until(10.0, 0.0) == 60
    book.set_running({10.0: 7})
    assert book.work_until(10.0, 0.0) == 37
    book.note_resumed(requests[1])
    assert book.work_until(10.0, 0.0) == 60, "it had fewer left than that, but not fewer than none"


def test_what_waits_is_as_much_as_its_answers_are_expected_to_be_now() -> None:
    """Both who never started and who lost its memory, which has 10 of its answer."""
    book = book_of(pending(0, deadline_s=9.0, answer=500), pending(1, deadline_s=9.0, answer=20))
    lost = PendingRequest("lost", array("q", [2]), 2, "", 9.0, Work(10, 500, 20))
    book.note_resumed(lost)
    assert book.work_until(9.0, 0.0) == 510 + 30 + 490
    book.answer_lengths.note(100)
    assert book.work_until(9.0, 0.0) == 110 + 30 + 90
    assert book.urgent_deadline(0.0, 25.0) == 9.0
    for _ in range(9):
        book.answer_lengths.note(0)
    assert book.work_until(9.0, 0.0) == 20 + 20 + 1, "one longer than that ends any moment"
    assert book.urgent_deadline(0.0, 25.0) is None
    book.forget_resumed(lost)
    assert book.work_until(9.0, 0.0) == 40


@given(any_requests(), clocks, rates)
def test_a_deadline_is_urgent_exactly_when_its_laxity_is_below_zero(requests, now_s, rate):
    book = book_of(*requests)
    deadlines = sorted({one.deadline_s for one in requests})
    late = [one for one in deadlines if book.laxity_s(one, now_s, rate) < -1e-9]
    urgent = book.urgent_deadline(now_s, rate)
    assert urgent == (late[0] if late else None)


@given(any_requests(), st.integers(0, 19))
def test_a_walk_goes_on_behind_the_cursor_and_wraps_around(requests, number):
    book = book_of(*requests)
    for deadline_s in {one.deadline_s for one in requests}:
        own = sorted(map(prefix_key, [one for one in requests if one.deadline_s == deadline_s]))
        cursor = prefix_key(requests[number % len(requests)])
        expected = [one for one in own if one > cursor] + [one for one in own if one <= cursor]
        walked = [prefix_key(one) for one in book.walk(deadline_s, cursor)]
        assert walked == expected


def test_work_that_is_due_earlier_counts_for_a_later_deadline():
    early = [pending(number, deadline_s=100.0) for number in range(5)]
    late = [pending(number, deadline_s=110.0) for number in range(5, 12)]
    book = book_of(*early, *late)
    # 50 tokens until 100 s and 120 until 110 s: alone, the 70 of the second would be in time.
    assert book.urgent_deadline(0.0, 1.0) == 110.0
    assert book.laxity_s(110.0, 0.0, 1.0) == pytest.approx(-10.0)
    assert book.laxity_s(100.0, 0.0, 1.0) == pytest.approx(50.0)
    assert book.urgent_deadline(60.0, 1.0) == 100.0


def test_safety_makes_a_deadline_urgent_earlier():
    book = book_of(pending(0, deadline_s=100.0, work=50))
    assert book.urgent_deadline(45.0, 1.0) is None
    assert book.urgent_deadline(45.0, 1.0, safety=1.2) == 100.0


def test_overdue_work_is_neither_urgent_nor_in_the_way_of_what_can_still_be_in_time():
    overdue = pending(0, deadline_s=10.0, work=10**6)
    book = book_of(overdue, pending(1, deadline_s=100.0, work=20))
    assert book.overdue(50.0) == [10.0]
    assert book.urgent_deadline(50.0, 1.0) is None
    assert book.laxity_s(100.0, 50.0, 1.0) == pytest.approx(30.0)
    assert book.laxity_s(10.0, 50.0, 1.0) == math.inf


def test_without_a_rate_or_a_deadline_nothing_is_urgent():
    book = book_of(pending(0, deadline_s=10.0))
    assert book.urgent_deadline(9.9, None) is None
    assert book.laxity_s(10.0, 9.9, None) == math.inf
    assert book.laxity_s(None, 9.9, 1.0) == math.inf


def test_a_rate_of_nothing_makes_all_that_is_due_urgent():
    book = book_of(pending(0, deadline_s=10.0))
    assert book.urgent_deadline(0.0, 0.0) == 10.0
    assert book.laxity_s(10.0, 0.0, 0.0) == -math.inf
    assert book.laxity_s(9.0, 0.0, 0.0) == 9.0


def test_a_walk_is_lazy_and_empty_where_nothing_is_due():
    book = book_of(*(pending(number, deadline_s=10.0) for number in range(100)))
    assert [one.sequence for one in islice(book.walk(10.0, None), 2)] == [0, 1]
    assert list(book.walk(11.0, None)) == []


@pytest.mark.parametrize("deadline_s", [None, math.inf, math.nan])
def test_a_request_without_deadline_is_refused(deadline_s):
    with pytest.raises(ValueError, match=r"deadline_s of 'r0'.*must be a time"):
        book_of(pending(0, deadline_s=deadline_s))


def test_a_request_is_in_the_book_once():
    one = pending(0, deadline_s=1.0)
    with pytest.raises(ValueError, match="in the book already"):
        book_of(one, one)
    with pytest.raises(KeyError):
        book_of(one).remove(pending(1, deadline_s=1.0))


steps = st.lists(st.tuples(st.floats(0.01, 2.0), st.integers(0, 1000)), min_size=1, max_size=50)


@given(steps)
def test_the_rate_lies_between_the_lowest_and_the_highest_observed(observed):
    meter, now_s = RateMeter(window_s=10.0, least_s=1e-6), 0.0
    meter.observe(now_s, 0)
    for duration_s, num_tokens in observed:
        now_s += duration_s
        meter.observe(now_s, num_tokens)
    seen = [num_tokens / duration_s for duration_s, num_tokens in observed]
    assert meter.tokens_per_s is not None
    assert min(seen) * 0.999 <= meter.tokens_per_s <= max(seen) * 1.001


def meter_after(num_seconds: int, *, tokens_a_second: int = 100, start_s: int = 0) -> RateMeter:
    meter = RateMeter()
    for second in range(num_seconds + 1):
        meter.observe(float(start_s + second), tokens_a_second)
    return meter


def test_a_steady_rate_is_found_exactly_and_not_before_enough_was_seen():
    assert meter_after(4).tokens_per_s is None
    assert meter_after(10).tokens_per_s == pytest.approx(100.0)


def test_idle_time_does_not_count():
    meter = meter_after(20)
    meter.pause()
    meter.observe(3000.0, 100)
    meter.observe(3001.0, 100)
    assert meter.tokens_per_s == pytest.approx(100.0)


def test_a_clock_that_jumps_does_not_count():
    for jump_s in (-5.0, 3600.0):
        meter = meter_after(20)
        meter.observe(20.0 + jump_s, 100)
        meter.observe(21.0 + jump_s, 100)
        assert meter.tokens_per_s == pytest.approx(100.0)


def test_steps_in_which_online_work_left_nothing_lower_the_rate():
    meter = meter_after(20)
    for second in range(21, 41):
        meter.observe(float(second), 0)
    assert 30 < meter.tokens_per_s < 70


def test_the_rate_follows_a_change_within_a_few_windows():
    meter = meter_after(100)
    for second in range(101, 281):
        meter.observe(float(second), 300)
    assert meter.tokens_per_s == pytest.approx(300, rel=0.05)


@pytest.mark.parametrize(("least_s", "window_s"), [(0.0, 60.0), (60.0, 60.0), (5.0, -1.0)])
def test_a_meter_that_would_never_see_enough_is_refused(least_s, window_s):
    with pytest.raises(ValueError, match="0 < least_s < window_s"):
        RateMeter(window_s=window_s, least_s=least_s)
