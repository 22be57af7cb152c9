"""Echo's batch-time model: pooled lengths, prefill and decode overlapping in part."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from echo_sgl.batch_shape import FloatArray, Step
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.samples import (
    MIN_SAMPLES,
    columns_of,
    fit_with_knee,
    kinds_of,
    require_variety,
    weighted_sum,
)

NUM_PREFILL, NUM_DECODE = 6, 7
# Tokens, and requests, from which on each further one may cost more, or less.
KNEES_TOKENS = (32, 64, 128, 256, 512, 1024)
KNEES_REQUESTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# A device that works on several requests at once: as many as it may have room for, to begin with.
WIDTHS = (4, 32)
MAX_ROUNDS = 4
SEARCH_KNEES = (4, 16, 64)
MAX_SEARCH_ROWS = 300
# What is left of the mean error where the costs of attention are said to overlap.
OVERLAP_ERROR = 0.9

Decodes = tuple[Any, FloatArray, FloatArray]
"""A `BatchRow` of columns, padded batch sizes and seconds of steps that only decode."""


class PooledBatchTime(BatchTimeModel):
    """Predict a step's time from the area of its prefills and the pooled lengths of its decodes.

    Prefill: T_p = a * sum((p + l)^2 - p^2) + b * min(l', k) + b' * max(l' - k, 0) + h * sum(p) + c
    with l' = sum(l), Echo's with p = 0, one prefill and b = b'. An accelerator reads its weights
    for a few tokens as for one and computes for many: up to the knee k a token is cheap. Few
    tokens behind a long prefix wait for its keys and values to be read: h, where the area says
    nearly nothing.
    Decode: T_d = g * max(L) + d * n * mean(L) + e * min(n, m) + e' * max(n - m, 0) + f. Echo's
    d * mean(L) falls when a shorter request joins, as if work saved time; times the batch size
    n it is the same at one batch size (in d) and never falls. e, e' and f are ours too: Echo's
    has no term for n. Up to a knee m as for prefills: on CPUs the second request costs several
    times as much as the fourth.
    Overlap: a core adds up both costs of the contexts L. A GPU attends to several at once: a few
    take as long as the longest of them, many as long as all their tokens take its memory. There
    the larger of g * max(L) and d * n * mean(L) counts, and 1 - o of the smaller; a fit takes o
    to be 0 or 1.
    Mixed: T = max(T_p, T_d) + r * min(T_p, T_d), 0 <= r <= 1.

    T_p and T_d are fitted to steps that only prefill and only decode, r to mixed steps; r
    is 1 (the whole sum) where none was measured. A server with mixed chunks hardly ever only
    prefills: where a pure kind is too rare, all steps are fitted at once, as such a sum; and
    where mixed steps outnumber those that only prefill, if that has the smaller mean error.

    Source: Echo eq. 6-8; the knees, the cached prefix, the batch-size terms and the overlap are
            ours.
    Units:  tokens in, seconds out.
    Errors: `fit` needs mixed steps or both pure kinds; it names the column that lacks them.
    """

    NAME = "pooled"
    COEFFICIENTS = (
        "prefill_area",
        "prefill_token",
        "prefill_token_beyond",
        "prefill_cached",
        "prefill_step",
        "prefill_knee",
        "decode_max_token",
        "decode_token",
        "decode_request",
        "decode_request_beyond",
        "decode_step",
        "decode_knee",
        "decode_overlap",
        "mixing",
    )

    def with_coefficients(self, coefficients: Mapping[str, float]) -> Self:
        if coefficients.get("mixing", 0.0) > 1:
            raise ValueError(
                f"coefficients.mixing is {coefficients['mixing']}; above 1 a mixed step would "
                "take longer than its prefill and its decode apart"
            )
        if coefficients.get("decode_overlap", 0.0) > 1:
            raise ValueError(
                f"coefficients.decode_overlap is {coefficients['decode_overlap']}; above 1 a "
                "longer context would save time"
            )
        # Profiles of before it have none.
        return super().with_coefficients({"decode_overlap": 0.0, **coefficients})

    def _predict(self, step: Step, num_decodes: int) -> float:
        # `weighted_sum` of `_prefill` and `_decode`, written out: it is asked for often.
        (area, token, beyond, cached, step_s, knee,
         longest, context, request, more, decode_step_s, wide, overlap,
         mixing) = self._values  # fmt: skip
        prefill_s = decode_s = 0.0
        if tokens := step.prefill_tokens:
            prefill_s = area * step.prefill_area
            if tokens <= knee:
                prefill_s += token * tokens
            else:
                prefill_s = prefill_s + token * knee + beyond * (tokens - knee)
            prefill_s = prefill_s + cached * step.cached_tokens + step_s
        if num_decodes:
            longest_s, context_s = longest * step.max_decode_tokens, context * step.decode_tokens
            decode_s = max(longest_s, context_s) + (1.0 - overlap) * min(longest_s, context_s)
            if num_decodes <= wide:
                decode_s += request * num_decodes
            else:
                decode_s = decode_s + request * wide + more * (num_decodes - wide)
            decode_s += decode_step_s
        return max(prefill_s, decode_s) + mixing * min(prefill_s, decode_s)

    def _predict_columns(self, batch: Any, num_decodes: Any) -> FloatArray:
        *prefill, knee = self._values[:NUM_PREFILL]
        *decode, mixing = self._values[NUM_PREFILL:]
        prefill_s = weighted_sum(prefill, _prefill(batch, knee))
        decode_s = _decode_s(batch, num_decodes, decode)
        total_s: FloatArray = np.maximum(prefill_s, decode_s)
        total_s += mixing * np.minimum(prefill_s, decode_s)
        return total_s

    def _fit(self, batch: Any, num_decodes: Any, times_s: FloatArray) -> Sequence[float]:
        rows = np.column_stack(batch)
        is_prefill, is_decode, is_mixed = kinds_of(rows).values()
        decode = [0.0] * NUM_DECODE
        if is_decode.sum() >= MIN_SAMPLES:
            decodes = columns_of(rows[is_decode]), num_decodes[is_decode]
            decode = _fit_decode(*decodes, times_s[is_decode])
        try:
            require_variety(rows[is_prefill], ("prefill_tokens",), "steps that only prefill")
            decode_columns = ("num_decodes", "decode_tokens")
            require_variety(rows[is_decode], decode_columns, "steps that only decode")
        except ValueError:
            if is_mixed.sum() < MIN_SAMPLES:
                raise
            return *_fit_whole(batch, num_decodes, times_s, decode), 1.0
        apart = _fit_apart(rows, num_decodes, times_s, decode)
        if is_mixed.sum() <= is_prefill.sum():
            return apart
        whole = *_fit_whole(batch, num_decodes, times_s, decode), 1.0

        def mean_error(values: Sequence[float]) -> float:
            named = dict(zip(self.COEFFICIENTS, values, strict=True))
            model = copy.copy(self).with_coefficients(named)
            return float(np.abs(model._predict_columns(batch, num_decodes) / times_s - 1.0).mean())

        return min(apart, whole, key=mean_error)


def _prefill(batch: Any, knee: float) -> tuple[Any, ...]:
    """What the coefficients of a prefill but the knee weigh."""
    tokens = batch.prefill_tokens
    below, beyond = np.minimum(tokens, knee), np.maximum(tokens - knee, 0.0)
    return batch.prefill_area, below, beyond, batch.cached_tokens, batch.num_prefills > 0


def _decode(
    batch: Any, num_decodes: Any, knee: float, longest_binds: Any = None
) -> tuple[Any, ...]:
    """What the coefficients of a decode but knee and overlap weigh.

    `longest_binds`: in which steps, of a device that overlaps both costs of the contexts, the
    longest takes more than all of them; None: both count. Shapes: (steps,) each.
    """
    longest, context = batch.max_decode_tokens, batch.decode_tokens
    if longest_binds is not None:
        longest, context = longest * longest_binds, context * ~longest_binds
    below, beyond = np.minimum(num_decodes, knee), np.maximum(num_decodes - knee, 0.0)
    return longest, context, below, beyond, num_decodes > 0


def _decode_s(batch: Any, num_decodes: Any, values: Sequence[float]) -> Any:
    """Seconds of the decodes in each step. Shapes: (steps,)."""
    *weights, knee, overlap = values
    longest, context, *others = _decode(batch, num_decodes, knee)
    longest_s, context_s = weights[0] * longest, weights[1] * context
    attended_s = np.maximum(longest_s, context_s)
    attended_s += (1.0 - overlap) * np.minimum(longest_s, context_s)
    return weighted_sum((1.0, *weights[2:]), (attended_s, *others))


def _fit_prefill(batch: Any, times_s: FloatArray, others: tuple[Any, ...] = ()) -> list[float]:
    """The coefficients of a prefill, then those of `others`."""
    rest = batch.cached_tokens, batch.num_prefills > 0, *others
    (beyond, below, area, cached, step, *more), knee = fit_with_knee(
        batch.prefill_tokens, KNEES_TOKENS, (batch.prefill_area, *rest), times_s
    )
    return [area, below, beyond, cached, step, knee, *more]


def _fit_decode(batch: Any, num_decodes: FloatArray, times_s: FloatArray) -> list[float]:
    """The coefficients of a decode: both costs of the contexts count, or the larger one does."""
    added = _fit_decode_given((batch, num_decodes, times_s), None)
    part = slice(None, None, -(-len(times_s) // MAX_SEARCH_ROWS))
    few = type(batch)._make(column[part] for column in batch), num_decodes[part], times_s[part]
    found = [_search_overlap(few, width) for width in WIDTHS]
    best = min((added, *found), key=partial(_mean_error, few))
    if _mean_error(few, best) >= OVERLAP_ERROR * _mean_error(few, added):
        return added
    return _fit_decode_given((batch, num_decodes, times_s), _longest_binds(batch, best))


def _fit_decode_given(
    steps: Decodes, longest_binds: Any, knees: Sequence[float] = KNEES_REQUESTS
) -> list[float]:
    """The coefficients of a decode where it is known what binds; see `_decode`."""
    batch, num_decodes, times_s = steps
    longest, context, _, _, has_decodes = _decode(batch, num_decodes, 0.0, longest_binds)
    (beyond, below, *attention, step), knee = fit_with_knee(
        num_decodes, knees, (longest, context, has_decodes), times_s
    )
    return [*attention, below, beyond, step, knee, 0.0 if longest_binds is None else 1.0]


def _search_overlap(steps: Decodes, width: int) -> list[float]:
    """Coefficients with overlap: say what binds in which step, solve, until nothing changes."""
    batch, _, _ = steps
    binds = batch.max_decode_tokens * width > batch.decode_tokens
    for _ in range(MAX_ROUNDS):
        values = _fit_decode_given(steps, binds, SEARCH_KNEES)
        before, binds = binds, _longest_binds(batch, values)
        if np.array_equal(before, binds):
            break
    return values


def _longest_binds(batch: Any, decode: Sequence[float]) -> Any:
    """In which steps the longest context does by these coefficients; None without overlap."""
    longest, context, *_, overlap = decode
    return longest * batch.max_decode_tokens > context * batch.decode_tokens if overlap else None


def _mean_error(steps: Decodes, decode: Sequence[float]) -> float:
    batch, num_decodes, times_s = steps
    return float(np.mean(np.abs(_decode_s(batch, num_decodes, decode) / times_s - 1.0)))


def _fit_apart(
    rows: FloatArray, num_decodes: FloatArray, times_s: FloatArray, decode: Sequence[float]
) -> tuple[float, ...]:
    """Prefills by steps that only prefill, how they mix by mixed ones; `decode` is known."""
    is_prefill, _, is_mixed = kinds_of(rows).values()
    prefill = _fit_prefill(columns_of(rows[is_prefill]), times_s[is_prefill])
    mixed = columns_of(rows[is_mixed])
    *weights, knee = prefill
    prefill_s = weighted_sum(weights, _prefill(mixed, knee))
    decode_s = _decode_s(mixed, num_decodes[is_mixed], decode)
    return *prefill, *decode, _mixing(prefill_s, decode_s, times_s[is_mixed])


def _fit_whole(
    batch: Any, num_decodes: FloatArray, times_s: FloatArray, decode: Sequence[float]
) -> list[float]:
    """The coefficients of both where steps do both at once; knee and overlap are `decode`'s."""
    *_, knee, overlap = decode
    known = _decode(batch, num_decodes, knee, _longest_binds(batch, decode))
    return [*_fit_prefill(batch, times_s, known), knee, overlap]


def _mixing(prefill_s: FloatArray, decode_s: FloatArray, times_s: FloatArray) -> float:
    """The r in [0, 1] of least squared relative error; 1 where no sample tells.

    Shapes: (mixed steps,) each.
    """
    smaller = np.minimum(prefill_s, decode_s) / times_s
    excess = 1.0 - np.maximum(prefill_s, decode_s) / times_s
    square = float(smaller @ smaller)
    return float(np.clip(smaller @ excess / square, 0.0, 1.0)) if square > 0 else 1.0
