"""What a calibration knew: steps within its range, beyond those seen, as long as they are now."""

from __future__ import annotations

import numpy as np
import pytest

from echo_sgl.batch_shape import BatchRow, StepKind, rows_of
from echo_sgl.estimators.anchors import MIN_RECENT, Anchors
from echo_sgl.estimators.samples import kinds_of
from tests.estimators.steps import NAMES, shape_of, true_model

LARGEST = {
    "num_prefills": 8,
    "prefill_tokens": 2048,
    "cached_tokens": 4000,
    "prefill_area": 9_000_000,
    "num_decodes": 64,
    "decode_tokens": 64_000,
    "max_decode_tokens": 4000,
}
NOTHING_SEEN = rows_of([])
NO_STEPS = {kind: [] for kind in StepKind}


@pytest.mark.parametrize("name", NAMES)
def test_they_span_what_was_calibrated_and_nothing_more(name):
    model = true_model(name)
    rows, times_s = Anchors(model, LARGEST).samples(NOTHING_SEEN, NO_STEPS)
    assert times_s.tolist() == model.predict_rows_s(rows).tolist()
    assert (times_s > 0).all()
    assert all(mask.any() for mask in kinds_of(rows).values())
    highest = dict(zip(BatchRow._fields, rows.max(axis=0), strict=True))
    assert all(highest[column] <= most for column, most in LARGEST.items())
    for column in ("prefill_tokens", "num_decodes", "max_decode_tokens"):
        assert highest[column] == LARGEST[column]
    assert highest["cached_tokens"] == LARGEST["cached_tokens"] / 2
    steps = [BatchRow(*row) for row in rows]
    assert all(one.decode_tokens == one.num_decodes * one.max_decode_tokens for one in steps)


def test_no_prefill_is_longer_than_the_longest_was():
    largest = LARGEST | {"max_prefill_tokens": 1500}
    rows, _ = Anchors(true_model("pooled"), largest).samples(NOTHING_SEEN, NO_STEPS)
    behind = [row for row in map(BatchRow._make, rows) if row.cached_tokens]
    assert 700 < max(row.max_prefill_tokens for row in behind) <= 1500


def test_a_calibration_without_a_kind_of_steps_gives_none_of_it():
    no_decodes = LARGEST | {"num_decodes": 0, "decode_tokens": 0, "max_decode_tokens": 0}
    rows, _ = Anchors(true_model("pooled"), no_decodes).samples(NOTHING_SEEN, NO_STEPS)
    assert [mask.any() for mask in kinds_of(rows).values()] == [True, False, False]


def test_what_live_steps_tell_is_left_to_them():
    anchors = Anchors(true_model("pooled"), LARGEST)
    decodes = rows_of(shape_of([(0, context)] * 8) for context in range(10, 500, 10))
    prefills = rows_of(shape_of([(new, 0)]) for new in range(20, 600, 10))
    rows, _ = anchors.samples(np.concatenate([decodes, prefills]), NO_STEPS)
    is_prefill, is_decode, _ = kinds_of(rows).values()
    tokens = [BatchRow(*row) for row in rows]
    for row, prefill, decode in zip(tokens, is_prefill, is_decode, strict=True):
        if prefill:
            assert row.cached_tokens > 0 or not 40 < row.prefill_tokens < 570
        if decode:
            assert row.num_decodes != 8 or not 30 < row.max_decode_tokens < 480
    # Once prefixes of several lengths were seen, they tell what one costs.
    behind = rows_of(shape_of([(new, new)]) for new in range(20, 600, 10))
    rows, _ = anchors.samples(np.concatenate([decodes, behind]), NO_STEPS)
    assert not any(BatchRow(*row).cached_tokens for row in rows[kinds_of(rows)[StepKind.PREFILL]])


def test_a_machine_that_became_slower_is_so_for_steps_that_did_not_come():
    model = true_model("pooled")
    decode = shape_of([(0, 100)] * 4).row()
    recent = NO_STEPS | {StepKind.DECODE: [(decode, 2.0 * model.predict_s(decode))] * 9}
    rows, times_s = Anchors(model, LARGEST).samples(NOTHING_SEEN, recent)
    assert times_s == pytest.approx(2.0 * model.predict_rows_s(rows))


def slower(model, kind: StepKind, factor: float, num_steps: int = 9):
    """As many recent steps of this kind, which took so many times as long as predicted."""
    row = shape_of([(0, 100)] * 4 if kind is StepKind.DECODE else [(100, 0)]).row()
    return {kind: [(row, factor * model.predict_s(row))] * num_steps}


def test_each_kind_is_as_much_slower_as_it_was_and_others_as_much_as_those_in_the_mean():
    model = true_model("pooled")
    recent = NO_STEPS | slower(model, StepKind.DECODE, 2.0) | slower(model, StepKind.PREFILL, 8.0)
    rows, times_s = Anchors(model, LARGEST).samples(NOTHING_SEEN, recent)
    before_s, kinds = model.predict_rows_s(rows), kinds_of(rows)
    for kind, factor in ((StepKind.DECODE, 2.0), (StepKind.PREFILL, 8.0), (StepKind.MIXED, 4.0)):
        assert times_s[kinds[kind]] == pytest.approx(factor * before_s[kinds[kind]])


def test_a_few_slow_steps_tell_nothing_of_those_that_did_not_come():
    model = true_model("pooled")
    recent = NO_STEPS | slower(model, StepKind.DECODE, 9.0, MIN_RECENT - 1)
    rows, times_s = Anchors(model, LARGEST).samples(NOTHING_SEEN, recent)
    assert times_s.tolist() == model.predict_rows_s(rows).tolist()
