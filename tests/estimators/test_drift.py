"""Lasting shifts of the error: noticed soon, once, per kind of step, and across refits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from echo_sgl.batch_shape import StepKind
from echo_sgl.estimators.drift import DriftDetector
from tests.estimators.bands import DECODE, PREFILL, Constant, band, play, still, streams


def drifts(log_ratios: np.ndarray) -> list[int]:
    detector = DriftDetector()
    return [number for number, one in enumerate(log_ratios) if detector.observe(one)]


@pytest.mark.parametrize("shift", [0.15, -0.15, math.log(2), -math.log(2)])
def test_a_lasting_shift_is_one_drift_and_is_noticed_soon(shift):
    found = drifts(still(4000, seed=21) + shift * (np.arange(4000) >= 2000))
    assert len(found) == 1
    assert 2000 <= found[0] < 2200


@pytest.mark.parametrize("place", [0, 50, 299])
def test_one_step_far_off_at_first_hides_no_shift(place):
    ratios = 0.03 * still(4000, seed=23) / still(4000, seed=23).std() + 0.15 * (
        np.arange(4000) >= 2000
    )
    ratios[place] = 8.0
    found = drifts(ratios)
    assert len(found) == 1
    assert 2000 <= found[0] < 2400


@pytest.mark.parametrize("name", ["nothing changes", "outliers of many times", "neighbours alike"])
@pytest.mark.parametrize("seed", range(22, 26))
def test_noise_is_not_a_drift_whatever_its_kind(name, seed):
    assert drifts(streams(seed)[name]) == []


@pytest.mark.parametrize("usual", [-2.0, 0.0, 2.0])
def test_what_was_so_from_the_first_is_usual_however_far_off(usual):
    assert drifts(usual + still(4000, seed=30)) == []
    assert len(drifts(usual + still(4000, seed=30) + 0.15 * (np.arange(4000) >= 2000))) == 1


def test_a_slow_drift_is_noticed_too_and_more_than_once():
    assert len(drifts(streams(26)["three times as slow, little by little"])) > 3


def test_a_shift_of_one_percent_is_none():
    assert drifts(0.001 * still(4000, seed=27) + 0.01 * (np.arange(4000) >= 2000)) == []


def test_a_shift_of_the_zero_is_none():
    """What refits do to the values; the steps are as they were."""
    values, detector = still(4000, seed=28), DriftDetector()
    found = []
    for number, value in enumerate(values):
        if number and number % 505 == 0:
            detector.shift(0.3)
        found.append(detector.observe(value + 0.3 * (number // 505)))
    assert not any(found)


@pytest.mark.parametrize("refits", [(7,), (155,), (1003, 1990), range(50, 4000, 50)])
def test_a_lasting_shift_is_noticed_as_soon_whatever_zero_values_are_told_from(refits):
    values = still(4000, seed=29) + 0.15 * (np.arange(4000) >= 2000)
    detector, zero, found = DriftDetector(), 0.0, []
    for number, value in enumerate(values):
        if number in refits:
            detector.shift(0.7)
            zero += 0.7
        if detector.observe(value + zero):
            found.append(number)
    assert found == drifts(values) != []


def test_a_kind_that_is_rare_between_two_refits_is_noticed_to_drift():
    one = band()
    for round_number in range(20):
        factor = math.log(1.5) if round_number >= 10 else 0.0
        play(one, still(400, seed=round_number))
        play(one, factor + still(100, seed=100 + round_number), PREFILL)
        one.replace_model(Constant(0.01 if round_number < 15 else 0.012))
    assert one.num_drifts(StepKind.PREFILL) == 1
    assert one.num_drifts(StepKind.DECODE) == 0


def test_drifts_are_counted_per_kind_of_step():
    one = band()
    for row, shift in ((DECODE, 0.0), (PREFILL, math.log(2))):
        play(one, still(2000, seed=28) + shift * (np.arange(2000) >= 1000), row=row)
    counts = {kind: one.num_drifts(kind) for kind in StepKind}
    assert counts == {StepKind.DECODE: 0, StepKind.PREFILL: 1, StepKind.MIXED: 0}
