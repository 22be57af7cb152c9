"""Bursts, phases and lengths by rule: rates where they should be, equal by seed."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.workloads import WorkloadError
from eval.workloads.patterns import (
    Segment,
    arrivals_until,
    burst_segments,
    gamma_arrivals,
    lognormal_lengths,
    phase_segments,
    poisson_arrivals,
)


def first(segments: object, num: int) -> list[Segment]:
    return list(itertools.islice(segments, num))  # type: ignore[call-overload]


def mean_rate(segments: list[Segment]) -> float:
    return sum(r * s for r, s in segments) / sum(s for _, s in segments)


def test_a_burst_is_in_the_middle_of_its_period_and_four_times_as_fast() -> None:
    segments = first(burst_segments(1.75, factor=4, burst_s=15, every_s=60), 6)
    assert segments[:3] == [(1.0, 22.5), (4.0, 15), (1.0, 22.5)]
    assert segments[3:] == segments[:3]


def test_phases_alternate_beginning_with_the_high_one() -> None:
    assert first(phase_segments(8, ratio=15, phase_s=90), 3) == [(15, 90), (1, 90), (15, 90)]


@given(st.floats(0.1, 50), st.floats(1, 20), st.floats(1, 20), st.floats(21, 90))
def test_the_mean_rate_is_what_was_asked_for_however_it_is_spread(
    mean_rps: float, factor: float, burst_s: float, every_s: float
) -> None:
    bursts = burst_segments(mean_rps, factor=factor, burst_s=burst_s, every_s=every_s)
    phases = phase_segments(mean_rps, ratio=factor, phase_s=burst_s)
    assert mean_rate(first(bursts, 3)) == pytest.approx(mean_rps)
    assert mean_rate(first(phases, 2)) == pytest.approx(mean_rps)


@pytest.mark.parametrize("variation", [0.5, 1.0, 1.5])
def test_gamma_arrivals_come_at_their_rate_and_in_clumps_as_asked(variation: float) -> None:
    def arrivals() -> list[float]:
        return arrivals_until(gamma_arrivals(4.0, variation, random.Random(1)), duration_s=2000)

    times_s = arrivals()
    assert times_s == sorted(times_s) == arrivals()
    assert len(times_s) / 2000 == pytest.approx(4.0, rel=0.06)
    gaps_s = np.diff(times_s)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(variation, rel=0.06)


@given(st.integers(0, 1000))
def test_arrivals_follow_their_rate_in_order_and_by_seed(seed: int) -> None:
    def arrivals() -> list[float]:
        segments = burst_segments(4, factor=4, burst_s=10, every_s=40)
        return arrivals_until(poisson_arrivals(segments, random.Random(seed)), duration_s=200)

    times_s = arrivals()
    assert times_s == sorted(times_s) == arrivals()
    assert times_s[0] > 0 and times_s[-1] < 200
    in_burst = sum(15 <= at_s % 40 < 25 for at_s in times_s)
    # 4 of 7 requests are expected in bursts; 800 requests spread by 14 either way.
    assert 0.45 < in_burst / len(times_s) < 0.69
    assert 600 < len(times_s) < 1000


@pytest.mark.parametrize("burst_s", [0.0, 60.0, 61.0])
def test_bursts_without_a_pause_between_them_are_refused(burst_s: float) -> None:
    with pytest.raises(WorkloadError, match="do not fit every 60 s"):
        burst_segments(1, factor=4, burst_s=burst_s, every_s=60)


def test_a_run_without_any_request_is_refused() -> None:
    with pytest.raises(WorkloadError, match="raise --online-load or --duration-s"):
        arrivals_until(poisson_arrivals([(1e-9, 10.0)], random.Random(0)), duration_s=10)


def test_lognormal_lengths_keep_their_mean_and_their_limit() -> None:
    lengths = lognormal_lengths(100, sigma=0.5, count=5000, max_tokens=400, seed=1)
    assert min(lengths) >= 1 and max(lengths) <= 400
    assert np.mean(lengths) == pytest.approx(100, rel=0.05)
    assert np.std(np.log(lengths)) == pytest.approx(0.5, rel=0.1)
    assert lengths == lognormal_lengths(100, sigma=0.5, count=5000, max_tokens=400, seed=1)
