"""What the scheduler asks: ready after the first steps, true while the server changes."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchRow, BatchShape, StepKind
from echo_sgl.estimators import samples
from echo_sgl.estimators.batch_time import longest_prefill
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.conformal import Evidence
from echo_sgl.estimators.live import LiveBatchTime
from tests.estimators.steps import (
    NAMES,
    batches,
    random_rows,
    shape_of,
    true_model,
    unfitted,
)

every_model = pytest.mark.parametrize("name", NAMES)


def play(
    live: LiveBatchTime,
    truth: BatchTimeModel,
    num_steps: int,
    *,
    factor: float = 1.0,
    noise: float = 0.03,
    seed: int = 0,
    kinds: Sequence[StepKind] = (),
    start_s: float = 0.0,
) -> float:
    """Steps of a server that takes `factor` times what `truth` says; returns when it ends."""
    rng, now_s = random.Random(seed), start_s
    for values in random_rows(num_steps, seed=seed, kinds=kinds).astype(int).tolist():
        row = BatchRow(*values)
        time_s = truth.predict_s(row) * factor * math.exp(rng.gauss(0.0, noise))
        now_s += time_s
        live.observe(row, time_s, now_s)
    return now_s


def mape(live: LiveBatchTime, truth: BatchTimeModel, factor: float = 1.0) -> float:
    rows = [BatchRow(*values) for values in random_rows(300, seed=99).astype(int).tolist()]
    ratios = [live.predict_s(row) / (factor * truth.predict_s(row)) for row in rows]
    return float(np.mean(np.abs(np.array(ratios) - 1.0)))


@every_model
def test_without_a_profile_nothing_fits_any_limit_until_the_first_steps_were_seen(name):
    live, shape = LiveBatchTime(unfitted(name)), shape_of([(0, 100)])
    assert not live.is_ready
    assert live.predict_s(shape) == live.upper_s(shape) == math.inf
    assert longest_prefill(live.upper, shape, 3600.0, max_tokens=100) == 0
    play(live, true_model(name), 100)
    assert live.is_ready
    assert mape(live, true_model(name)) < 0.1


@every_model
def test_a_profile_is_used_at_once(name):
    live = LiveBatchTime(true_model(name))
    assert live.is_ready
    assert mape(live, true_model(name)) == 0.0
    assert live.evidence(StepKind.DECODE, 0.0) is Evidence.MISSING


def test_a_step_without_requests_takes_no_time():
    live = LiveBatchTime(true_model("pooled"))
    assert live.predict_s(BatchShape()) == live.upper_s(BatchShape()) == 0.0
    assert live.predict_both_s(BatchShape()) == (0.0, 0.0)


@every_model
def test_a_server_that_became_slower_is_followed_before_the_next_refit(name):
    live, truth = LiveBatchTime(true_model(name), refit_steps=0), true_model(name)
    play(live, truth, 700, factor=1.4)
    assert live.num_refits == 0
    assert mape(live, truth, 1.4) < 0.03


@every_model
def test_refits_follow_a_server_whose_costs_changed(name):
    truth = true_model(name)
    first = truth.COEFFICIENTS[0]
    other = true_model(name).with_coefficients(
        {**truth.coefficients_, first: 4 * truth.coefficients_[first]}
    )
    live = LiveBatchTime(truth, refit_steps=300)
    play(live, other, 1000)
    assert live.num_refits == 3
    assert mape(live, other) < 0.03


def test_the_spread_is_what_bounds_are_above_what_is_expected():
    live, row = (
        LiveBatchTime(true_model("pooled"), stale_s=10.0),
        BatchRow(0, 0, 0, 0, 8, 4000, 900),
    )
    assert live.spread(StepKind.DECODE) == 1.0 < live.upper_s(row) / live.predict_s(row)
    end_s = play(live, true_model("pooled"), 100, noise=0.2, kinds=(StepKind.DECODE,))
    live.advance(end_s)
    fresh = live.spread(StepKind.DECODE)
    assert 1.1 < fresh == pytest.approx(live.upper_s(row) / live.predict_s(row))
    assert live.spread(StepKind.PREFILL) == 1.0, "nothing is known of these"
    live.advance(end_s + 60.0)
    assert live.spread(StepKind.DECODE) == pytest.approx(live.STALE_FACTOR * fresh)


def test_a_step_that_was_asked_about_is_asked_anew_after_a_refit():
    live = LiveBatchTime(true_model("pooled"), refit_steps=50)
    row = BatchRow(0, 0, 0, 0, 8, 4000, 900)
    before_s = live.predict_s(row)
    assert live.predict_s(row) == before_s == true_model("pooled").predict_s(row)
    play(live, true_model("pooled"), 49, factor=3.0)
    live.predict_s(row)
    play(live, true_model("pooled"), 1, factor=3.0, seed=1)
    assert live.num_refits == 1
    after_s = live.predict_s(row)
    live.predict_s(BatchRow(0, 0, 0, 0, 1, 9, 9))  # whatever was remembered is not any more
    assert live.predict_s(row) == after_s


def test_a_fit_that_does_not_converge_keeps_the_model_and_says_why(monkeypatch):
    def give_up(*given, **bounds):
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(samples, "nnls", give_up)
    live = LiveBatchTime(true_model("pooled"), refit_steps=50)
    play(live, true_model("pooled"), 60)
    assert (live.num_refusals, live.num_refits) == (1, 0)
    assert live.last_refusal is not None and "Maximum number" in live.last_refusal
    assert live.model.coefficients_ == true_model("pooled").coefficients_


def test_a_fit_that_is_refused_keeps_the_model_and_says_why():
    live = LiveBatchTime(unfitted("pooled"))
    play(live, true_model("pooled"), 60, kinds=(StepKind.DECODE,))
    assert not live.is_ready
    assert live.num_refusals == 2
    assert live.last_refusal is not None and "prefill_tokens" in live.last_refusal
    profiled = LiveBatchTime(true_model("pooled"), refit_steps=50)
    play(profiled, true_model("pooled"), 60, kinds=(StepKind.DECODE,))
    assert profiled.num_refusals == 1 and profiled.num_refits == 0
    assert profiled.model.coefficients_ == true_model("pooled").coefficients_


def test_a_first_fit_to_few_steps_is_soon_followed_by_others():
    live, refits = LiveBatchTime(unfitted("linear"), refit_steps=200), []
    now_s = 0.0
    for number in range(32):
        now_s = play(live, true_model("linear"), 25, seed=number, start_s=now_s)
        refits.append(live.num_refits)
    numbers = [25 * (1 + refits.index(count)) for count in sorted({*refits})]
    assert numbers == [25, 50, 100, 200, 400, 600, 800]


CALIBRATED = {
    "num_prefills": 8,
    "prefill_tokens": 2048,
    "cached_tokens": 4000,
    "prefill_area": 9_000_000,
    "num_decodes": 64,
    "decode_tokens": 64_000,
    "max_decode_tokens": 4000,
}


@every_model
def test_what_was_calibrated_stays_known_while_all_prompts_are_short(name):
    """Steps that are nearly the same tell no two costs apart: without it, nothing is fitted."""
    truth, rng = true_model(name), random.Random(1)
    known = LiveBatchTime(true_model(name), refit_steps=200, calibrated=CALIBRATED)
    partly = {"num_prefills": 8}  # as a profile of another version
    others = [
        LiveBatchTime(true_model(name), refit_steps=200, calibrated=one) for one in (None, partly)
    ]
    for number in range(600):
        prompt, context = rng.randint(20, 60), rng.randint(50, 90)
        row = shape_of([(prompt, 0)] if number % 2 else [(0, context)] * 4).row()
        time_s = truth.predict_s(row) * math.exp(rng.gauss(0.0, 0.1))
        for live in (known, *others):
            live.observe(row, time_s, 0.01 * number)
    assert (known.num_refits, [live.num_refits for live in others]) == (3, [0, 0])
    for batch in ([(2000, 0)], [(1000, 2000)], [(0, 3000)] * 8, [(0, 1000)] * 60):
        shape = shape_of(batch)
        assert known.predict_s(shape) == pytest.approx(truth.predict_s(shape), rel=0.15)


def test_that_contexts_are_attended_at_once_stays_known_while_all_are_short():
    costs = {"prefill_max_token": 2e-5, "prefill_cached": 4e-6, "prefill_overlap": 1.0}
    costs |= {"decode_max_token": 2e-5, "decode_token": 2e-6, "decode_overlap": 1.0}
    known = true_model("pooled").coefficients_ | costs
    truth = unfitted("pooled").with_coefficients(known)
    calibrated = CALIBRATED | {"max_prefill_tokens": 4000}
    live, rng = LiveBatchTime(truth, refit_steps=200, calibrated=calibrated), random.Random(1)
    for number in range(600):
        prompt, context = rng.randint(20, 60), rng.randint(50, 90)
        row = shape_of([(prompt, 0)] if number % 2 else [(0, context)] * rng.randint(1, 4)).row()
        live.observe(row, truth.predict_s(row) * math.exp(rng.gauss(0.0, 0.1)), 0.01 * number)
    assert live.num_refits == 3
    for batch in ([(2, 900)] * 4, [(1, 3000)], [(0, 3000)] * 6, [(0, 3000)], [(0, 1000)] * 60):
        shape = shape_of(batch)
        assert live.predict_s(shape) == pytest.approx(truth.predict_s(shape), rel=0.2)


def test_refits_that_are_switched_off_leave_the_first_fit():
    live = LiveBatchTime(unfitted("linear"), refit_steps=0)
    play(live, true_model("linear"), 2000)
    assert live.num_refits == 1


@pytest.mark.parametrize("quantile", [0.9, 0.95])
def test_the_bound_covers_its_share_of_live_steps(quantile):
    truth = true_model("pooled")
    live = LiveBatchTime(truth, quantile=quantile)
    now_s = play(live, truth, 1500, noise=0.1)
    play(live, truth, 1500, noise=0.1, factor=1.3, seed=1, start_s=now_s)
    for kind in StepKind:
        assert live.coverage(kind) == pytest.approx(quantile, abs=0.02)


def test_a_lasting_change_counts_as_drift_of_its_kind():
    truth = true_model("pooled")
    live = LiveBatchTime(truth, refit_steps=0)
    now_s = play(live, truth, 400, kinds=(StepKind.DECODE,))
    assert live.num_drifts == 0
    play(live, truth, 400, factor=1.5, kinds=(StepKind.DECODE,), start_s=now_s)
    assert live.num_drifts == live.num_drifts_of(StepKind.DECODE) > 0
    assert live.num_drifts_of(StepKind.MIXED) == 0


def test_kinds_of_steps_that_were_not_seen_lately_get_a_margin():
    truth, decode, prefill = true_model("pooled"), shape_of([(0, 100)]), shape_of([(50, 0)])
    live = LiveBatchTime(truth, stale_s=60.0, refit_steps=0)
    now_s = play(live, truth, 200, kinds=(StepKind.DECODE, StepKind.PREFILL))
    fresh_s = live.upper_s(decode), live.upper_s(prefill)
    live.advance(now_s + 61.0)
    assert live.evidence(StepKind.DECODE, now_s + 61.0) is Evidence.STALE
    factor = LiveBatchTime.STALE_FACTOR
    assert (live.upper_s(decode), live.upper_s(prefill)) == tuple(factor * one for one in fresh_s)
    live.observe(decode, truth.predict_s(decode), now_s + 61.0)
    assert live.upper_s(decode) < factor * fresh_s[0]
    assert live.upper_s(prefill) == factor * fresh_s[1]


@pytest.mark.parametrize("is_seen", [False, True])
def test_what_slowed_other_kinds_down_slows_one_that_was_not_seen_lately(is_seen):
    truth, prefill = true_model("pooled"), shape_of([(50, 0)])
    live, now_s = LiveBatchTime(truth, stale_s=60.0, refit_steps=0), 0.0
    if is_seen:
        now_s = 100.0 + play(live, truth, 200, kinds=(StepKind.PREFILL,))
    now_s = play(live, truth, 200, factor=3.0, kinds=(StepKind.DECODE,), start_s=now_s)
    live.advance(now_s)
    evidence = Evidence.STALE if is_seen else Evidence.MISSING
    assert live.evidence(StepKind.PREFILL, now_s) is evidence
    assert 3.0 < live.upper_s(prefill) / truth.predict_s(prefill) < 6.0
    for _ in range(10):  # what its own steps say counts once, not twice
        live.observe(prefill, 3.0 * truth.predict_s(prefill), now_s)
    assert 3.0 < live.upper_s(prefill) / truth.predict_s(prefill) < 6.0


def test_a_kind_never_seen_gets_the_cold_ratio():
    truth, mixed = true_model("pooled"), shape_of([(50, 0), (0, 100)])
    live = LiveBatchTime(truth, refit_steps=0)
    now_s = play(live, truth, 200, kinds=(StepKind.DECODE,))
    live.advance(now_s)
    assert live.evidence(StepKind.MIXED, now_s) is Evidence.MISSING
    assert live.coverage(StepKind.MIXED) is None
    assert live.upper_s(mixed) == 1.5 * truth.predict_s(mixed)


@pytest.mark.parametrize("error", [-0.5, 0.1])
def test_an_error_on_purpose_makes_every_answer_wrong_by_it(error):
    right, wrong = (LiveBatchTime(true_model("bros"), error=one) for one in (0.0, error))
    for live in (right, wrong):
        play(live, true_model("bros"), 700)
    for batch in ([(0, 100)], [(300, 0)], [(5, 500), (0, 20)]):
        shape = shape_of(batch)
        assert wrong.predict_s(shape) == pytest.approx((1 + error) * right.predict_s(shape))
        assert wrong.upper_s(shape) == pytest.approx((1 + error) * right.upper_s(shape))
    assert wrong.coverage(StepKind.DECODE) == right.coverage(StepKind.DECODE)


@pytest.mark.parametrize("error", [-1.0, math.nan, math.inf])
def test_an_error_that_leaves_no_time_is_refused(error):
    with pytest.raises(ValueError, match=f"error is {error}"):
        LiveBatchTime(true_model("bros"), error=error)


@pytest.mark.parametrize("time_s", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_no_step_takes_is_refused_and_nothing_learned(time_s):
    live, untouched = (LiveBatchTime(true_model("bros")) for _ in range(2))
    with pytest.raises(ValueError, match="time_s is"):
        live.observe(shape_of([(0, 10)]), time_s, 1.0)
    assert pickle.dumps(live) == pickle.dumps(untouched)


@every_model
def test_the_same_observations_give_the_same_bits(name):
    first, second = (LiveBatchTime(unfitted(name), refit_steps=200) for _ in range(2))
    for live in (first, second):
        play(live, true_model(name), 6000 if name == "linear" else 700)
    shapes = [shape_of(batch) for batch in ([(0, 7)], [(90, 3)], [(4, 4), (0, 5)])]
    assert [first.upper_s(one) for one in shapes] == [second.upper_s(one) for one in shapes]
    assert [first.predict_s(one) for one in shapes] == [second.predict_s(one) for one in shapes]


def test_memory_is_bounded():
    live, truth = LiveBatchTime(true_model("linear"), refit_steps=5000), true_model("linear")
    now_s = play(live, truth, 6000)
    before = len(pickle.dumps(live))
    play(live, truth, 6000, seed=1, start_s=now_s)
    assert len(pickle.dumps(live)) < 1.05 * before


@given(batches, st.sampled_from(NAMES), st.integers(0, 200))
@settings(max_examples=50)
def test_answers_are_finite_and_never_negative_once_there_is_a_model(batch, name, num_steps):
    live = LiveBatchTime(true_model(name))
    play(live, true_model(name), num_steps, noise=0.5)
    shape = shape_of(batch)
    for answer_s in (live.predict_s(shape), live.upper_s(shape), live.upper.predict_s(shape)):
        assert math.isfinite(answer_s) and answer_s >= 0
    assert live.predict_both_s(shape) == (live.predict_s(shape), live.upper_s(shape))
