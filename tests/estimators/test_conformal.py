"""The band covers what it promises while steps drift, and says what it rests on."""

from __future__ import annotations

import math
import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape, StepKind
from echo_sgl.estimators.batch_time import longest_prefill
from echo_sgl.estimators.conformal import ConformalBand, Evidence
from tests.estimators.bands import (
    DECODE,
    NOISE,
    NUM_STEPS,
    PREFILL,
    QUANTILES,
    Constant,
    band,
    play,
    still,
    streams,
)
from tests.estimators.steps import random_rows, shape_of, true_model

# Coverage


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", streams(0))
def test_coverage_of_the_last_thousand_steps_is_within_two_points_at_all_times(name, seed):
    one, log_ratios = band(quantiles=QUANTILES), streams(seed)[name]
    play(one, log_ratios[:1050])
    for start in range(1050, NUM_STEPS, 50):
        play(one, log_ratios[start : start + 50])
        for quantile in QUANTILES:
            assert one.coverage(StepKind.DECODE, quantile) == pytest.approx(quantile, abs=0.02)


def test_coverage_counts_the_bounds_that_the_caller_was_given():
    one, hits = band(coverage_window=400), []
    for log_ratio in streams(3)["two regimes in turn"][:800]:
        bound_s, time_s = one.predict_upper(DECODE, 0.95), 0.01 * math.exp(log_ratio)
        hits.append(time_s <= bound_s)
        one.observe(DECODE, time_s, 0.0)
    assert one.coverage(StepKind.DECODE, 0.95) == pytest.approx(np.mean(hits[-400:]), abs=0.003)


def chains(seed: int) -> np.ndarray:
    """Steps whose neighbours are alike: what the last one took beyond the usual says much."""
    noise, chained = np.random.default_rng(seed).normal(0.0, NOISE, NUM_STEPS), np.zeros(NUM_STEPS)
    for number in range(1, NUM_STEPS):
        chained[number] = 0.95 * chained[number - 1] + 0.3 * noise[number]
    return chained


@pytest.mark.parametrize("at_once", [1, 3, 12])
@pytest.mark.parametrize("quantile", [0.85, 0.95])
def test_bounds_cover_what_they_say_however_many_steps_are_learned_from_at_once(at_once, quantile):
    one, hits = band(quantiles=(quantile,)), []
    times_s = 0.01 * np.exp(chains(6))
    for start in range(0, NUM_STEPS, at_once):
        lot = [(DECODE, float(time_s)) for time_s in times_s[start : start + at_once]]
        hits += [time_s <= one.predict_upper(DECODE, quantile) for _, time_s in lot]
        one.learn(lot, 0.01 * start)
    assert np.mean(hits[300:]) == pytest.approx(quantile, abs=0.015)
    assert one.coverage(StepKind.DECODE, quantile) == pytest.approx(np.mean(hits[-1000:]), abs=1e-3)


def test_steps_that_are_slow_together_do_not_widen_the_bound_beyond_what_they_took():
    one = band(quantiles=(0.95,))
    for start in range(0, 400, 20):
        times_s = 0.01 * np.exp(still(20, seed=start))
        one.learn([(DECODE, float(time_s)) for time_s in times_s], float(start))
    one.learn([(DECODE, 0.013)] * 20, 500.0)
    one.learn([(DECODE, 0.01)] * 20, 501.0)
    assert one.predict_upper(DECODE, 0.95) < 0.015


def test_kinds_learned_from_at_once_are_told_apart():
    together, apart = band(), band()
    for number, log_ratio in enumerate(still(200, seed=13)):
        times_s = 0.01 * math.exp(log_ratio), 0.02 * math.exp(-log_ratio)
        together.learn([(DECODE, times_s[0]), (PREFILL, times_s[1])], float(number))
        apart.observe(DECODE, times_s[0], float(number))
        apart.observe(PREFILL, times_s[1], float(number))
    assert pickle.dumps(together) == pickle.dumps(apart)


def test_with_another_model_bounds_know_what_was_learned_from_at_once():
    """Late lessons make bounds wider; a model that says twice as much changes nothing of that."""
    one, times_s = band(quantiles=(0.95,)), 0.01 * np.exp(chains(7))
    for start in range(0, 2000, 12):
        lot = [(DECODE, float(time_s)) for time_s in times_s[start : start + 12]]
        one.learn(lot, float(start))
    before_s = one.predict_upper(DECODE, 0.95)
    one.replace_model(Constant(0.02))
    assert one.predict_upper(DECODE, 0.95) == pytest.approx(before_s, rel=0.01)


@pytest.mark.parametrize(("quantile", "deviations"), [(0.5, 0.0), (0.9, 1.28), (0.95, 1.64)])
def test_the_bound_is_no_wider_than_it_must_be(quantile, deviations):
    one, bounds = band(), []
    for log_ratio in still(3000, seed=4):
        one.observe(DECODE, 0.01 * math.exp(log_ratio), 0.0)
        bounds.append(math.log(one.predict_upper(DECODE, quantile) / 0.01))
    assert np.mean(bounds[500:]) == pytest.approx(deviations * NOISE, abs=0.2 * NOISE)
    assert np.std(bounds[500:]) < 0.5 * NOISE


def test_a_streak_of_slow_steps_is_followed_within_a_few_of_them():
    one = band()
    play(one, still(500, seed=5))
    misses = 0
    for _ in range(100):
        misses += one.predict_upper(DECODE, 0.95) < 0.02
        one.observe(DECODE, 0.02, 0.0)
    assert misses <= 5


def test_a_bound_scales_with_the_prediction():
    model = Constant()
    one = ConformalBand(model)
    play(one, still(300, seed=6))
    narrow = one.predict_upper(DECODE, 0.95)
    model.time_s *= 3
    assert one.predict_upper(DECODE, 0.95) == pytest.approx(3 * narrow)


def test_a_step_without_requests_takes_no_time():
    assert band().predict_upper(BatchShape(), 0.95) == 0.0


def test_the_longest_prefill_can_be_asked_of_the_bound():
    model = true_model("pooled")
    one, shape = ConformalBand(model), BatchShape()
    for log_ratio in math.log(1.5) + still(300, seed=30):
        one.observe(PREFILL, model.predict_s(PREFILL) * math.exp(log_ratio), 0.0)
    found = longest_prefill(one.at(0.9), shape, 0.05, max_tokens=4000)
    shape.add_prefill(found)
    assert one.predict_upper(shape, 0.9) <= 0.05
    shape.undo()
    shape.add_prefill(found + 1)
    assert one.predict_upper(shape, 0.9) > 0.05
    assert 0 < found < longest_prefill(model, BatchShape(), 0.05, max_tokens=4000)


def test_kinds_of_steps_have_bands_of_their_own():
    one = band()
    play(one, still(300, seed=7))
    play(one, math.log(4) + still(300, seed=8), row=PREFILL)
    assert one.predict_upper(DECODE, 0.95) < 0.013
    assert one.predict_upper(PREFILL, 0.95) > 0.039
    assert one.coverage(StepKind.MIXED, 0.95) is None


def test_looking_changes_nothing():
    looked, other = band(), band()
    for log_ratio in still(200, seed=9):
        for one in (looked, other):
            one.observe(DECODE, 0.01 * math.exp(log_ratio), 0.0)
        looked.predict_upper(DECODE, 0.9)
        looked.evidence(StepKind.DECODE, 1e9)
    untouched = pickle.loads(pickle.dumps(other))
    looked.predict_upper(DECODE, 0.9), other.predict_upper(DECODE, 0.9)
    assert pickle.dumps(looked) == pickle.dumps(other)
    assert looked.predict_upper(DECODE, 0.9) == untouched.predict_upper(DECODE, 0.9)


def test_a_bound_that_was_asked_for_follows_the_next_step():
    asked, other = band(), band()
    for log_ratio in still(300, seed=12):
        for one in (asked, other):
            one.observe(DECODE, 0.01 * math.exp(log_ratio), 0.0)
        bound_s = asked.predict_upper(DECODE, 0.9)
    assert bound_s == other.predict_upper(DECODE, 0.9)
    for one in (asked, other):
        one.replace_model(Constant(0.02))
    assert asked.predict_upper(DECODE, 0.9) == other.predict_upper(DECODE, 0.9)


def test_a_shape_may_go_on_changing_after_it_was_learned_from():
    one, shape = band(), BatchShape()
    shape.add_decode(100)
    play(one, still(100, seed=10), row=shape)
    before_s = one.predict_upper(DECODE, 0.95)
    shape.add_prefill(50)
    one.replace_model(Constant())
    assert one.predict_upper(DECODE, 0.95) == before_s


def test_memory_is_bounded():
    one = band()
    play(one, still(2000, seed=11))
    before = len(pickle.dumps(one))
    play(one, still(6000, seed=12))
    assert len(pickle.dumps(one)) < 1.1 * before


@given(st.lists(st.floats(-200, 200), min_size=1, max_size=150), st.sampled_from(QUANTILES))
def test_any_stream_gives_finite_bounds_above_nothing(log_ratios, quantile):
    one = band()
    for log_ratio in log_ratios:
        one.observe(DECODE, 0.01 * math.exp(log_ratio), 0.0)
        bound_s = one.predict_upper(DECODE, quantile)
        assert math.isfinite(bound_s) and bound_s > 0


@pytest.mark.parametrize("time_s", [1e150, 1e-300, 1.7e308])
def test_a_time_beyond_all_others_leaves_finite_bounds(time_s):
    one = band()
    for _ in range(40):
        one.observe(DECODE, 0.01, 0.0)
    for _ in range(3):
        one.observe(DECODE, time_s, 0.0)
        for quantile in QUANTILES:
            bound_s = one.predict_upper(DECODE, quantile)
            assert math.isfinite(bound_s) and bound_s > 0


def test_a_model_that_says_zero_is_corrected_by_what_was_measured():
    one = ConformalBand(Constant(0.0))
    play(one, still(200, seed=13))
    assert one.predict_upper(DECODE, 0.95) == pytest.approx(0.011, rel=0.1)


@pytest.mark.parametrize("time_s", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_is_refused_and_not_learned(time_s):
    one = band()
    play(one, still(100, seed=14))
    before = pickle.dumps(one)
    with pytest.raises(ValueError, match=f"time_s is {time_s}; a step takes"):
        one.observe(DECODE, time_s, 5.0)
    assert pickle.dumps(one) == before


def test_a_quantile_that_nobody_asked_for_at_the_start_is_refused():
    with pytest.raises(ValueError, match=r"quantile is 0\.8; this band was built for 0\.5, 0\.9"):
        band().predict_upper(DECODE, 0.8)
    for wrong in (0.0, 1.0, 95.0, math.nan):
        with pytest.raises(ValueError, match="quantiles holds"):
            band(quantiles=(wrong,))


# Evidence


def test_steps_of_long_ago_are_stale_until_a_new_one_comes():
    one = band(stale_s=10.0)
    play(one, still(100, seed=16))
    assert one.evidence(StepKind.DECODE, 10.9) is Evidence.FRESH
    assert one.evidence(StepKind.DECODE, 11.1) is Evidence.STALE
    one.observe(DECODE, 0.01, 11.1)
    assert one.evidence(StepKind.DECODE, 11.1) is Evidence.FRESH


def test_the_slowest_kind_is_the_one_that_takes_the_most_beside_its_predictions_of_late():
    one = band(stale_s=60.0)
    assert one.slowest_ratio(0.0) == 0.0
    play(one, math.log(2) + 0.01 * still(100, seed=14), PREFILL)
    play(one, 0.01 * still(100, seed=14))
    assert one.slowest_ratio(1.0) == pytest.approx(2.0, rel=0.01)
    play(one, 0.01 * still(100, seed=14), start_s=100.0)
    assert one.slowest_ratio(101.0) == pytest.approx(1.0, rel=0.01), "prefills were long ago"


def test_bounds_rest_on_the_last_steps_and_after_a_drift_on_few():
    one = band()
    play(one, still(ConformalBand.NUM_RATIOS + 100, seed=18))
    assert len(one.recent(StepKind.DECODE)) == ConformalBand.NUM_RATIOS
    while not one.num_drifts(StepKind.DECODE):
        play(one, math.log(2) + still(1, seed=19))
    assert len(one.recent(StepKind.DECODE)) == ConformalBand.NUM_AFTER_DRIFT


def test_steps_of_one_kind_are_no_evidence_for_another():
    one = band()
    play(one, still(100, seed=17))
    assert one.evidence(StepKind.PREFILL, 1.0) is Evidence.MISSING


def test_a_clock_that_goes_back_or_says_nothing_is_not_trusted_more():
    one = band(stale_s=10.0)
    play(one, still(100, seed=18), start_s=100.0)
    one.observe(DECODE, 0.01, 5.0)
    assert one.evidence(StepKind.DECODE, 105.0) is Evidence.FRESH
    assert one.evidence(StepKind.DECODE, math.nan) is Evidence.STALE


# Another model


def test_after_a_refit_the_band_compares_recent_steps_with_the_new_model():
    one = band()
    play(one, math.log(3) + still(500, seed=19))
    before_s = one.predict_upper(DECODE, 0.95)
    one.replace_model(Constant(0.03))
    # How far the last steps are followed is known only as it is now, not as it was at each.
    assert one.predict_upper(DECODE, 0.95) == pytest.approx(before_s, rel=0.01)
    assert one.evidence(StepKind.DECODE, 5.0) is Evidence.FRESH
    play(one, math.log(3) + still(500, seed=20))
    assert one.num_drifts(StepKind.DECODE) == 0


def test_every_kind_of_step_can_be_learned_from():
    one = band()
    for row in random_rows(300, seed=29):
        shape = shape_of([(int(row[1]), 0)] * bool(row[0]) + [(0, int(row[5]))] * bool(row[4]))
        one.observe(shape, 0.01, 1.0)
    assert all(one.evidence(kind, 1.0) is Evidence.FRESH for kind in StepKind)


# The centre


def test_a_bound_follows_what_lasts_and_keeps_its_coverage():
    """Tighter by far than one of the ratios alone, whose spread is that of the machine's speed."""
    one, rng = band(), random.Random(6)
    speeds = [rng.gauss(0.0, 0.3) for _ in range(100)]
    play(one, np.repeat(speeds, 40) + still(4000, seed=27))
    assert one.coverage(StepKind.DECODE, 0.95) == pytest.approx(0.95, abs=0.02)
    play(one, [-0.6] * 10)
    slow_s = Constant(0.01).predict_s(DECODE) * math.exp(0.3)
    assert one.predict_upper(DECODE, 0.95) < slow_s


def test_the_central_ratio_waits_for_five_steps_and_follows_a_change_within_three():
    one = band()
    play(one, [0.4] * 4)
    assert one.central_ratio(StepKind.DECODE) == 1.0
    play(one, [0.4])
    assert one.central_ratio(StepKind.DECODE) == pytest.approx(math.exp(0.4))
    play(one, [0.4] * 300 + [-0.2] * 3)
    assert one.central_ratio(StepKind.DECODE) == pytest.approx(math.exp(-0.2))
    assert one.central_ratio(StepKind.MIXED) == 1.0


def test_the_central_ratio_ignores_outliers():
    one = band()
    play(one, [0.1] * 20 + [5.0, 5.0])
    assert one.central_ratio(StepKind.DECODE) == pytest.approx(math.exp(0.1))


def test_what_never_lasts_is_not_followed():
    one, rng = band(), random.Random(4)
    play(one, [0.1 + rng.gauss(0.0, 0.1) for _ in range(400)] + [0.3] * 3)
    assert math.exp(0.0) < one.central_ratio(StepKind.DECODE) < math.exp(0.2)


def test_what_lasts_for_some_steps_is_followed():
    one, rng, ratios = band(), random.Random(5), []
    for _ in range(20):
        ratios += [rng.gauss(0.0, 0.2)] * 20
    play(one, [*ratios, 0.3, 0.3, 0.3])
    assert one.central_ratio(StepKind.DECODE) == pytest.approx(math.exp(0.3), rel=0.05)


def test_another_model_is_put_right_by_the_same_steps():
    one = band()
    play(one, [0.4] * 40)
    one.replace_model(Constant(0.02))
    assert one.central_ratio(StepKind.DECODE) == pytest.approx(math.exp(0.4) / 2)
