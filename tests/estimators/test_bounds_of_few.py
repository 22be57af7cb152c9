"""Bounds that rest on few steps: one that was measured wrong is not what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from echo_sgl.batch_shape import StepKind
from echo_sgl.estimators.conformal import ConformalBand, Evidence
from tests.estimators.bands import DECODE, band, play, still


def test_too_few_steps_are_missing_evidence_and_give_the_cold_bound():
    one = band(cold_ratio=2.0)
    assert one.evidence(StepKind.DECODE, 0.0) is Evidence.MISSING
    play(one, still(ConformalBand.MIN_STEPS - 1, seed=15))
    assert one.evidence(StepKind.DECODE, 0.3) is Evidence.MISSING
    assert one.predict_upper(DECODE, 0.5) == pytest.approx(0.02)
    one.observe(DECODE, 0.01, 0.3)
    assert one.evidence(StepKind.DECODE, 0.3) is Evidence.FRESH
    assert one.predict_upper(DECODE, 0.5) < 0.015


def test_the_cold_bound_goes_beyond_what_is_expected():
    """A profile of a machine that was twice as fast: its bound is not below what steps take."""
    one = band(cold_ratio=1.5)
    play(one, math.log(2) + still(10, seed=15))
    assert one.predict_upper(DECODE, 0.5) == pytest.approx(1.5 * 0.02, rel=0.1)
    play(one, math.log(0.5) + still(10, seed=16))
    assert one.predict_upper(DECODE, 0.5) == pytest.approx(1.5 * 0.01)


def test_the_cold_bound_is_above_all_steps_but_one():
    """Rare steps that differ by their shapes: a bound of half as much again would cover few."""
    one = band(cold_ratio=1.5)
    play(one, np.log(np.array([1.0, 2.0, 1.0, 40.0, 1.0, 3.0, 1.0])))
    assert one.evidence(StepKind.DECODE, 0.1) is Evidence.MISSING
    assert one.predict_upper(DECODE, 0.95) == pytest.approx(0.03, rel=0.01)


def test_a_factor_that_the_first_steps_share_is_no_excess():
    one = band()
    play(one, math.log(2) + still(ConformalBand.MIN_STEPS, seed=17))
    assert one.predict_upper(DECODE, 0.95) == pytest.approx(0.02, rel=0.25)


@pytest.mark.parametrize("quantile", [0.95, 0.99])
@pytest.mark.parametrize("num_steps", range(29, 40))
def test_one_step_that_was_measured_wrong_is_not_the_bound_of_few(quantile, num_steps):
    """Not of thirty-odd either, of which the largest is the quantile asked for."""
    ratios = [0.01 * (number % 5) for number in range(num_steps)]
    ratios[12] = math.log(6000.0)
    one = band()
    play(one, np.array(ratios))
    assert one.predict_upper(DECODE, quantile) < 0.02


@pytest.mark.parametrize("num_steps", range(30, 38))
def test_the_largest_of_thirty_odd_is_their_bound_unless_it_stands_alone(num_steps):
    """Without it a bound of 95 % would cover 93.5 % of the steps."""
    ratios = [0.01 * (number % 5) for number in range(num_steps)]
    ratios[12] = 0.6
    one = band()
    play(one, np.array(ratios))
    assert one.predict_upper(DECODE, 0.95) > 0.01 * math.exp(0.5)
