"""Measured steps: what may be fitted, and the fit that all batch-time models share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from echo_sgl.batch_shape import BatchRow, FloatArray, StepKind

MIN_SAMPLES = 10
MAX_ITERATIONS = 30  # of the solver, for each column
BLOCK_ROWS = 512


def checked_samples(rows: Any, times_s: Any) -> tuple[FloatArray, FloatArray]:
    """Rows and times as arrays, if every number can be a measured one.

    Shapes: (steps, columns of `BatchRow`) and (steps,).
    Errors: `ValueError` names the column, the sample and the value.
    """
    rows, times_s = np.asarray(rows, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    num_columns = len(BatchRow._fields)
    if rows.ndim != 2 or rows.shape[1] != num_columns or times_s.shape != rows.shape[:1]:
        raise ValueError(
            f"rows have shape {rows.shape} and times_s {times_s.shape}; they must be "
            f"(steps, {num_columns}) and (steps,), see BatchRow"
        )
    columns = dict(zip(BatchRow._fields, rows.T, strict=True))
    for name, values in (*columns.items(), ("times_s", times_s)):
        is_wrong = ~np.isfinite(values) | (values < 0)
        if name == "times_s":
            is_wrong |= values == 0
        if is_wrong.any():
            sample = int(is_wrong.argmax())
            raise ValueError(
                f"{name} is {values[sample]} in sample {sample}; it must be finite and "
                f"{'above 0' if name == 'times_s' else 'at least 0'}"
            )
    return rows, times_s


def require_variety(rows: FloatArray, columns: Sequence[str], of: str) -> None:
    """Refuse samples that cannot tell what one more of a column costs.

    Errors: `ValueError` names the column, and `of`, which steps were looked at.
    """
    for name in columns:
        values = rows[:, BatchRow._fields.index(name)]
        used = values[values > 0]
        if len(used) < MIN_SAMPLES:
            raise ValueError(
                f"{name} is above 0 in {len(used)} {of}; a fit needs at least {MIN_SAMPLES}. "
                "Measure more of such steps"
            )
        if used.min() == used.max():
            raise ValueError(
                f"{name} is {used[0]:g} wherever it is above 0 in {len(used)} {of}; a fit needs "
                "different values. Measure steps of other sizes"
            )


def kinds_of(rows: FloatArray) -> dict[StepKind, Any]:
    """Which rows are of which kind. Shapes: one mask (steps,) per kind."""
    batch = columns_of(rows)
    has_prefill, has_decode = batch.num_prefills > 0, batch.num_decodes > 0
    return {
        StepKind.PREFILL: has_prefill & ~has_decode,
        StepKind.DECODE: has_decode & ~has_prefill,
        StepKind.MIXED: has_prefill & has_decode,
    }


def columns_of(rows: FloatArray) -> Any:
    """A `BatchRow` of columns: a formula over one step then works on all steps at once."""
    return BatchRow._make(rows.T)


def weighted_sum(coefficients: Sequence[float], features: Sequence[Any]) -> Any:
    """Sum of products, for one step or for columns of steps.

    Adds one after the other: `sum` compensates rounding from Python 3.12 on, and then a
    larger feature may give a smaller sum in the last bit, which `longest_prefill` would see.
    """
    total = 0.0
    for coefficient, feature in zip(coefficients, features, strict=True):
        total += coefficient * feature
    return total


def fit_nonnegative(
    features: Sequence[Any], times_s: FloatArray, *, scales_s: FloatArray | None = None
) -> list[float]:
    """Coefficients >= 0 with the least squared *relative* error, so that short steps count.

    `scales_s`: what errors are related to, if not to the times themselves.
    Shapes: one array (steps,) per feature; one coefficient per feature, 0 where it never occurs.
    """
    return _solved(_relative_triangle(features, times_s, scales_s))[0]


def fit_with_knee(
    amounts: FloatArray, knees: Sequence[float], others: Sequence[Any], times_s: FloatArray
) -> tuple[list[float], float]:
    """As `fit_nonnegative`, where an amount costs one thing up to a knee and another beyond it.

    Returns the cost beyond the knee and below it, those of `others`, and the knee: of the given
    ones that samples tell about on both sides, or 0, that of the least error.
    Shapes: `amounts` and each of `others` (steps,).
    """
    used = amounts[amounts > 0]
    told = [knee for knee in knees if _tells(used[used <= knee]) and _tells(used[used > knee])]
    bounds = [0.0, *told, np.inf]
    parts = [np.clip(amounts - low, 0.0, high - low) for low, high in itertools.pairwise(bounds)]
    triangle = _relative_triangle((*parts, *others), times_s)
    best: tuple[float, list[float], float] = (np.inf, [], 0.0)
    for number, knee in enumerate(bounds[:-1]):
        below = triangle[:, :number].sum(axis=1)
        beyond = triangle[:, number : len(parts)].sum(axis=1)
        columns = np.column_stack([beyond, below, triangle[:, len(parts) :]])
        coefficients, error = _solved(columns)
        best = min(best, (error, coefficients, knee))
    return best[1], best[2]


def _tells(amounts: FloatArray) -> bool:
    """Whether a slope can be told from them."""
    return len(amounts) >= MIN_SAMPLES and bool(amounts.min() < amounts.max())


def _relative_triangle(
    features: Sequence[Any], times_s: FloatArray, scales_s: FloatArray | None = None
) -> Any:
    """Features and, as the last column, times per second of their step or of its scale, in as few
    rows as columns.
    """
    scales_s = times_s if scales_s is None else scales_s
    return _triangle(np.column_stack([*features, times_s]) / scales_s[:, np.newaxis])


def _solved(triangle: Any) -> tuple[list[float], float]:
    """Coefficients >= 0 that make the last column of the others, and what is left of it.

    Errors: `ValueError` when they are not found, as may be among columns that are nearly the same.
    """
    scales = np.linalg.norm(triangle, axis=0)
    scales[scales == 0] = 1.0
    scaled = triangle / scales
    try:
        coefficients, error = nnls(
            scaled[:, :-1], scaled[:, -1], maxiter=MAX_ITERATIONS * len(scales)
        )
    except RuntimeError as failure:
        raise ValueError(f"these steps cannot be fitted: {failure}") from failure
    return [float(one) for one in coefficients * scales[-1] / scales[:-1]], float(error)


def _triangle(matrix: Any) -> Any:
    """R of the QR decomposition: as few rows as columns, and the same least squares solution.

    In blocks, each too small for BLAS to start threads: a server fits beside the model, and
    on busy cores waiting for each other costs them tens of times more than the work.
    Shapes: (steps, columns) -> (columns, columns).
    """
    num_columns = matrix.shape[1]
    while len(matrix) > BLOCK_ROWS:
        filled = np.pad(matrix, ((0, -len(matrix) % BLOCK_ROWS), (0, 0)))
        blocks = filled.reshape(-1, BLOCK_ROWS, num_columns)
        triangles: Any = np.linalg.qr(blocks, mode="r")
        matrix = triangles.reshape(-1, num_columns)
    return np.linalg.qr(matrix, mode="r")
