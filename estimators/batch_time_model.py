"""What every model of a step's execution time has in common.

`BatchTimeModel` owns checking, padding and coefficients; a model adds its features. All
coefficients are at least 0 and all features grow with every length and every request, so no
prediction is negative and none falls when work is added, down to the last bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from echo_sgl.batch_shape import FloatArray, Step
from echo_sgl.estimators.samples import (
    checked_samples,
    columns_of,
    fit_nonnegative,
    require_variety,
    weighted_sum,
)


class BatchTimeModel(ABC):
    """Predicts how long a step takes from what it runs.

    `captured_batch_sizes`: sizes that CUDA graphs were captured for. A decode batch is run
    at the next captured size; above the largest one as it is. A prefill in the same step
    does not change that, although it runs without graph: less would make adding it pay.

    Units: tokens in, seconds out. Without requests a step takes 0 s.
    """

    NAME: ClassVar[str]
    COEFFICIENTS: ClassVar[tuple[str, ...]]

    def __init__(self, *, captured_batch_sizes: Iterable[int] = ()) -> None:
        self.captured_batch_sizes = tuple(sorted(set(captured_batch_sizes)))
        if self.captured_batch_sizes and self.captured_batch_sizes[0] < 1:
            raise ValueError(
                f"captured_batch_sizes holds {self.captured_batch_sizes[0]}; sizes are at least 1"
            )
        self._sizes = (0, *self.captured_batch_sizes)
        self.coefficients_: dict[str, float] | None = None
        self._values: tuple[float, ...] = ()

    def fit(self, rows: Any, times_s: Any) -> Self:
        """Fit to measured steps; keeps the old coefficients when the samples are refused.

        Shapes: (steps, columns of `BatchRow`), see `rows_of`, and (steps,).
        Errors: `ValueError` names the column that is NaN, negative, too rare or constant.
        """
        rows, times_s = checked_samples(rows, times_s)
        require_variety(rows, ("prefill_tokens", "num_decodes", "decode_tokens"), "samples")
        batch = columns_of(rows)
        padded = self._padded_column(batch.num_decodes)
        self._set(self._fit(batch, padded, times_s))
        return self

    def predict_s(self, step: Step) -> float:
        """Seconds that a step takes. Errors: `ValueError` when the model was not fitted."""
        if not self._values:
            raise ValueError(f"model {self.NAME} has no coefficients; fit it or load a profile")
        num_decodes: int = step.num_decodes
        if num_decodes:
            num_decodes = self._padded(num_decodes)
        elif not step.num_prefills:
            return 0.0
        return self._predict(step, num_decodes)

    def predict_rows_s(self, rows: FloatArray) -> FloatArray:
        """`predict_s` of each row, to the last bit.

        Shapes: (steps, columns of `BatchRow`) -> (steps,). Errors: as `predict_s`.
        """
        if not self._values:
            raise ValueError(f"model {self.NAME} has no coefficients; fit it or load a profile")
        batch = columns_of(np.asarray(rows, dtype=np.float64))
        predicted_s = self._predict_columns(batch, self._padded_column(batch.num_decodes))
        return np.where(batch.num_prefills + batch.num_decodes > 0, predicted_s, 0.0)

    def with_coefficients(self, coefficients: Mapping[str, float]) -> Self:
        """Take coefficients that an earlier fit found.

        Errors: `ValueError` names the coefficient that is missing, not known or not allowed.
        """
        if wrong := set(coefficients) ^ set(self.COEFFICIENTS):
            raise ValueError(
                f"coefficients miss or have too much {', '.join(sorted(wrong))}; "
                f"model {self.NAME} has {', '.join(self.COEFFICIENTS)}"
            )
        for name, value in coefficients.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"coefficients.{name} is {value}; it must be finite and >= 0")
        self._set([float(coefficients[name]) for name in self.COEFFICIENTS])
        return self

    @abstractmethod
    def _fit(self, batch: Any, num_decodes: Any, times_s: FloatArray) -> Sequence[float]:
        """One value >= 0 per name in `COEFFICIENTS`; `batch` is a `BatchRow` of columns."""

    @abstractmethod
    def _predict(self, step: Step, num_decodes: int) -> float:
        """Seconds of a step that is not empty; `num_decodes` is padded."""

    @abstractmethod
    def _predict_columns(self, batch: Any, num_decodes: Any) -> FloatArray:
        """`_predict` of all steps at once; the same operations in the same order."""

    def _set(self, values: Sequence[float]) -> None:
        self._values = tuple(values)
        self.coefficients_ = dict(zip(self.COEFFICIENTS, values, strict=True))

    def _padded(self, num_decodes: int) -> int:
        position = bisect_left(self._sizes, num_decodes)
        return self._sizes[position] if position < len(self._sizes) else num_decodes

    def _padded_column(self, num_decodes: FloatArray) -> FloatArray:
        sizes = np.array(self._sizes, dtype=np.float64)
        positions = np.searchsorted(sizes, num_decodes)
        padded = sizes[np.minimum(positions, len(sizes) - 1)]
        return np.where(positions < len(sizes), padded, num_decodes)


class FeatureModel(BatchTimeModel):
    """A model that is a weighted sum of features, one coefficient each."""

    @abstractmethod
    def _features(self, batch: Any, num_decodes: Any) -> tuple[Any, ...]:
        """What the coefficients weigh, of one step or of columns of steps."""

    def _fit(self, batch: Any, num_decodes: Any, times_s: FloatArray) -> Sequence[float]:
        return fit_nonnegative(self._features(batch, num_decodes), times_s)

    def _predict(self, step: Step, num_decodes: int) -> float:
        return float(weighted_sum(self._values, self._features(step, num_decodes)))

    def _predict_columns(self, batch: Any, num_decodes: Any) -> FloatArray:
        total: FloatArray = weighted_sum(self._values, self._features(batch, num_decodes))
        return total
