"""The places that online requests come to hold."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.prefills.place_trend import PlaceTrend

WINDOW_S = 10.0
shares = st.floats(0.0, 3.0)
seconds = st.floats(0.0, 100.0)


def settled(taken: float) -> PlaceTrend:
    trend = PlaceTrend(WINDOW_S)
    trend.ahead(0.0, taken)
    assert trend.ahead(1000.0, taken) == pytest.approx(taken)
    return trend


def test_a_steady_load_comes_to_what_it_is_however_high():
    assert settled(0.9).ahead(1001.0, 0.9) == pytest.approx(0.9)


def test_a_burst_counts_twice_at_first_and_less_the_longer_it_lasts():
    trend = settled(0.2)
    ahead = [trend.ahead(1000.0 + after_s, 0.5) for after_s in (0.0, WINDOW_S, 10 * WINDOW_S)]
    assert ahead == pytest.approx([0.8, 0.5 + 0.3 / 2.718281828, 0.5], abs=1e-4)


def test_a_burst_counts_as_long_however_many_steps_look_at_it():
    trend = settled(0.2)
    ahead = [trend.ahead(1000.0 + 0.01 * step, 0.5) for step in range(1001)]
    assert ahead[-1] == pytest.approx(0.5 + 0.3 / 2.718281828)


def test_where_fewer_are_taken_than_were_that_is_what_counts():
    trend = settled(0.8)
    assert trend.ahead(1000.0, 0.3) == trend.ahead(1004.0, 0.3) == 0.3


def test_after_a_pause_a_burst_is_one():
    trend = settled(0.5)
    trend.ahead(1000.0, 0.0)
    assert trend.ahead(2000.0, 0.4) == pytest.approx(0.8)


def test_without_a_window_there_is_no_trend():
    trend = PlaceTrend(0.0)
    assert [trend.ahead(0.0, 0.1), trend.ahead(1.0, 0.7)] == [0.1, 0.7]


@given(calls=st.lists(st.tuples(st.floats(-100.0, 100.0), shares)))
def test_whatever_the_clock_does_it_is_between_once_and_twice_of_what_is_taken(calls):
    trend = PlaceTrend(WINDOW_S)
    for now_s, taken in calls:
        assert taken <= trend.ahead(now_s, taken) <= 2 * taken


@given(taken=st.lists(shares, min_size=1), final=shares, waits_s=st.lists(seconds, min_size=2))
def test_while_nobody_comes_it_only_falls(taken, final, waits_s):
    trend = PlaceTrend(WINDOW_S)
    for now_s, share in enumerate(taken):
        trend.ahead(float(now_s), share)
    times_s = itertools.accumulate(waits_s, initial=float(len(taken)))
    ahead = [trend.ahead(now_s, final) for now_s in times_s]
    assert all(later <= before + 1e-9 for before, later in itertools.pairwise(ahead))
