"""Who goes first where not all first tokens can be in time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.config import SloConfig
from echo_sgl.policies.prefills.late_last import LateLast
from echo_sgl.policies.prefills.places import Queued
from tests.policies.plans import NOW_S, begin, planner

queues = st.lists(st.builds(Queued, st.floats(-100.0, 100.0), st.booleans()))


def waits(due_s: float) -> Queued:
    return Queued(due_s, has_started=False)


@pytest.mark.parametrize(
    ("due_s", "is_put_off"), [(10.0, False), (9.9, True), (5.0, True), (4.9, False)]
)
def test_who_is_late_is_put_off_for_so_long_at_most(due_s, is_put_off):
    assert LateLast(5.0).is_put_off(waits(due_s), 10.0) is is_put_off


def test_who_has_tokens_can_catch_up_and_who_was_promised_nothing_is_never_late():
    late_last = LateLast(5.0)
    assert not late_last.is_put_off(Queued(9.0, has_started=True), 10.0)
    assert not late_last.is_put_off(waits(math.inf), 10.0)
    assert not LateLast(0.0).is_put_off(waits(9.0), 10.0)


def test_the_first_due_time_is_that_of_those_that_can_be_in_time():
    late_last = LateLast(5.0)
    assert late_last.first_due_s([waits(9.0), waits(12.0), waits(11.0)], 10.0) == 11.0
    assert late_last.first_due_s([waits(8.0), waits(9.0)], 10.0) == 8.0
    assert late_last.first_due_s([], 10.0) == math.inf


@given(queue=queues, wait_s=st.floats(0.0, 50.0), now_s=st.floats(-100.0, 100.0))
def test_it_is_always_that_of_one_that_waits(queue, wait_s, now_s):
    late_last = LateLast(wait_s)
    due_s = late_last.first_due_s(queue, now_s)
    first = [one for one in queue if not late_last.is_put_off(one, now_s)]
    assert due_s == min((one.due_s for one in first or queue), default=math.inf)


@pytest.mark.parametrize(
    ("steps", "goes_last"),
    [({}, True), ({"late_wait_s": 0.0}, False), ({"limit": "budget"}, False)],
)
def test_a_planner_puts_late_ones_off_under_promises(steps, goes_last):
    plan = planner(slo=SloConfig(ttft_s=1.0, tpot_s=1.0), **{"late_wait_s": 5.0, **steps})
    begin(plan, decodes=2, due_in_s=5.0, first_due_in_s=0.5, waiting=2)
    assert plan.goes_last(waits(NOW_S - 1.0)) is goes_last
    assert not plan.goes_last(waits(NOW_S + 1.0))
    plan.sorts_queue = True
    plan.keep_turns()
    assert not plan.sorts_queue
    assert not plan.goes_last(waits(NOW_S - 1.0))
