"""Live steps keep a model true: in bounded memory, and whatever a few of them say."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from echo_sgl.batch_shape import BatchRow, FloatArray, StepKind
from echo_sgl.estimators.held_out import held_out_errors
from echo_sgl.estimators.refit import RefitBuffer, clip_outliers, refitted
from echo_sgl.estimators.samples import kinds_of
from tests.estimators.steps import (
    NAMES,
    measured,
    random_rows,
    shape_of,
    true_model,
    unfitted,
)

every_model = pytest.mark.parametrize("name", NAMES)


def buffer_of(rows: FloatArray, times_s: FloatArray, capacity: int = 2000) -> RefitBuffer:
    buffer = RefitBuffer(capacity_per_kind=capacity, rng=random.Random(0))
    for row, time_s in zip(rows.astype(int).tolist(), times_s, strict=True):
        buffer.add(BatchRow(*row), float(time_s))
    return buffer


def worst_mape(model, truth, seed: int) -> float:
    rows = random_rows(300, seed=seed)
    errors = held_out_errors(model, (rows, truth.predict_rows_s(rows)))
    return max(one.mape for one in errors.values())


def slower(name: str, factor: float):
    truth = true_model(name)
    scaled = {
        key: value if key == "mixing" else factor * value
        for key, value in truth.coefficients_.items()
    }
    return true_model(name).with_coefficients(scaled)


@every_model
def test_a_refit_follows_a_machine_that_became_slower(name):
    truth, rows = slower(name, 1.7), random_rows(900, seed=1)
    buffer = buffer_of(rows, measured(truth, rows, noise=0.03, seed=2))
    assert worst_mape(refitted(true_model(name), buffer), truth, seed=3) < 0.02


@every_model
def test_a_refit_is_safe_from_outliers(name):
    truth, rows = true_model(name), random_rows(900, seed=4)
    times_s = measured(truth, rows, noise=0.02, seed=5)
    chosen = np.random.default_rng(6).permutation(900)[:30]
    times_s[chosen[:15]] *= 50
    times_s[chosen[15:]] /= 50
    assert worst_mape(true_model(name).fit(rows, times_s), truth, seed=7) > 0.2
    assert worst_mape(refitted(truth, buffer_of(rows, times_s)), truth, seed=7) < 0.02


@every_model
@pytest.mark.parametrize("factor", [0.1, 0.001, 1000.0])
def test_a_first_fit_is_safe_from_outliers(name, factor):
    truth, rows = true_model(name), random_rows(300, seed=20)
    times_s = measured(truth, rows, noise=0.02, seed=21)
    times_s[np.random.default_rng(22).permutation(300)[:6]] *= factor
    assert worst_mape(refitted(unfitted(name), buffer_of(rows, times_s)), truth, seed=7) < 0.03


def test_what_few_steps_say_is_learned_where_most_are_alike():
    truth, alike = true_model("linear"), random_rows(1, seed=23, kinds=(StepKind.PREFILL,))
    rows = np.concatenate([random_rows(300, seed=24), np.repeat(alike, 700, axis=0)])
    wrong = true_model("linear").with_coefficients(
        {**truth.coefficients_, "prefill_token_square": 0.0}
    )
    buffer = buffer_of(rows, measured(truth, rows, noise=0.001, seed=25))
    assert worst_mape(wrong, truth, seed=7) > 0.05
    assert worst_mape(refitted(wrong, buffer), truth, seed=7) < 0.03


@every_model
def test_a_refit_leaves_the_old_model_as_it_was(name):
    old, rows = true_model(name), random_rows(300, seed=8)
    before = old.predict_rows_s(rows).tolist()
    refitted(old, buffer_of(rows, 2 * old.predict_rows_s(rows)))
    assert old.predict_rows_s(rows).tolist() == before


def test_a_refit_from_one_kind_of_steps_is_refused_by_column():
    rows = random_rows(300, seed=9, kinds=(StepKind.DECODE,))
    with pytest.raises(ValueError, match="prefill_tokens is above 0 in 0"):
        refitted(true_model("linear"), buffer_of(rows, np.ones(300)))


def test_an_empty_buffer_is_refused_by_column():
    with pytest.raises(ValueError, match="prefill_tokens is above 0 in 0"):
        refitted(true_model("linear"), RefitBuffer(rng=random.Random(0)))


def test_a_buffer_keeps_every_kind_up_to_its_capacity():
    rows = np.concatenate(
        [random_rows(90, seed=10), random_rows(5000, seed=11, kinds=(StepKind.DECODE,))]
    )
    buffer = buffer_of(rows, np.ones(len(rows)), capacity=200)
    kept = {kind: int(mask.sum()) for kind, mask in kinds_of(buffer.samples()[0]).items()}
    assert kept == {StepKind.PREFILL: 30, StepKind.DECODE: 200, StepKind.MIXED: 30}
    assert len(buffer) == 260


def test_memory_is_bounded():
    rows = random_rows(600, seed=12)
    buffer = buffer_of(rows, np.ones(600), capacity=50)
    before = len(pickle.dumps(buffer))
    for _ in range(10):
        for row in rows.astype(int).tolist():
            buffer.add(BatchRow(*row), 0.5)
    assert len(pickle.dumps(buffer)) < 1.1 * before


def test_recent_steps_push_out_old_ones_without_all_going_at_once():
    buffer = RefitBuffer(capacity_per_kind=500, rng=random.Random(1))
    shape = shape_of([(0, 10)])
    for number in range(4000):
        buffer.add(shape, float(number))
    ages = 4000 - buffer.samples()[1]
    # By half in 0.7 * 500 steps; a plain window would hold none above 500.
    assert np.median(ages) == pytest.approx(350, rel=0.25)
    assert ages.max() > 1000


def test_the_same_steps_and_seed_give_the_same_samples():
    rows = random_rows(600, seed=13)
    one, other = (buffer_of(rows, np.arange(1.0, 601.0), capacity=50) for _ in range(2))
    assert one.samples()[1].tolist() == other.samples()[1].tolist()


def test_clipping_moves_only_what_lies_far_from_the_usual():
    model, rows = true_model("linear"), random_rows(300, seed=14)
    usual_s = measured(model, rows, noise=0.02, seed=15)
    times_s = usual_s.copy()
    times_s[[3, 4]] *= [100, 0.01]
    clipped_s = clip_outliers(model, rows, times_s)
    untouched = np.delete(np.arange(300), [3, 4])
    assert clipped_s[untouched] == pytest.approx(usual_s[untouched], rel=0.02)
    assert clipped_s[[3, 4]] == pytest.approx(usual_s[[3, 4]], rel=0.35)


def test_a_model_off_by_a_factor_clips_nothing():
    model, rows = true_model("linear"), random_rows(300, seed=16)
    times_s = 5 * measured(model, rows, noise=0.001, seed=17)
    assert clip_outliers(model, rows, times_s) == pytest.approx(times_s, rel=0.01)


def test_where_the_model_says_zero_nothing_is_clipped():
    zero = true_model("bros").with_coefficients(dict.fromkeys(true_model("bros").COEFFICIENTS, 0.0))
    rows, times_s = random_rows(30, seed=18), np.arange(1.0, 31.0)
    assert clip_outliers(zero, rows, times_s).tolist() == times_s.tolist()
