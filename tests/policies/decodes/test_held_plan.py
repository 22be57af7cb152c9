"""That all decode is found for one step and holds for the next: never longer than it is true."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape
from echo_sgl.policies.decodes.contexts import Contexts
from echo_sgl.policies.decodes.held_plan import HELD_S
from echo_sgl.policies.step_planner import StepPlanner
from tests.policies.plans import NOW_S, Unknown, begin, planner

STEP_S = 0.004


def holds(plan, *, decodes=2, offline=3, due_in_s=0.2, after_s=STEP_S) -> bool:
    shape, now_s = BatchShape(), NOW_S + after_s
    for _ in range(decodes):
        shape.add_decode(101)
    return plan.holds(now_s, shape, decode_due_s=now_s + due_in_s, num_offline=offline)


def planned(offline=3, due_in_s=0.2, **steps) -> StepPlanner:
    plan = begin(planner(**steps), decodes=2, due_in_s=due_in_s)
    assert plan.all_decode(Contexts.of([100] * offline))
    return plan


def test_what_fitted_well_holds_for_those_that_stay():
    plan = planned()
    assert holds(plan) and holds(plan, offline=2) and holds(plan, decodes=1, due_in_s=0.25)
    assert plan.slack_s == pytest.approx(0.25)
    assert plan.with_decode_s(100) == pytest.approx(0.02), "beside the one that is left"


@pytest.mark.parametrize(
    "change",
    [{"offline": 4}, {"decodes": 3}, {"due_in_s": 0.199}, {"after_s": HELD_S + 0.001}],
    ids=["one more", "one more online", "less slack", "later"],
)
def test_with_more_to_do_or_less_time_or_later_it_is_planned_anew(change):
    assert not holds(planned(), **change)


def test_what_takes_most_of_the_limit_is_looked_at_each_step():
    assert not holds(planned(due_in_s=0.052), due_in_s=0.052)


def test_a_new_plan_or_somebody_new_ends_it():
    plan = planned()
    plan.held.end()
    assert not holds(plan)
    assert not holds(begin(planned(), decodes=2, due_in_s=0.2))


def test_online_requests_alone_need_no_slack():
    plan = begin(planner(), decodes=2, due_in_s=-1.0)
    assert plan.all_decode(Contexts.of([]))
    assert holds(plan, offline=0, due_in_s=-2.0) and not holds(plan, offline=1, due_in_s=9.0)


def test_nothing_holds_as_long_as_no_step_can_be_predicted():
    plan = begin(planner(Unknown()), decodes=4, due_in_s=math.inf)
    assert plan.all_decode(Contexts.of([100] * 3))
    assert not holds(plan, decodes=4, offline=3, due_in_s=math.inf)


@pytest.mark.parametrize(
    "steps",
    [{"limit": "relative", "max_inflation": 9.0}, {"batch_size": "adaptive"}, {"pack": True}],
)
def test_what_learns_from_each_step_or_leaves_some_out_of_one_sees_each_step(steps):
    assert not holds(planned(**steps))


WORK = st.tuples(st.integers(0, 5), st.integers(0, 6), st.floats(0.0, 0.3))


@given(
    before=WORK,
    after=WORK,
    after_s=st.floats(0.0, HELD_S),
    share=st.sampled_from([0.1, 1.0]),
    places=st.sampled_from([0.0, 0.4]),
    stall_s=st.sampled_from([0.03, 10.0]),
    limit=st.sampled_from(["slack", "budget"]),
)
def test_whatever_holds_would_be_found_again(before, after, after_s, share, places, stall_s, limit):
    (decodes, offline, slack_s), (later_decodes, later_offline, later_slack_s) = before, after
    # An offline request does not turn into an online one.
    assume(later_decodes <= decodes and later_offline <= offline)
    # Half a thousandth of the 100 s that are promised for each token: 50 ms.
    plan = planner(
        limit=limit,
        budget_s=0.08,
        slack_pace=0.0005,
        slack_share=share,
        place_share=places,
        max_stall_s=stall_s,
        max_decodes=12,
    )
    begin(plan, decodes=decodes, due_in_s=slack_s if decodes else math.inf)
    plan.all_decode(Contexts.of([100] * offline))
    later = {"decodes": later_decodes, "due_in_s": later_slack_s if later_decodes else math.inf}
    if holds(plan, offline=later_offline, after_s=after_s, **later):
        again = begin(plan, now_s=NOW_S + after_s, **later)
        # Some tokens longer each, which the margin is for.
        grown = round(after_s / STEP_S)
        assert again.all_decode(Contexts.of([100 + grown] * later_offline))
