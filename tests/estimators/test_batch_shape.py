"""A step's sums are those of its requests, however it was put together."""

from __future__ import annotations

import pytest
from hypothesis import given

from echo_sgl.batch_shape import BatchRow, BatchShape, StepKind, rows_of
from tests.estimators.steps import batches, shape_of


@given(batches)
def test_a_row_holds_the_sums_over_the_requests(batch):
    prefills = [(new, cached) for new, cached in batch if new]
    contexts = [context for new, context in batch if not new]
    assert shape_of(batch).row() == BatchRow(
        num_prefills=len(prefills),
        prefill_tokens=sum(new for new, _ in prefills),
        cached_tokens=sum(cached for _, cached in prefills),
        prefill_area=sum((cached + new) ** 2 - cached**2 for new, cached in prefills),
        num_decodes=len(contexts),
        decode_tokens=sum(contexts),
        max_decode_tokens=max(contexts, default=0),
        max_prefill_tokens=max((new + cached for new, cached in prefills), default=0),
    )


@given(batches, batches)
def test_undo_equals_a_shape_built_without_the_request(kept, taken_back):
    shape = shape_of(kept + taken_back)
    for remaining in reversed(range(len(taken_back))):
        shape.undo()
        assert shape.row() == shape_of(kept + taken_back[:remaining]).row()
    assert len(shape) == len(kept)


@given(batches)
def test_undone_to_the_last_request_a_shape_is_empty(batch):
    shape = shape_of(batch)
    for _ in batch:
        shape.undo()
    assert shape.row() == BatchShape().row()


def test_undo_brings_back_each_earlier_maximum():
    shape, seen = BatchShape(), []
    for context in (5, 9, 7, 9, 12, 1):
        seen.append(shape.max_decode_tokens)
        shape.add_decode(context)
    for expected in reversed(seen):
        shape.undo()
        assert shape.max_decode_tokens == expected


def test_undo_brings_back_each_earlier_longest_prefill():
    shape, seen = BatchShape(), []
    for new, cached in ((5, 0), (1, 9), (3, 2), (10, 0), (1, 30), (2, 0)):
        seen.append(shape.max_prefill_tokens)
        shape.add_prefill(new, cached)
    assert shape.max_prefill_tokens == 31
    for expected in reversed(seen):
        shape.undo()
        assert shape.max_prefill_tokens == expected


def test_a_row_does_not_follow_its_shape():
    shape = shape_of([(0, 5)])
    row = shape.row()
    shape.add_decode(100)
    assert row.decode_tokens == 5
    with pytest.raises(AttributeError):
        row.decode_tokens = 6


def test_a_chunked_prefill_covers_the_same_area_as_a_whole_one():
    chunked = shape_of([(100, 0), (50, 100), (1, 150)])
    assert chunked.prefill_area == shape_of([(151, 0)]).prefill_area == 151**2


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        ([(3, 0)], StepKind.PREFILL),
        ([(0, 3)], StepKind.DECODE),
        ([(0, 3), (3, 0)], StepKind.MIXED),
    ],
)
def test_the_kind_says_what_a_step_runs(batch, kind):
    assert shape_of(batch).kind is kind
    assert shape_of(batch).row().kind is kind


def test_a_step_without_requests_has_no_kind():
    with pytest.raises(ValueError, match="add a prefill or a decode first"):
        _ = BatchShape().kind


@pytest.mark.parametrize(("new_tokens", "cached_tokens"), [(0, 5), (-1, 5), (5, -1)])
def test_a_prefill_of_nothing_is_refused_and_changes_nothing(new_tokens, cached_tokens):
    shape = shape_of([(2, 3)])
    with pytest.raises(ValueError, match=f"{new_tokens} new behind {cached_tokens} cached"):
        shape.add_prefill(new_tokens, cached_tokens)
    assert shape.row() == shape_of([(2, 3)]).row()


@pytest.mark.parametrize("context_tokens", [0, -7])
def test_a_decode_without_context_is_refused_and_changes_nothing(context_tokens):
    shape = shape_of([(0, 3)])
    with pytest.raises(ValueError, match=f"decode with {context_tokens} tokens"):
        shape.add_decode(context_tokens)
    assert shape.row() == shape_of([(0, 3)]).row()


def test_there_is_nothing_to_undo_in_an_empty_shape():
    with pytest.raises(IndexError):
        BatchShape().undo()


def test_rows_of_shapes_and_of_rows_are_the_same_array():
    shapes = [shape_of([(3, 4), (0, 5)]), shape_of([(0, 6)])]
    rows = rows_of(shapes)
    assert rows.tolist() == rows_of([shape.row() for shape in shapes]).tolist()
    assert rows.shape == (2, len(BatchRow._fields))
    assert rows_of([]).shape == (0, len(BatchRow._fields))
