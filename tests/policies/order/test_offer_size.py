"""Offers follow what passes start: down slowly, up at once, within the bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.order.offer_size import MAX_ASIDE, MAX_OFFERED, OfferSize, in_line


def test_who_could_not_start_is_passed_over_but_not_for_ever() -> None:
    large = range(1, MAX_ASIDE + 2)  # they fit no more; who is behind them waits
    assert in_line(range(10), 3, lambda one: one % 2 == 0) == [0, 2, 4]
    assert in_line([*large, 0], 2, lambda one: one == 0) == [0]
    assert in_line([*large, -1, -2, 0], 1, lambda one: one == 0) == [1]
    assert in_line([7, 8, 9], 2, lambda one: False) == [7, 8]
    assert in_line(iter([1]), 0, lambda one: True) == []


def test_the_first_passes_are_offered_all_that_could_start() -> None:
    assert OfferSize().limit(20, 8) == 28
    assert OfferSize().limit(200, 8) == MAX_OFFERED


def test_passes_that_start_few_are_offered_few() -> None:
    size = OfferSize()
    for _ in range(200):
        size.note(1, 10)
    assert size.limit(50, 8) == 2 + 8  # a bit more than 1
    assert size.limit(0, 8) == 8  # only to choose from, for a slot that somebody gives up


def test_free_slots_are_filled_by_offers_that_double() -> None:
    size, num_free, passes = OfferSize(), 60, 0
    for _ in range(500):
        size.note(0, 5)
    while num_free:
        started = min(num_free, size.limit(num_free, 0))
        size.note(started, started)
        num_free -= started
        passes += 1
    assert passes <= 6  # 1, 2, 4, 8, 16 and the rest


@given(
    started=st.lists(st.integers(0, 64), max_size=60),
    num_free=st.integers(-5, 500),
    num_candidates=st.integers(0, 100),
    more=st.integers(0, 8),
)
def test_offers_stay_within_free_slots_and_the_most(
    started: list[int], num_free: int, num_candidates: int, more: int
) -> None:
    size = OfferSize()
    for one in started:
        size.note(one, one + more)
    limit = size.limit(num_free, num_candidates)
    assert min(MAX_OFFERED, num_candidates) <= limit <= MAX_OFFERED
    assert limit <= max(0, num_free) + num_candidates
    last = (started[-1] if more else 2 * started[-1]) if started else 0
    if num_free >= last:  # the last pass can repeat itself, twice over if it started all
        assert limit >= min(MAX_OFFERED, last + num_candidates)
