"""Errors are relative, per kind of step, and decide which model is best."""

from __future__ import annotations

import math

import numpy as np
import pytest

from echo_sgl.batch_shape import StepKind, decode_row
from echo_sgl.estimators.held_out import (
    StepError,
    choose_best,
    held_out_errors,
    split_samples,
)
from echo_sgl.estimators.samples import kinds_of
from tests.estimators.steps import NAMES, measured, random_rows, true_model, unfitted


def error(mape: float, p95: float = 0.1) -> StepError:
    return StepError(num_steps=10, mape=mape, p95=p95, bias=0.0)


def test_errors_are_shares_of_the_measured_time():
    model, rows = true_model("linear"), random_rows(100, seed=1, kinds=(StepKind.DECODE,))
    times_s = model.predict_rows_s(rows)
    times_s[:20] /= 1.5
    times_s[20:50] /= 0.9
    errors = held_out_errors(model, (rows, times_s))
    assert errors.keys() == {StepKind.DECODE}
    assert errors[StepKind.DECODE].num_steps == 100
    assert errors[StepKind.DECODE].mape == pytest.approx(0.2 * 0.5 + 0.3 * 0.1)
    assert errors[StepKind.DECODE].p95 == pytest.approx(0.5)
    assert errors[StepKind.DECODE].bias == pytest.approx(0.2 * 0.5 - 0.3 * 0.1)


def test_errors_of_one_kind_do_not_touch_another():
    model, rows = true_model("bros"), random_rows(90, seed=2)
    times_s = model.predict_rows_s(rows)
    times_s[kinds_of(rows)[StepKind.PREFILL]] *= 2
    errors = held_out_errors(model, (rows, times_s))
    assert errors[StepKind.PREFILL].bias == pytest.approx(-0.5)
    assert errors[StepKind.DECODE].mape == pytest.approx(0.0, abs=1e-12)


def test_a_measurement_that_cannot_be_is_refused():
    rows = random_rows(9, seed=3)
    with pytest.raises(ValueError, match="times_s is nan in sample 0"):
        held_out_errors(true_model("bros"), (rows, np.full(9, math.nan)))


def test_the_best_model_counts_every_kind_of_step_the_same():
    decode_only = {StepKind.PREFILL: error(0.3), StepKind.DECODE: error(0.01)}
    balanced = {StepKind.PREFILL: error(0.1), StepKind.DECODE: error(0.1)}
    assert choose_best({"a": decode_only, "b": balanced}) == "b"


def test_equal_models_are_told_apart_by_their_worst_steps_and_then_by_name():
    same, steadier = {StepKind.DECODE: error(0.1, 0.3)}, {StepKind.DECODE: error(0.1, 0.2)}
    assert choose_best({"a": same, "b": steadier}) == "b"
    assert choose_best({"b": same, "a": same}) == "a"


def test_models_judged_by_different_steps_are_not_compared():
    with pytest.raises(ValueError, match="same kinds of steps"):
        choose_best({"a": {StepKind.DECODE: error(0.1)}, "b": {StepKind.PREFILL: error(0.1)}})
    with pytest.raises(ValueError, match="errors of no model"):
        choose_best({})


@pytest.mark.parametrize("name", NAMES)
def test_the_family_that_made_the_times_wins(name):
    truth, rows = true_model(name), random_rows(900, seed=4)
    samples = rows, measured(truth, rows, noise=0.02, seed=5)
    fitted, unseen = split_samples(samples, held_out_share=0.3, seed=6)
    errors = {one: held_out_errors(unfitted(one).fit(*fitted), unseen) for one in NAMES}
    assert choose_best(errors) == name


def test_a_split_loses_nothing_and_takes_the_same_share_of_every_kind():
    rows = np.concatenate(
        [random_rows(90, seed=7), random_rows(30, seed=8, kinds=(StepKind.DECODE,))]
    )
    fitted, unseen = split_samples((rows, np.arange(1.0, 121.0)), held_out_share=0.2, seed=9)
    assert sorted([*fitted[1], *unseen[1]]) == list(range(1, 121))
    shares = {kind: mask.sum() for kind, mask in kinds_of(unseen[0]).items()}
    assert shares == {StepKind.PREFILL: 6, StepKind.DECODE: 12, StepKind.MIXED: 6}


def test_decodes_of_one_batch_are_judged_by_or_fitted_as_a_whole():
    batches = [
        [decode_row([50 + step] * size) for step in range(length)]
        for size, length in ((3, 20), (5, 4), (2, 9), (7, 30), (3, 11), (6, 5), (4, 8), (1, 16))
    ] * 3
    rows = np.array([row for batch in batches for row in batch], dtype=np.float64)
    number_of = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    fitted, unseen = split_samples((rows, number_of + 1.0), held_out_share=0.25, seed=11)
    assert not set(fitted[1]) & set(unseen[1])
    assert len(fitted[1]) + len(unseen[1]) == len(rows)
    assert 0.15 < len(unseen[1]) / len(rows) < 0.35


def test_where_all_are_of_few_batches_single_steps_are_chosen():
    rows = np.array([decode_row([50 + step] * 3) for step in range(100)], dtype=np.float64)
    fitted, unseen = split_samples((rows, np.ones(100)), held_out_share=0.25, seed=12)
    assert len(unseen[1]) == 25 and len(fitted[1]) == 75


def test_a_split_is_the_same_for_the_same_seed():
    samples = random_rows(90, seed=10), np.arange(1.0, 91.0)
    one, other, third = (split_samples(samples, held_out_share=0.5, seed=s) for s in (1, 1, 2))
    assert one[1][1].tolist() == other[1][1].tolist() != third[1][1].tolist()
