"""Which jobs are worked on and which sends next: equal shares, unless a window is in danger."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batches.dispatch.fairness import (
    Applicant,
    JobLoad,
    ShareLevel,
    choose_active,
    choose_job,
    laxity_s,
)

DAY_S = 86_400.0
HOUR_S = 3600.0
SMALL = JobLoad(1, DAY_S, DAY_S, lines_left=10, sent_tokens=0)
LARGE = JobLoad(2, DAY_S, DAY_S, lines_left=50_000, sent_tokens=0)


def test_jobs_share_the_window_evenly_whatever_their_size() -> None:
    loads = {load.number: load for load in (SMALL, LARGE)}
    chosen: Counter[int] = Counter()
    for _ in range(100):
        load = choose_job(loads.values(), 0.0, 10.0)
        chosen[load.number] += 1
        loads[load.number] = replace(load, sent_tokens=load.sent_tokens + 100)
    assert chosen == {1: 50, 2: 50}


def test_a_job_that_comes_later_starts_where_the_others_stand() -> None:
    level, sent = ShareLevel(), {1: 0, 2: 0}
    for _ in range(1000):
        sent[1] = max(sent[1], level.among([sent[1]])) + 100
    order = []
    for _ in range(10):
        least = level.among(sent.values())
        sent = {number: max(least, tokens) for number, tokens in sent.items()}
        loads = [replace(SMALL, number=number, sent_tokens=sent[number]) for number in sent]
        order.append(choose_job(loads, 0.0, 10.0).number)
        sent[order[-1]] += 100
    assert sorted(order[:2]) == sorted(order[2:4]) == [1, 2]
    assert Counter(order) == {1: 5, 2: 5}


def test_a_job_of_large_lines_gets_as_many_tokens_as_one_of_small_ones() -> None:
    level, sent, tokens = ShareLevel(), {1: 0, 2: 0}, {1: 10_000, 2: 10}
    for _ in range(5000):
        least = level.among(sent.values())
        loads = [replace(SMALL, number=one, sent_tokens=max(least, sent[one])) for one in sent]
        chosen = choose_job(loads, 0.0, 10.0)
        sent[chosen.number] = chosen.sent_tokens + tokens[chosen.number]
    assert abs(sent[1] - sent[2]) <= 10_000
    assert min(sent.values()) > 20_000


def test_a_window_in_danger_goes_first_by_least_laxity() -> None:
    late = replace(LARGE, number=3, deadline_s=5_100.0, sent_tokens=10**6)
    later = replace(LARGE, number=4, deadline_s=5_050.0, sent_tokens=10**6)
    assert choose_job([SMALL, LARGE, late], 0.0, 10.0) is late
    assert choose_job([SMALL, LARGE, late, later], 0.0, 10.0) is later


def test_what_cannot_be_in_time_gets_an_equal_share() -> None:
    hopeless = replace(LARGE, number=3, deadline_s=HOUR_S, window_s=HOUR_S, sent_tokens=1)
    assert laxity_s(hopeless, 0.0, 10.0) < 0
    assert choose_job([SMALL, hopeless], 0.0, 10.0) is SMALL
    assert choose_job([replace(SMALL, sent_tokens=2), hopeless], 0.0, 10.0) is hopeless
    danger = replace(LARGE, number=4, deadline_s=5_100.0, sent_tokens=10**6)
    assert choose_job([hopeless, danger], 0.0, 10.0) is danger


def test_a_hopeless_job_takes_no_feasible_one_with_it() -> None:
    """At 10 lines/s, 36,000 of 50,000 lines fit in the hour; 20,000 more fit in two hours."""
    hopeless = JobLoad(1, HOUR_S, HOUR_S, lines_left=50_000, sent_tokens=0)
    feasible = JobLoad(2, 2 * HOUR_S, 2 * HOUR_S, lines_left=50_000, sent_tokens=0)
    open_jobs = {1: hopeless, 2: feasible}
    sent: Counter[int] = Counter()
    ended_s: dict[int, int] = {}
    for now_s in range(0, int(2 * HOUR_S), 10):
        open_jobs = {n: job for n, job in open_jobs.items() if job.deadline_s > now_s}
        for _ in range(10):  # ten lines at a time, all of one size
            if not open_jobs:
                break
            shown = [replace(job, sent_tokens=sent[n]) for n, job in open_jobs.items()]
            number = choose_job(shown, now_s, 10.0).number
            sent[number] += 10
            left = open_jobs[number].lines_left - 10
            open_jobs[number] = replace(open_jobs[number], lines_left=left)
            if left <= 0:
                ended_s[number] = now_s
                del open_jobs[number]
    assert ended_s.keys() == {2}
    assert sent[1] > 0.4 * 36_000


def test_without_a_rate_only_the_time_left_counts() -> None:
    assert laxity_s(LARGE, 100.0, None) == DAY_S - 100.0
    assert laxity_s(LARGE, 100.0, 10.0) == DAY_S - 100.0 - 5_000.0
    assert choose_job([LARGE, SMALL], 0.0, None) is SMALL


def applicants(
    tenant: str, numbers: range, *, is_active: bool, lines: int = 100, deadline_s: float = DAY_S
) -> list[Applicant]:
    return [
        Applicant(JobLoad(number, deadline_s, DAY_S, lines, 0), tenant, is_active)
        for number in numbers
    ]


def numbers(chosen: list[Applicant]) -> set[int]:
    return {one.load.number for one in chosen}


def test_what_is_active_stays_while_nobody_needs_its_place() -> None:
    active = applicants("one", range(10, 26), is_active=True)
    earlier = applicants("one", range(1, 3), is_active=False, deadline_s=DAY_S / 2)
    assert numbers(choose_active([*earlier, *active], 16, 0.0, 10.0)) == set(range(10, 26))
    assert numbers(choose_active([*earlier, *active[1:]], 16, 0.0, 10.0)) == {1, *range(11, 26)}


def test_a_job_in_danger_takes_the_place_of_the_job_with_most_laxity() -> None:
    active = applicants("one", range(10, 25), is_active=True)
    spare = applicants("one", range(9, 10), is_active=True, lines=1)
    danger = applicants("one", range(30, 31), is_active=False, deadline_s=100.0)
    chosen = choose_active([*spare, *active, *danger], 16, 0.0, 10.0)
    assert numbers(chosen) == {*range(10, 25), 30}


def test_a_tenant_without_a_place_gets_one_of_the_tenant_with_most() -> None:
    many = applicants("many", range(1, 15), is_active=True)
    few = applicants("few", range(20, 22), is_active=True)
    new = applicants("new", range(30, 31), is_active=False)
    chosen = choose_active([*many, *few, *new], 16, 0.0, 10.0)
    assert Counter(one.tenant for one in chosen) == {"many": 13, "few": 2, "new": 1}


def test_a_tenant_full_of_jobs_in_danger_leaves_others_a_place() -> None:
    danger = applicants("one", range(1, 31), is_active=True, deadline_s=100.0)
    other = applicants("two", range(40, 42), is_active=False)
    chosen = choose_active([*danger, *other], 16, 0.0, 10.0)
    assert Counter(one.tenant for one in chosen) == {"one": 15, "two": 1}


LOADS = st.builds(
    JobLoad,
    number=st.integers(1, 99),
    deadline_s=st.floats(0, DAY_S),
    window_s=st.floats(1, DAY_S),
    lines_left=st.integers(0, 50_000),
    sent_tokens=st.integers(0, 10**6),
)
MANY_LOADS = st.lists(LOADS, min_size=1, unique_by=lambda load: load.number)


@given(MANY_LOADS, st.floats(0, DAY_S))
def test_the_choice_is_one_of_the_jobs_and_does_not_depend_on_their_order(
    loads: list[JobLoad], now_s: float
) -> None:
    chosen = choose_job(loads, now_s, 5.0)
    assert chosen in loads
    assert choose_job(loads[::-1], now_s, 5.0) == chosen


@given(MANY_LOADS, st.floats(0, DAY_S))
def test_only_a_job_that_can_be_in_time_goes_before_its_turn(
    loads: list[JobLoad], now_s: float
) -> None:
    chosen = choose_job(loads, now_s, 5.0)
    if any(load.sent_tokens < chosen.sent_tokens for load in loads):
        assert 0 <= laxity_s(chosen, now_s, 5.0) < 300


@given(MANY_LOADS, st.sets(st.integers(1, 99)), st.integers(1, 16), st.floats(0, DAY_S))
def test_places_are_all_given_every_tenant_has_one_and_whoever_has_one_keeps_it(
    loads: list[JobLoad], active: set[int], max_jobs: int, now_s: float
) -> None:
    asking = [Applicant(load, "abcd"[load.number % 4], load.number in active) for load in loads]
    chosen = choose_active(asking, max_jobs, now_s, 5.0)
    assert len(chosen) == len(numbers(chosen)) == min(max_jobs, len(asking))
    assert set(map(id, chosen)) <= set(map(id, asking))
    served = Counter(one.tenant for one in chosen)
    assert len(served) == min(max_jobs, len({one.tenant for one in asking}))
    again = [replace(one, is_active=one in chosen) for one in asking]
    assert numbers(choose_active(again[::-1], max_jobs, now_s, 5.0)) == numbers(chosen)
