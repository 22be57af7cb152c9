"""The budget of a step: bounds, direction, and where it comes to rest."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.limits.online_attainment import WINDOW_REQUESTS, BudgetController


def controller(budget_s: float = 0.05, *, target: float = 0.99) -> BudgetController:
    return BudgetController(budget_s, target=target, minimum_s=0.01, maximum_s=1.0)


def feed(control: BudgetController, num_met: int) -> float:
    for number in range(WINDOW_REQUESTS):
        control.observe(number < num_met)
    return control.budget_s


@given(st.floats(0.01, 1.0), st.floats(0, 1), st.lists(st.booleans(), max_size=200))
def test_the_budget_stays_between_its_bounds(budget_s, target, observed):
    control = controller(budget_s, target=target)
    for met in observed:
        control.observe(met)
        assert 0.01 <= control.budget_s <= 1.0


@given(st.floats(0.013, 0.95), st.floats(0, 1), st.integers(0, WINDOW_REQUESTS))
def test_a_window_below_the_target_cuts_by_a_fifth_and_any_other_raises(budget_s, target, num_met):
    factor = 0.8 if num_met / WINDOW_REQUESTS < target else 1.05
    assert math.isclose(feed(controller(budget_s, target=target), num_met), budget_s * factor)


@given(st.lists(st.booleans(), max_size=WINDOW_REQUESTS - 1))
def test_nothing_moves_within_a_window(observed):
    control = controller()
    for _ in range(2):
        before_s = control.budget_s
        for met in observed:
            control.observe(met)
            assert control.budget_s == before_s
        for _ in range(WINDOW_REQUESTS - len(observed)):
            control.observe(True)
        assert control.budget_s != before_s


@pytest.mark.parametrize(("num_met", "end_s"), [(0, 0.01), (WINDOW_REQUESTS, 1.0)])
def test_however_many_windows_say_so_it_ends_at_its_bounds(num_met, end_s):
    control = controller()
    assert [feed(control, num_met) for _ in range(70)][-1] == end_s


def test_begun_again_it_is_as_if_no_request_had_ended():
    control = controller()
    feed(control, 0)
    for _ in range(WINDOW_REQUESTS - 1):
        control.observe(False)
    control.restart()
    assert control.budget_s == 0.05
    for _ in range(WINDOW_REQUESTS - 1):
        control.observe(True)
    assert control.budget_s == 0.05
    control.observe(True)
    assert math.isclose(control.budget_s, 0.05 * 1.05)


def test_a_window_does_not_remember_the_one_before():
    control = controller()
    assert math.isclose(feed(control, 0), 0.04)
    assert math.isclose(feed(control, 20), 0.042)


@given(st.lists(st.booleans(), max_size=100))
def test_more_promises_kept_never_give_less_budget_in_the_end(observed):
    observed = observed[: len(observed) // WINDOW_REQUESTS * WINDOW_REQUESTS]
    actual, best = controller(), controller()
    for met in observed:
        actual.observe(met)
        best.observe(True)
        assert actual.budget_s <= best.budget_s


def test_where_attainment_falls_with_the_budget_it_comes_to_rest_near_the_target():
    """Requests miss more often the longer the steps: 1 % at 100 ms, by the square of it."""
    control, rng = controller(), random.Random(4)
    num_met = num_late = 0
    for number in range(40_000):
        met = rng.random() >= 0.01 * (control.budget_s / 0.1) ** 2
        control.observe(met)
        if number >= 4_000:
            num_met, num_late = num_met + met, num_late + (not met)
    assert 0.985 <= num_met / (num_met + num_late) <= 0.995


@pytest.mark.parametrize(
    ("budget_s", "minimum_s", "maximum_s"),
    [(0.05, 0.0, 1.0), (0.05, 0.06, 1.0), (2.0, 0.01, 1.0), (float("nan"), 0.01, 1.0)],
)
def test_bounds_that_leave_no_budget_are_refused(budget_s, minimum_s, maximum_s):
    with pytest.raises(ValueError, match="0 < minimum_s <= budget_s <= maximum_s"):
        BudgetController(budget_s, target=0.9, minimum_s=minimum_s, maximum_s=maximum_s)


def test_a_target_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match="target is 99"):
        controller(target=99)
