"""What steps usually take, without a model and whatever single measurements say."""

from __future__ import annotations

import numpy as np

from echo_sgl.batch_shape import FloatArray
from echo_sgl.estimators.samples import MIN_SAMPLES, columns_of, fit_nonnegative, kinds_of

NUM_ROUNDS = 12
# Errors below this share count as this much: least absolute errors have no slope at 0.
LEAST_ERROR = 0.05


def plain_times_s(rows: FloatArray, times_s: FloatArray) -> FloatArray:
    """A weighted sum of each step's columns, in which one that was measured wrong counts little.

    Least squares of relative errors trust a step that was measured far too short before all
    others: to be off by its own time costs it a multiple of that. So errors count in relation to
    what is more, the measured or the predicted time, each for one at most, and are added up as
    they are, not their squares. NaN for kinds of fewer than `MIN_SAMPLES` steps.

    Source: least absolute errors by iteratively reweighted least squares (Schlossmacher, 1973);
    what they are related to is ours.
    Units: seconds. Shapes: (steps, columns of `BatchRow`), (steps,) -> (steps,).
    """
    plain_s = np.full(len(times_s), np.nan)
    for mask in kinds_of(rows).values():
        if mask.sum() >= MIN_SAMPLES:
            plain_s[mask] = _fitted_s(rows[mask], times_s[mask])
    return plain_s


def _fitted_s(rows: FloatArray, times_s: FloatArray) -> FloatArray:
    columns = columns_of(rows)
    features = np.column_stack([np.ones(len(rows)), *columns])
    scales_s = np.maximum(times_s, np.median(times_s))
    for _ in range(NUM_ROUNDS):
        coefficients = fit_nonnegative(list(features.T), times_s, scales_s=scales_s)
        fitted_s: FloatArray = features @ np.array(coefficients)
        most_s = np.maximum(times_s, fitted_s)
        errors_s = np.maximum(np.abs(times_s - fitted_s), LEAST_ERROR * most_s)
        scales_s = np.sqrt(most_s * errors_s)
    return fitted_s
