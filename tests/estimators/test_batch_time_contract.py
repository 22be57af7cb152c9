"""What every batch-time model promises, and what `longest_prefill` makes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchRow, BatchShape, StepKind, rows_of
from echo_sgl.estimators.batch_time import create_batch_time, longest_prefill
from echo_sgl.estimators.held_out import held_out_errors
from tests.estimators.steps import (
    CAPTURED,
    NAMES,
    add,
    any_models,
    batches,
    measured,
    random_rows,
    requests,
    shape_of,
    tokens,
    true_model,
    unfitted,
)

COLUMN = {name: number for number, name in enumerate(BatchRow._fields)}

every_model = pytest.mark.parametrize("name", NAMES)
with_and_without_graphs = pytest.mark.parametrize("captured", [(), CAPTURED], ids=["", "graphs"])


# Predictions


@given(any_models(), batches)
def test_a_prediction_is_finite_and_never_negative(model, batch):
    predicted_s = model.predict_s(shape_of(batch))
    assert math.isfinite(predicted_s) and predicted_s >= 0


@given(any_models(), batches, requests)
@settings(max_examples=300)
def test_one_request_more_never_takes_less_time(model, batch, request):
    shape = shape_of(batch)
    before_s = model.predict_s(shape)
    add(shape, request)
    assert model.predict_s(shape) >= before_s


@given(any_models(), batches, requests, st.data(), tokens)
@settings(max_examples=300)
def test_a_longer_request_never_takes_less_time(model, batch, request, data, more):
    is_first = data.draw(st.booleans()) if request[0] else False
    longer = (request[0] + more, request[1]) if is_first else (request[0], request[1] + more)
    at = data.draw(st.integers(0, len(batch)))
    short, long = ([*batch[:at], one, *batch[at:]] for one in (request, longer))
    assert model.predict_s(shape_of(long)) >= model.predict_s(shape_of(short))


@given(any_models())
def test_a_step_without_requests_takes_no_time(model):
    assert model.predict_s(BatchShape()) == 0.0


@given(any_models(), batches, batches)
def test_a_shape_taken_back_predicts_as_before(model, kept, taken_back):
    shape = shape_of(kept)
    before_s = model.predict_s(shape)
    for request in taken_back:
        add(shape, request)
    for _ in taken_back:
        shape.undo()
    assert model.predict_s(shape) == before_s


@given(any_models(), st.lists(batches, max_size=4))
def test_a_stored_row_predicts_as_its_shape_did(model, many):
    shapes = [shape_of(batch) for batch in many]
    predicted_s = [model.predict_s(shape) for shape in shapes]
    assert [model.predict_s(shape.row()) for shape in shapes] == predicted_s
    rows = [BatchRow(*map(float, shape.row())) for shape in shapes]
    in_floats_s = [model.predict_s(row) for row in rows]
    assert in_floats_s == pytest.approx(predicted_s, rel=1e-12)
    assert model.predict_rows_s(rows_of(shapes)).tolist() == in_floats_s


# CUDA graphs


@every_model
def test_a_decode_batch_takes_as_long_as_the_captured_size_it_is_padded_to(name):
    plain, padded = true_model(name), true_model(name, captured=(8, 16))
    row = shape_of([(0, 100)] * 5).row()
    assert padded.predict_s(row) == plain.predict_s(row._replace(num_decodes=8))
    assert padded.predict_s(row) > plain.predict_s(row)


@every_model
def test_above_the_largest_captured_size_nothing_is_padded(name):
    shape = shape_of([(0, 100)] * 17)
    assert true_model(name, captured=(8, 16)).predict_s(shape) == true_model(name).predict_s(shape)


@every_model
def test_a_prefill_alone_is_not_padded(name):
    shape = shape_of([(100, 50)])
    assert true_model(name, captured=(8, 16)).predict_s(shape) == true_model(name).predict_s(shape)


@every_model
def test_a_captured_size_below_one_is_refused(name):
    with pytest.raises(ValueError, match="captured_batch_sizes holds 0"):
        unfitted(name, captured=(4, 0))


# Fits


@every_model
@with_and_without_graphs
def test_a_fit_recovers_its_own_family_from_noisy_samples(name, captured):
    truth, rows = true_model(name, captured), random_rows(900, seed=1)
    model = unfitted(name, captured).fit(rows, measured(truth, rows, noise=0.02, seed=2))
    unseen = random_rows(600, seed=3)
    errors = held_out_errors(model, (unseen, truth.predict_rows_s(unseen)))
    assert set(errors) == set(StepKind)
    assert max(one.mape for one in errors.values()) < 0.01
    assert max(one.p95 for one in errors.values()) < 0.03


@every_model
@with_and_without_graphs
def test_a_fit_without_noise_is_exact(name, captured):
    truth, rows = true_model(name, captured), random_rows(300, seed=4)
    times_s = truth.predict_rows_s(rows)
    model = unfitted(name, captured).fit(rows, times_s)
    assert model.predict_rows_s(rows) == pytest.approx(times_s, rel=1e-6)


@every_model
def test_a_fit_to_noise_alone_still_obeys_the_contract(name):
    rows = random_rows(120, seed=5)
    model = unfitted(name).fit(rows, np.random.default_rng(6).exponential(0.01, len(rows)))
    assert all(value >= 0 and math.isfinite(value) for value in model.coefficients_.values())
    shape, before_s = BatchShape(), 0.0
    for request in [(0, 900), (0, 1), (1, 0), (50, 3000), (0, 2000), (1, 1)]:
        add(shape, request)
        assert model.predict_s(shape) >= before_s
        before_s = model.predict_s(shape)


@every_model
def test_short_steps_count_as_much_as_long_ones(name):
    truth, rows = true_model(name), random_rows(600, seed=7)
    times_s = truth.predict_rows_s(rows)
    model = unfitted(name).fit(rows, measured(truth, rows, noise=0.05, seed=8))
    shortest = np.argsort(times_s)[:30]
    relative = model.predict_rows_s(rows[shortest]) / times_s[shortest] - 1.0
    assert np.abs(relative).mean() < 0.03


@every_model
def test_the_same_samples_give_the_same_coefficients(name):
    rows = random_rows(200, seed=9)
    times_s = measured(true_model(name), rows, noise=0.1, seed=10)
    one, other = (unfitted(name).fit(rows, times_s) for _ in range(2))
    assert one.coefficients_ == other.coefficients_


@every_model
def test_coefficients_read_back_give_the_same_model(name):
    rows = random_rows(200, seed=11)
    fitted = unfitted(name).fit(rows, measured(true_model(name), rows, noise=0.1, seed=12))
    again = unfitted(name).with_coefficients(fitted.coefficients_)
    assert again.predict_rows_s(rows).tolist() == fitted.predict_rows_s(rows).tolist()


@every_model
@pytest.mark.parametrize("seed", range(13, 18))
def test_time_in_other_units_gives_the_same_model_in_those_units(name, seed):
    # Also shows that rounding does not decide which limits a roofline ends up with.
    rows = random_rows(200, seed=seed)
    times_s = measured(true_model(name), rows, noise=0.1, seed=seed + 1)
    seconds, millis = unfitted(name).fit(rows, times_s), unfitted(name).fit(rows, times_s * 1e3)
    assert millis.predict_rows_s(rows) == pytest.approx(1e3 * seconds.predict_rows_s(rows))


# Bad samples


@every_model
@pytest.mark.parametrize("column", [*BatchRow._fields, "times_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_sample_that_cannot_be_measured_is_refused_by_column(name, column, value):
    rows = random_rows(60, seed=15)
    times_s = np.ones(60)
    if column == "times_s":
        times_s[7] = value
    else:
        rows[7, COLUMN[column]] = value
    with pytest.raises(ValueError, match=rf"{column} is {value} in sample 7; it must be finite"):
        unfitted(name).fit(rows, times_s)


@every_model
def test_a_step_that_took_no_time_is_refused(name):
    with pytest.raises(ValueError, match=r"times_s is 0\.0 in sample 0; .* above 0"):
        unfitted(name).fit(random_rows(60, seed=16), np.zeros(60))


@every_model
@pytest.mark.parametrize(
    ("kinds", "column"),
    [((StepKind.DECODE,), "prefill_tokens"), ((StepKind.PREFILL,), "num_decodes")],
)
def test_samples_that_lack_a_kind_of_step_are_refused_by_column(name, kinds, column):
    with pytest.raises(ValueError, match=rf"{column} is above 0 in 0 .* at least 10"):
        unfitted(name).fit(random_rows(60, seed=17, kinds=kinds), np.ones(60))


@every_model
@pytest.mark.parametrize("num_steps", [0, 1, 8])
def test_too_few_samples_are_refused_by_column(name, num_steps):
    with pytest.raises(ValueError, match=r"prefill_tokens is above 0 in .* at least 10"):
        unfitted(name).fit(random_rows(num_steps, seed=18), np.ones(num_steps))


@every_model
@pytest.mark.parametrize("column", ["prefill_tokens", "num_decodes", "decode_tokens"])
def test_a_column_that_never_varies_is_refused_by_name(name, column):
    rows = random_rows(90, seed=19)
    values = rows[:, COLUMN[column]]
    values[values > 0] = 64
    with pytest.raises(ValueError, match=rf"{column} is 64 wherever .* needs different values"):
        unfitted(name).fit(rows, np.ones(90))


@every_model
def test_samples_of_the_wrong_shape_are_refused(name):
    rows = random_rows(60, seed=20)
    for wrong in ((rows[:, :3], np.ones(60)), (rows, np.ones(59)), (rows[0], np.ones(7))):
        with pytest.raises(ValueError, match="see BatchRow"):
            unfitted(name).fit(*wrong)


@every_model
def test_a_refused_fit_leaves_the_model_as_it_was(name):
    model, rows = true_model(name), random_rows(60, seed=21)
    before = model.predict_rows_s(rows).tolist()
    with pytest.raises(ValueError, match="times_s"):
        model.fit(rows, np.full(60, math.nan))
    assert model.predict_rows_s(rows).tolist() == before


@every_model
def test_a_model_without_coefficients_says_so(name):
    with pytest.raises(ValueError, match=f"model {name} has no coefficients; fit it"):
        unfitted(name).predict_s(shape_of([(1, 0)]))


@every_model
def test_coefficients_that_break_the_contract_are_refused_by_name(name):
    model = true_model(name)
    first = model.COEFFICIENTS[1]
    for value in (-1e-9, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"coefficients\.{first} is {value}"):
            unfitted(name).with_coefficients({**model.coefficients_, first: value})
    with pytest.raises(ValueError, match=f"miss or have too much slope; model {name} has"):
        unfitted(name).with_coefficients({**model.coefficients_, "slope": 1.0})
    with pytest.raises(ValueError, match=f"miss or have too much {first};"):
        rest = {one: 0.0 for one in model.COEFFICIENTS if one != first}
        unfitted(name).with_coefficients(rest)


def test_an_unknown_model_is_refused_by_name():
    with pytest.raises(ValueError, match="'oracle'; known are pooled, linear, bros, roofline"):
        create_batch_time("oracle")


def test_a_roofline_without_the_models_sizes_is_refused():
    with pytest.raises(ValueError, match="give transformer"):
        create_batch_time("roofline")


# The longest prefill


@given(
    any_models(),
    batches,
    st.integers(0, 120),
    st.sampled_from([1, 2, 7, 16, 64]),
    st.integers(0, 1000),
    st.data(),
)
@settings(max_examples=300)
def test_the_longest_prefill_is_the_one_that_trying_all_finds(
    model, batch, max_tokens, page_size, cached_tokens, data
):
    shape = shape_of(batch)

    def predicted_s(new_tokens):
        return model.predict_s(shape_of([*batch, (new_tokens, cached_tokens)]))

    # A limit that some length meets exactly, so that one page more or less would show.
    limit_s = predicted_s(data.draw(st.integers(1, 150))) * data.draw(st.sampled_from([1, 0.5]))
    candidates = sorted({*range(page_size, max_tokens, page_size), max_tokens} - {0})
    expected = max((one for one in candidates if predicted_s(one) <= limit_s), default=0)
    before = shape.row()
    found = longest_prefill(
        model,
        shape,
        limit_s,
        max_tokens=max_tokens,
        page_size=page_size,
        cached_tokens=cached_tokens,
    )
    assert found == expected
    assert shape.row() == before


@every_model
def test_a_prefill_that_fits_whole_is_not_cut_to_pages(name):
    model = true_model(name)
    found = longest_prefill(model, BatchShape(), math.inf, max_tokens=1001, page_size=64)
    assert found == 1001


@every_model
@pytest.mark.parametrize("limit_s", [0.0, -1.0, math.nan])
def test_no_prefill_fits_a_limit_that_is_already_passed(name, limit_s):
    model, shape = true_model(name), shape_of([(0, 50)])
    assert longest_prefill(model, shape, limit_s, max_tokens=100) == 0


@every_model
@pytest.mark.parametrize("max_tokens", [0, -5])
def test_nothing_to_prefill_fits_as_nothing(name, max_tokens):
    assert longest_prefill(true_model(name), BatchShape(), 1.0, max_tokens=max_tokens) == 0


def test_a_page_below_one_token_is_refused():
    with pytest.raises(ValueError, match="page_size is 0"):
        longest_prefill(true_model("bros"), BatchShape(), 1.0, max_tokens=9, page_size=0)


def test_a_shape_survives_a_model_that_fails():
    shape = shape_of([(0, 50)])
    with pytest.raises(ValueError, match="no coefficients"):
        longest_prefill(unfitted("bros"), shape, 1.0, max_tokens=9)
    assert len(shape) == 1


@given(any_models(), batches, st.integers(1, 500))
def test_a_tighter_limit_never_lets_a_longer_prefill_in(model, batch, max_tokens):
    shape = shape_of(batch)
    limit_s = model.predict_s(shape_of([*batch, (max_tokens, 0)]))
    assume(math.isfinite(limit_s))
    wide, tight = (
        longest_prefill(model, shape, share * limit_s, max_tokens=max_tokens)
        for share in (1.0, 0.7)
    )
    assert tight <= wide == max_tokens
