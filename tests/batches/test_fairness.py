"""Which job sends next: equal shares, unless a window is in danger."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batches.fairness import JobLoad, choose_job, laxity_s

DAY_S = 86_400.0
SMALL = JobLoad(1, DAY_S, DAY_S, lines_left=10, tokens_in_flight=0)
LARGE = JobLoad(2, DAY_S, DAY_S, lines_left=50_000, tokens_in_flight=0)


def test_jobs_share_the_window_evenly_whatever_their_size() -> None:
    loads = {load.number: load for load in (SMALL, LARGE)}
    chosen: Counter[int] = Counter()
    for _ in range(100):
        load = choose_job(loads.values(), 0.0, 10.0)
        chosen[load.number] += 1
        loads[load.number] = replace(load, tokens_in_flight=load.tokens_in_flight + 100)
    assert chosen == {1: 50, 2: 50}


def test_a_window_in_danger_goes_first_by_least_laxity() -> None:
    late = replace(LARGE, number=3, deadline_s=5_100.0, tokens_in_flight=10**6)
    later = replace(LARGE, number=4, deadline_s=5_050.0, tokens_in_flight=10**6)
    assert choose_job([SMALL, LARGE, late], 0.0, 10.0) is late
    assert choose_job([SMALL, LARGE, late, later], 0.0, 10.0) is later


def test_without_a_rate_only_the_time_left_counts() -> None:
    assert laxity_s(LARGE, 100.0, None) == DAY_S - 100.0
    assert laxity_s(LARGE, 100.0, 10.0) == DAY_S - 100.0 - 5_000.0
    assert choose_job([LARGE, SMALL], 0.0, None) is SMALL


LOADS = st.builds(
    JobLoad,
    number=st.integers(1, 99),
    deadline_s=st.floats(0, DAY_S),
    window_s=st.floats(1, DAY_S),
    lines_left=st.integers(0, 50_000),
    tokens_in_flight=st.integers(0, 10**6),
)


@given(st.lists(LOADS, min_size=1, unique_by=lambda load: load.number), st.floats(0, DAY_S))
def test_the_choice_is_one_of_the_jobs_and_does_not_depend_on_their_order(
    loads: list[JobLoad], now_s: float
) -> None:
    chosen = choose_job(loads, now_s, 5.0)
    assert chosen in loads
    assert choose_job(loads[::-1], now_s, 5.0) == chosen
