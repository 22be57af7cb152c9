"""Echo's batch-time model: pooled lengths, prefill and decode overlapping in part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from echo_sgl.batch_shape import FloatArray, Step
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.pooled_half import (
    Fit,
    Half,
    HalfSteps,
    fit_half,
    fit_same,
    half_features,
    half_s,
)
from echo_sgl.estimators.samples import MIN_SAMPLES, columns_of, kinds_of, require_variety

# Tokens, and requests, from which on each further one may cost more, or less.
KNEES_TOKENS = (32, 64, 128, 256, 512, 1024)
KNEES_REQUESTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
NUM_PREFILL, NUM_DECODE = 8, 7
# Of a mixed step's time, from which a prefill can be learned.
LEAST_LEFT = 0.3
MORE_ROUNDS = 3
MAX_FEW_ROWS = 3_000
# What profiles of before they were there say of them.
OLDER = {"prefill_max_token": 0.0, "prefill_overlap": 0.0, "decode_overlap": 0.0}
TOO_MUCH = {
    "prefill_overlap": "a longer context would save time",
    "decode_overlap": "a longer context would save time",
    "mixing": "a mixed step would take longer than its prefill and its decode apart",
}


class _Steps(NamedTuple):
    """Steps to fit to. Shapes: (steps, columns of `BatchRow`), (steps,) and (steps,)."""

    rows: FloatArray
    num_decodes: FloatArray
    times_s: FloatArray

    def only(self, chosen: Any) -> _Steps:
        return _Steps(self.rows[chosen], self.num_decodes[chosen], self.times_s[chosen])

    def few(self) -> _Steps:
        """An even part of them."""
        return self.only(slice(None, None, -(-len(self.rows) // MAX_FEW_ROWS)))


class PooledBatchTime(BatchTimeModel):
    """Predict a step's time from the area of its prefills and the pooled lengths of its decodes.

    Prefill: T_p = A_p + b * min(l', k) + b' * max(l' - k, 0) + c, with l' = sum(l). An accelerator
    reads its weights for a few tokens as for one and computes for many: up to the knee k a token
    is cheap.
    Decode: T_d = A_d + e * min(n, m) + e' * max(n - m, 0) + f. Echo's has no term for n. Up to a
    knee m as for prefills: on CPUs the second request costs several times as much as the fourth.
    Attention: a core adds up what contexts cost, A_p = a * sum((p + l)^2 - p^2) + h * sum(p) and
    A_d = g * max(L) + d * n * mean(L). With p = 0, one prefill and b = b' the former is Echo's; few
    tokens behind a long prefix wait for its keys and values to be read: h, where the area says
    nearly nothing. Echo's d * mean(L) falls when a shorter request joins, as if work saved time;
    times the batch size n it is the same at one batch size (in d) and never falls. A GPU attends
    to several contexts at once: a few take as long as the longest of them, g * max(L) or
    w * max(p + l), many as long as all of them do. There the larger of both counts, and 1 - o of
    the smaller; a fit takes o to be 0 or 1.
    Mixed: T = max(T_p, T_d) + r * min(T_p, T_d), 0 <= r <= 1.

    T_p and T_d are fitted to steps that only prefill and only decode, r to mixed steps; r
    is 1 (the whole sum) where none was measured. A server with mixed chunks hardly ever only
    prefills: T_p is fitted to mixed steps, too, if that has the smaller mean error. Where a pure
    kind is too rare, all steps are fitted at once, as such a sum; and where mixed steps outnumber
    those that only prefill, if that has the least.

    Source: Echo eq. 6-8; the knees, the cached prefix, the batch-size terms and what is attended
            to at once are ours.
    Units:  tokens in, seconds out.
    Errors: `fit` needs mixed steps or both pure kinds; it names the column that lacks them.
    """

    NAME = "pooled"
    COEFFICIENTS = (
        "prefill_max_token",
        "prefill_area",
        "prefill_cached",
        "prefill_token",
        "prefill_token_beyond",
        "prefill_step",
        "prefill_knee",
        "prefill_overlap",
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
        for name, why in TOO_MUCH.items():
            if coefficients.get(name, 0.0) > 1:
                raise ValueError(f"coefficients.{name} is {coefficients[name]}; above 1 {why}")
        return super().with_coefficients({**OLDER, **coefficients})

    def _predict(self, step: Step, num_decodes: int) -> float:
        # `half_s` of `_prefills` and `_decodes`, written out: it is asked for often.
        (longest, area, cached, token, beyond, step_s, knee, prefill_overlap,
         longest_decode, context, request, more, decode_step_s, wide, overlap,
         mixing) = self._values  # fmt: skip
        prefill_s = decode_s = 0.0
        if tokens := step.prefill_tokens:
            longest_s = longest * step.max_prefill_tokens
            shared_s = area * step.prefill_area + cached * step.cached_tokens
            prefill_s = max(longest_s, shared_s) + (1.0 - prefill_overlap) * min(
                longest_s, shared_s
            )
            if tokens <= knee:
                prefill_s += token * tokens
            else:
                prefill_s = prefill_s + token * knee + beyond * (tokens - knee)
            prefill_s += step_s
        if num_decodes:
            longest_s = longest_decode * step.max_decode_tokens
            shared_s = context * step.decode_tokens
            decode_s = max(longest_s, shared_s) + (1.0 - overlap) * min(longest_s, shared_s)
            if num_decodes <= wide:
                decode_s += request * num_decodes
            else:
                decode_s = decode_s + request * wide + more * (num_decodes - wide)
            decode_s += decode_step_s
        return max(prefill_s, decode_s) + mixing * min(prefill_s, decode_s)

    def _predict_columns(self, batch: Any, num_decodes: Any) -> FloatArray:
        prefill, decode, mixing = _apart(self._values)
        prefill_s = half_s(_prefills(batch), prefill)
        decode_s = half_s(_decodes(batch, num_decodes), decode)
        total_s: FloatArray = np.maximum(prefill_s, decode_s)
        total_s += mixing * np.minimum(prefill_s, decode_s)
        return total_s

    def _fit(self, batch: Any, num_decodes: Any, times_s: FloatArray) -> Sequence[float]:
        steps = _Steps(np.column_stack(batch), num_decodes, times_s)
        known = _apart(self._values or [0.0] * len(self.COEFFICIENTS))
        is_prefill, is_decode, is_mixed = kinds_of(steps.rows).values()
        decode = [0.0] * NUM_DECODE
        if is_decode.sum() >= MIN_SAMPLES:
            decodes = HalfSteps(_decodes_of(steps.only(is_decode)), times_s[is_decode])
            decode, _ = fit_half(decodes, KNEES_REQUESTS, known[1])
        try:
            require_variety(steps.rows[is_prefill], ("prefill_tokens",), "steps that only prefill")
            decode_columns = ("num_decodes", "decode_tokens")
            require_variety(steps.rows[is_decode], decode_columns, "steps that only decode")
        except ValueError:
            if is_mixed.sum() < MIN_SAMPLES:
                raise
            return _fit_whole(steps, decode, known[0])
        apart = _fit_apart(steps, decode, known[0])
        if is_mixed.sum() < MIN_SAMPLES:
            return apart
        fits = [apart, self._fit_with_mixed(steps, apart)]
        if is_mixed.sum() > is_prefill.sum():
            fits.append(_fit_whole(steps, decode, known[0]))
        return min(fits, key=partial(self._mean_error, steps.few()))

    def _fit_with_mixed(self, steps: _Steps, apart: Sequence[float]) -> tuple[float, ...]:
        """Prefills by mixed steps, too; a refit goes on where the last one stopped."""
        if self._values:
            prefill, _, mixing = _apart(self._values)
            return _fit_more(steps, (*prefill, *_apart(apart)[1], mixing))
        few, more = steps.few(), apart
        for _ in range(MORE_ROUNDS):
            more = _fit_more(few, more, fit_half)
        return _fit_more(steps, more)

    def _mean_error(self, steps: _Steps, values: Sequence[float]) -> float:
        named = dict(zip(self.COEFFICIENTS, values, strict=True))
        predicted_s = copy.copy(self).with_coefficients(named).predict_rows_s(steps.rows)
        return float(np.abs(predicted_s / steps.times_s - 1.0).mean())


def _apart(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float], float]:
    """The coefficients of prefills, of decodes, and how they mix."""
    return values[:NUM_PREFILL], values[NUM_PREFILL:-1], values[-1]


def _prefills(batch: Any) -> Half:
    shared = batch.prefill_area, batch.cached_tokens
    return Half(batch.prefill_tokens, batch.max_prefill_tokens, shared, batch.num_prefills)


def _decodes(batch: Any, num_decodes: Any) -> Half:
    return Half(num_decodes, batch.max_decode_tokens, (batch.decode_tokens,), num_decodes)


def _decodes_of(steps: _Steps) -> Half:
    return _decodes(columns_of(steps.rows), steps.num_decodes)


def _prefill_steps(
    rows: FloatArray, times_s: FloatArray, others: tuple[FloatArray, ...] = ()
) -> HalfSteps:
    """Steps to fit a prefill to, and `others`.

    Steps with one prefill cannot tell its context from its tokens and its prefix: where costs add
    up, those have all of it.
    """
    return HalfSteps(_prefills(columns_of(rows)), times_s, others, adds_longest=False)


def _fit_apart(steps: _Steps, decode: Sequence[float], known: Sequence[float]) -> tuple[float, ...]:
    """Prefills by steps that only prefill, how they mix by mixed ones; `decode` is fitted."""
    is_prefill, _, is_mixed = kinds_of(steps.rows).values()
    alone, mixed = steps.only(is_prefill), steps.only(is_mixed)
    prefill, _ = fit_half(_prefill_steps(alone.rows, alone.times_s), KNEES_TOKENS, known)
    return *prefill, *decode, _mixing(*_halves_s(mixed, prefill, decode), mixed.times_s)


def _fit_more(
    steps: _Steps, values: Sequence[float], fit: Callable[..., Fit] = fit_same
) -> tuple[float, ...]:
    """Prefills by mixed steps, too: by what is left of these without their decodes' part."""
    prefill, decode, mixing = _apart(values)
    is_prefill, _, is_mixed = kinds_of(steps.rows).values()
    alone, mixed = steps.only(is_prefill), steps.only(is_mixed)
    prefill_s, decode_s = _halves_s(mixed, prefill, decode)
    left_s = mixed.times_s - mixing * decode_s
    is_told = (prefill_s > decode_s) & (left_s > LEAST_LEFT * mixed.times_s)
    rows = np.concatenate([alone.rows, mixed.rows[is_told]])
    times_s = np.concatenate([alone.times_s, left_s[is_told]])
    prefill, _ = fit(_prefill_steps(rows, times_s), KNEES_TOKENS, prefill)
    return *prefill, *decode, _mixing(*_halves_s(mixed, prefill, decode), mixed.times_s)


def _fit_whole(steps: _Steps, decode: Sequence[float], known: Sequence[float]) -> tuple[float, ...]:
    """The coefficients of both where steps do both at once; knee and overlap are `decode`'s."""
    features = half_features(_decodes_of(steps), decode)
    prefills = _prefill_steps(steps.rows, steps.times_s, features)
    prefill, weights = fit_half(prefills, KNEES_TOKENS, known)
    return *prefill, *weights, *decode[-2:], 1.0


def _halves_s(steps: _Steps, prefill: Sequence[float], decode: Sequence[float]) -> tuple[Any, Any]:
    """Seconds of the prefills and of the decodes in each step. Shapes: (steps,) each."""
    prefills = _prefills(columns_of(steps.rows))
    return half_s(prefills, prefill), half_s(_decodes_of(steps), decode)


def _mixing(prefill_s: FloatArray, decode_s: FloatArray, times_s: FloatArray) -> float:
    """The r in [0, 1] of least squared relative error; 1 where no sample tells.

    Shapes: (mixed steps,) each.
    """
    smaller = np.minimum(prefill_s, decode_s) / times_s
    excess = 1.0 - np.maximum(prefill_s, decode_s) / times_s
    square = float(smaller @ smaller)
    return float(np.clip(smaller @ excess / square, 0.0, 1.0)) if square > 0 else 1.0
