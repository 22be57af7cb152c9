"""Echo's batch-time model: pooled lengths, prefill and decode overlapping in part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from echo_sgl.batch_shape import FloatArray, Step
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.samples import (
    MIN_SAMPLES,
    columns_of,
    fit_nonnegative,
    kinds_of,
    require_variety,
    weighted_sum,
)

NUM_PREFILL = 3


class PooledBatchTime(BatchTimeModel):
    """Predict a step's time from the area of its prefills and the pooled lengths of its decodes.

    Prefill: T_p = a * sum((p + l)^2 - p^2) + b * sum(l) + c, Echo's with p = 0 and one prefill.
    Decode: T_d = g * max(L) + d * n * mean(L) + e * n + f. Echo's d * mean(L) falls when a
    shorter request joins, as if work saved time; times the batch size n it is the same at
    one batch size (in d) and never falls. e and f are ours too: Echo's has no term for n.
    Mixed: T = max(T_p, T_d) + r * min(T_p, T_d), 0 <= r <= 1.

    T_p and T_d are fitted to steps that only prefill and only decode, r to mixed steps; r
    is 1 (the whole sum) where none was measured. A server with mixed chunks hardly ever only
    prefills: where a pure kind is too rare, all steps are fitted at once, as such a sum.

    Source: Echo eq. 6-8; the cached prefix and the batch-size terms are ours.
    Units:  tokens in, seconds out.
    Errors: `fit` needs mixed steps or both pure kinds; it names the column that lacks them.
    """

    NAME = "pooled"
    COEFFICIENTS = (
        "prefill_area",
        "prefill_token",
        "prefill_step",
        "decode_max_token",
        "decode_token",
        "decode_request",
        "decode_step",
        "mixing",
    )

    def with_coefficients(self, coefficients: Mapping[str, float]) -> Self:
        if coefficients.get("mixing", 0.0) > 1:
            raise ValueError(
                f"coefficients.mixing is {coefficients['mixing']}; above 1 a mixed step would "
                "take longer than its prefill and its decode apart"
            )
        return super().with_coefficients(coefficients)

    def _prefill(self, batch: Any) -> tuple[Any, ...]:
        return batch.prefill_area, batch.prefill_tokens, batch.num_prefills > 0

    def _decode(self, batch: Any, num_decodes: Any) -> tuple[Any, ...]:
        return batch.max_decode_tokens, batch.decode_tokens, num_decodes, num_decodes > 0

    def _predict(self, step: Step, num_decodes: int) -> float:
        # `weighted_sum` of `_prefill` and `_decode`, written out: it is asked for often.
        area, token, step_s, longest, context, request, decode_step_s, mixing = self._values
        prefill_s = decode_s = 0.0
        if step.num_prefills:
            prefill_s = area * step.prefill_area + token * step.prefill_tokens + step_s
        if num_decodes:
            decode_s = longest * step.max_decode_tokens + context * step.decode_tokens
            decode_s = decode_s + request * num_decodes + decode_step_s
        return max(prefill_s, decode_s) + mixing * min(prefill_s, decode_s)

    def _predict_columns(self, batch: Any, num_decodes: Any) -> FloatArray:
        values = self._values
        prefill_s = weighted_sum(values[:NUM_PREFILL], self._prefill(batch))
        decode_s = weighted_sum(values[NUM_PREFILL:-1], self._decode(batch, num_decodes))
        total_s: FloatArray = np.maximum(prefill_s, decode_s)
        total_s += values[-1] * np.minimum(prefill_s, decode_s)
        return total_s

    def _fit(self, batch: Any, num_decodes: Any, times_s: FloatArray) -> Sequence[float]:
        rows = np.column_stack(batch)
        is_prefill, is_decode, is_mixed = kinds_of(rows).values()
        try:
            require_variety(rows[is_prefill], ("prefill_tokens",), "steps that only prefill")
            decode_columns = ("num_decodes", "decode_tokens")
            require_variety(rows[is_decode], decode_columns, "steps that only decode")
        except ValueError:
            if is_mixed.sum() < MIN_SAMPLES:
                raise
            features = *self._prefill(batch), *self._decode(batch, num_decodes)
            return *fit_nonnegative(features, times_s), 1.0
        prefill = fit_nonnegative(self._prefill(columns_of(rows[is_prefill])), times_s[is_prefill])
        decodes = self._decode(columns_of(rows[is_decode]), num_decodes[is_decode])
        decode = fit_nonnegative(decodes, times_s[is_decode])
        mixed = columns_of(rows[is_mixed])
        prefill_s = weighted_sum(prefill, self._prefill(mixed))
        decode_s = weighted_sum(decode, self._decode(mixed, num_decodes[is_mixed]))
        return *prefill, *decode, _mixing(prefill_s, decode_s, times_s[is_mixed])


def _mixing(prefill_s: FloatArray, decode_s: FloatArray, times_s: FloatArray) -> float:
    """The r in [0, 1] of least squared relative error; 1 where no sample tells.

    Shapes: (mixed steps,) each.
    """
    smaller = np.minimum(prefill_s, decode_s) / times_s
    excess = 1.0 - np.maximum(prefill_s, decode_s) / times_s
    square = float(smaller @ smaller)
    return float(np.clip(smaller @ excess / square, 0.0, 1.0)) if square > 0 else 1.0
