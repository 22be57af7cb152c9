"""Live steps to fit again from: bounded, recent, and safe from outliers."""

from __future__ import annotations

import copy
import math
import random
from array import array
from collections.abc import Callable

import numpy as np

from echo_sgl.batch_shape import BatchRow, BatchShape, FloatArray, Step, StepKind
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.held_out import Samples
from echo_sgl.estimators.plain_time import plain_times_s
from echo_sgl.estimators.samples import checked_samples, kinds_of

# A normal error is beyond 5 median absolute deviations once in 1,300 times.
MAX_DEVIATIONS = 5.0
# Steps that differ by less are none, however little others do: where most are of one shape, the
# rest would never be learned.
LEAST_REACH = 1.3
# A weighted sum of a step's columns, which has no knees, is wrong by more on its own.
LEAST_PLAIN_REACH = 2.0
NUM_COLUMNS = len(BatchRow._fields) + 1


class RefitBuffer:
    """A sample of the steps seen, apart per kind, so that many decodes do not push out prefills.

    When a kind is full, a new step takes the place of a random one: how likely a step is
    still here fades with the steps of its kind since, by half in `0.7 * capacity` of them.
    A kind that no longer occurs keeps what it had, so fill it with the calibration first.

    Source: Aggarwal (2006), biased reservoir sampling.
    """

    def __init__(self, *, capacity_per_kind: int = 2000, rng: random.Random) -> None:
        self._capacity, self._rng = capacity_per_kind, rng
        # Row by row: the columns of `BatchRow`, then the time.
        self._tables = {kind: array("d") for kind in StepKind}

    def __len__(self) -> int:
        return sum(map(len, self._tables.values())) // NUM_COLUMNS

    def add(self, step: Step, time_s: float) -> None:
        """Keep a step that took `time_s`; O(1)."""
        row = step.row() if isinstance(step, BatchShape) else step
        table, values = self._tables[row.kind], array("d", (*row, time_s))
        if len(table) < self._capacity * NUM_COLUMNS:
            table.extend(values)
        else:
            start = self._rng.randrange(self._capacity) * NUM_COLUMNS
            table[start : start + NUM_COLUMNS] = values

    def samples(self) -> Samples:
        """What is here, for `fit`. Shapes: (steps, columns of `BatchRow`) and (steps,)."""
        table = np.concatenate([np.array(self._tables[kind]) for kind in StepKind])
        table = table.reshape(-1, NUM_COLUMNS)
        return table[:, :-1], table[:, -1]


def refitted(
    model: BatchTimeModel,
    buffer: RefitBuffer,
    anchors: Callable[[FloatArray], Samples] = lambda rows: (rows[:0], rows[:0, 0]),
) -> BatchTimeModel:
    """A copy of the model, fitted to the buffer's steps; the model itself stays as it is.

    `anchors` tells steps that count beside these rows, see `Anchors`.
    Errors: `ValueError` names the column that is too rare or constant; keep the old model.
    """
    rows, times_s = buffer.samples()
    if model.coefficients_ is None:
        model = first_fit(model, rows, times_s)
    times_s = clip_outliers(model, rows, times_s)
    more_rows, more_s = anchors(rows)
    rows, times_s = np.concatenate([rows, more_rows]), np.concatenate([times_s, more_s])
    return copy.copy(model).fit(rows, times_s)


def first_fit(model: BatchTimeModel, rows: FloatArray, times_s: FloatArray) -> BatchTimeModel:
    """A copy of a model without coefficients, fitted to steps whatever a few of them say.

    Without gross outliers first, to see which others there are.
    Shapes: (steps, columns of `BatchRow`), (steps,). Errors: as `BatchTimeModel.fit`.
    """
    rows, times_s = checked_samples(rows, times_s)
    rough = copy.copy(model).fit(rows, clip_gross_outliers(rows, times_s))
    return copy.copy(model).fit(rows, clip_outliers(rough, rows, times_s))


def clip_outliers(model: BatchTimeModel, rows: FloatArray, times_s: FloatArray) -> FloatArray:
    """Times pulled to within `MAX_DEVIATIONS` of what is usual beside the model's prediction.

    Usual is the median of log(measured / predicted) per kind of step, so a model that is off
    by a factor clips nothing; and so is what differs from it by less than `LEAST_REACH`.
    Shapes: (steps, columns of `BatchRow`), (steps,) -> (steps,).
    """
    return _clipped(rows, times_s, model.predict_rows_s(rows), LEAST_REACH)


def clip_gross_outliers(rows: FloatArray, times_s: FloatArray) -> FloatArray:
    """The same without a model, beside `plain_times_s`: what a first fit needs.

    One step of a thousand that was measured at a tenth of its time makes it wrong by a quarter.
    """
    return _clipped(rows, times_s, plain_times_s(rows, times_s), LEAST_PLAIN_REACH)


def _clipped(
    rows: FloatArray, times_s: FloatArray, predicted_s: FloatArray, least_reach: float
) -> FloatArray:
    # Where 0 is predicted, or nothing, there is nothing to compare with.
    known = (predicted_s > 0) & (times_s > 0)
    clipped_s = times_s.copy()
    for mask in kinds_of(rows).values():
        chosen = mask & known
        if chosen.any():
            log_ratios = np.log(times_s[chosen] / predicted_s[chosen])
            median = np.median(log_ratios)
            deviation = 1.4826 * np.median(np.abs(log_ratios - median))
            reach = max(MAX_DEVIATIONS * deviation, math.log(least_reach))
            inside = np.clip(log_ratios, median - reach, median + reach)
            clipped_s[chosen] = predicted_s[chosen] * np.exp(inside)
    return clipped_s
