"""What the host takes beside the device's steps is learned from online work alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import StepKind
from echo_sgl.policies.beside_time import NUM_STEPS, BesideTime

DECODE, PREFILL = StepKind.DECODE, StepKind.PREFILL


def learned(*steps, most_s=1.0, is_alone=True):
    beside = BesideTime(most_s)
    beside.observe(None, 0.0, is_alone=is_alone)
    for step in steps:
        beside.observe(DECODE, step, is_alone=is_alone)
    return beside.mean_s(DECODE)


def test_the_first_steps_count_alike():
    assert learned(0.001, 0.003, 0.005) == pytest.approx(0.003)


def test_predictions_that_are_too_long_are_put_right_as_well():
    assert learned(-0.002, -0.002) == pytest.approx(-0.002)


def test_a_hiccup_counts_for_the_most_at_most():
    assert learned(5.0, most_s=0.1) == pytest.approx(0.1)


def test_a_machine_that_changes_is_followed():
    assert learned(*[0.001] * 500, *[0.009] * 4 * NUM_STEPS) == pytest.approx(0.009, rel=0.05)


def test_steps_with_offline_work_tell_nothing():
    assert learned(0.001, 0.003, is_alone=False) == 0.0


def test_with_overlap_a_step_pays_for_the_one_before_it():
    """The first step behind an offline one is not learned from."""
    beside = BesideTime(1.0)
    for _ in range(100):
        beside.observe(DECODE, 0.0, is_alone=False)
        beside.observe(DECODE, 0.5, is_alone=True)
        beside.observe(DECODE, 0.001, is_alone=True)
    assert beside.mean_s(DECODE) == pytest.approx(0.001)


@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=200))
def test_kinds_are_apart_and_means_stay_among_what_was_seen(steps):
    beside = BesideTime(0.5)
    beside.observe(None, 0.0, is_alone=True)
    for one in steps:
        beside.observe(DECODE, one, is_alone=True)
    seen = [min(one, 0.5) for one in steps]
    assert min(seen) - 1e-9 <= beside.mean_s(DECODE) <= max(seen) + 1e-9
    assert beside.mean_s(PREFILL) == 0.0
