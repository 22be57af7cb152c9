"""What the host takes beside the device's steps is learned from online work alone."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import StepKind
from echo_sgl.policies.limits.beside_time import FEWEST, NUM_STEPS, BesideTime
from echo_sgl.policies.limits.step_limit import OnlinePart, OnlineView
from echo_sgl.policies.limits.step_limits import RelativeLimit

DECODE, PREFILL = StepKind.DECODE, StepKind.PREFILL


def learned(*steps, is_alone=True):
    beside = BesideTime()
    beside.observe(None, 0.0, is_alone=is_alone)
    for step in steps:
        beside.observe(DECODE, step, is_alone=is_alone)
    return beside.typical_s(DECODE)


def test_a_few_steps_tell_and_fewer_do_not():
    assert learned(*[0.003] * FEWEST) == pytest.approx(0.003)
    assert learned(*[0.003] * (FEWEST - 1)) == 0.0


def test_predictions_that_are_too_long_are_put_right_as_well():
    assert learned(*[-0.002] * FEWEST) == pytest.approx(-0.002)


def test_that_they_are_too_long_does_not_fade():
    """It keeps offline work out, and online work is soon alone again."""
    beside = BesideTime()
    for is_alone in [True] * 10 + [False] * 5000:
        beside.observe(DECODE, -0.002, is_alone=is_alone)
    assert beside.typical_s(DECODE) == -0.002


@pytest.mark.parametrize("place", range(FEWEST))
def test_a_hiccup_counts_as_any_other_step_that_was_long(place):
    steps = [0.001, 0.002, 0.003, 0.004, 0.005]
    steps[place] = 60.0
    assert learned(*steps) <= 0.004


def test_a_machine_that_changes_is_followed():
    assert learned(*[0.001] * 500, *[0.009] * NUM_STEPS) == pytest.approx(0.009, rel=0.05)


def test_steps_with_offline_work_tell_nothing():
    assert learned(*[0.001, 0.003] * FEWEST, is_alone=False) == 0.0


def test_with_overlap_a_step_pays_for_the_one_before_it():
    """The first step behind an offline one is not learned from."""
    beside = BesideTime()
    for _ in range(100):
        beside.observe(DECODE, 0.4, is_alone=False)
        beside.observe(DECODE, 0.5, is_alone=True)
        beside.observe(DECODE, 0.001, is_alone=True)
    assert beside.typical_s(DECODE) == pytest.approx(0.001)


def test_what_is_not_learned_again_fades_and_comes_back():
    beside = BesideTime()
    for _ in range(10):
        beside.observe(DECODE, 0.01, is_alone=True)
    for _ in range(5000):
        beside.observe(DECODE, 0.02, is_alone=False)
    assert 0.003 < beside.typical_s(DECODE) < 0.004
    for _ in range(2):
        beside.observe(DECODE, 0.01, is_alone=True)
    assert beside.typical_s(DECODE) == pytest.approx(0.01)


@given(st.lists(st.floats(-1.0, 1.0), min_size=FEWEST + 1, max_size=200))
def test_kinds_are_apart_and_what_is_typical_was_seen(steps):
    beside = BesideTime()
    beside.observe(None, 0.0, is_alone=True)
    for one in steps:
        beside.observe(DECODE, one, is_alone=True)
    seen = steps[-NUM_STEPS:]
    assert min(seen) - 1e-9 <= beside.typical_s(DECODE) <= max(seen) + 1e-9
    assert beside.typical_s(PREFILL) == 0.0


def inflation(hiccup_s: float, at: int, *, num_steps: int = 8000) -> float:
    """How much longer than alone online decodes take, offline work joining where there is credit.

    13 ms of the device and 3 of the host alone; 6 more with offline work. The first steps are
    alone; the second half counts.
    """
    rng, limit = random.Random(1), RelativeLimit(0.1, 1.1)
    taken_s = alone_s = 0.0
    for number in range(num_steps):
        view = OnlineView(0.0, math.inf, math.inf, alone_s=0.013, is_present=True)
        joins = number > 8 and limit._limit_s(view) >= 0.019
        time_s = 0.016 * rng.uniform(0.95, 1.05) + 0.006 * joins
        time_s += hiccup_s if number == at else 0.0
        limit.note_step(OnlinePart(0.013, DECODE, is_alone=not joins), time_s)
        if number >= num_steps // 2:
            taken_s, alone_s = taken_s + time_s, alone_s + 0.016
    return taken_s / alone_s


@pytest.mark.parametrize("at", [1, 3, 20, 2000])
@pytest.mark.parametrize("hiccup_s", [0.0, 0.02, 0.1, 60.0])
def test_one_hiccup_does_not_hold_online_work_back_for_good(hiccup_s: float, at: int):
    """Taken for the host's part it gives credit for offline work in every step; by a mean, 1.4 and
    more times, since nothing alone was ever seen again."""
    assert 1.02 < inflation(hiccup_s, at) < 1.13
