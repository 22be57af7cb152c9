"""What a planner tells a limit that keeps something between steps."""

from __future__ import annotations

import math

import pytest

from echo_sgl.batch_shape import BatchShape
from tests.policies.plans import NOW_S, begin, planner


def one_decode(plan, now_s, *, waiting=0):
    """A step with one online decode, 10 ms by prediction, is planned."""
    decodes = BatchShape()
    decodes.add_decode(100)
    due_s = {"decode_due_s": math.inf, "first_due_s": math.inf}
    plan.begin(now_s, decodes, **due_s, num_waiting=waiting)
    return decodes


def relative_steps(times_s, *, is_alone=False):
    """A planner after steps that took these times, and when the last of them ended."""
    plan, now_s = planner(limit="relative", max_inflation=1.5, min_chunk_tokens=1), NOW_S
    for time_s in times_s:
        plan.launch(one_decode(plan, now_s), is_alone=is_alone)
        now_s += time_s
    return plan, now_s


def limit_after(plan, now_s, **waiting):
    one_decode(plan, now_s, **waiting)
    return plan.limit_s


def test_what_steps_left_of_the_inflation_goes_to_a_later_one():
    assert limit_after(*relative_steps([])) == pytest.approx(0.015)
    assert limit_after(*relative_steps([0.010] * 4)) == pytest.approx(0.015 + 4 * 0.005)
    assert limit_after(*relative_steps([0.010] * 4), waiting=1) == pytest.approx(0.015)


def test_online_work_alone_teaches_how_long_the_loop_takes():
    """10 ms beside each step, of which the inflation gives half, too."""
    assert limit_after(*relative_steps([0.020] * 100, is_alone=True)) > 0.5
    assert limit_after(*relative_steps([0.020] * 100)) < 0.0


def test_a_step_that_lets_online_requests_wait_costs_what_it_takes_and_earns_nothing():
    """Nor is it taken for one of their decodes, which take 10 ms beside what is predicted."""
    plan, now_s = relative_steps([0.020] * 100, is_alone=True)
    before_s = limit_after(plan, now_s)
    plan.launch(BatchShape(), is_alone=False)
    assert limit_after(plan, now_s + 0.2) == pytest.approx(before_s - 0.2)


def test_a_step_while_nobody_is_online_ends_what_was_saved_up():
    plan, now_s = relative_steps([0.010] * 4)
    begin(plan, now_s=now_s).launch(BatchShape(), is_alone=False)
    assert limit_after(plan, now_s + 0.01) == pytest.approx(0.015)


def test_a_pass_that_launches_nothing_costs_nothing():
    plan, now_s = relative_steps([0.010] * 4)
    for later_s in (0.0, 1.0, 2.0):
        assert limit_after(plan, now_s + later_s) == pytest.approx(0.015 + 4 * 0.005)
