"""What a calibration knew, for fits to live steps that tell only a part of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from echo_sgl.batch_shape import BatchRow, BatchShape, FloatArray, StepKind, rows_of
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.held_out import Samples
from echo_sgl.estimators.samples import kinds_of

# From 1 to the largest, evenly in the logarithm.
NUM_PREFILLS, NUM_BATCHES, NUM_CONTEXTS = 16, 8, 4
CACHED_SHARES = 0.0, 0.5
MIN_RECENT = 5
LENGTHS = [
    BatchRow._fields.index(name)
    for name in ("cached_tokens", "prefill_tokens", "num_decodes", "max_decode_tokens")
]
CACHED = 0
DECODE_COLUMNS = "num_decodes", "decode_tokens", "max_decode_tokens"
COLUMNS = frozenset({"prefill_tokens", "cached_tokens", "prefill_area", *DECODE_COLUMNS})
"""Of `BatchRow`, what a calibration must tell the highest value of."""
# Of what was seen: a few odd steps do not tell enough.
SEEN_QUANTILES = 0.02, 0.98


class Anchors:
    """Steps over the whole range of a calibration, as its model has them.

    Traffic may be all of short prompts for an hour. A fit to that alone can say anything of a
    chunk of thousands of tokens, which nobody ran yet: terms that grow alike there are told apart
    by nothing. With the anchors beside that lie outside of what was seen, a fit follows live steps
    where they tell, and the calibration where they do not.

    Source: ours; as a prior in Bayesian regression. `largest_step`: the highest value of each
    column of `BatchRow` that was calibrated, of `COLUMNS` at least.
    Shapes: (anchors, columns of `BatchRow`), (anchors,).
    """

    def __init__(self, model: BatchTimeModel, largest_step: Mapping[str, int]) -> None:
        self._model = model
        self._rows = rows_of(_steps(largest_step))
        self._times_s = model.predict_rows_s(self._rows)

    def samples(
        self, seen: FloatArray, recent: Mapping[StepKind, Sequence[tuple[BatchRow, float]]]
    ) -> Samples:
        """Those outside of the steps `seen`, by kind as much longer as the `recent` ones were.

        Shapes: (steps, columns of `BatchRow`) -> (anchors, the same columns), (anchors,).
        """
        ratios = {kind: self._ratio(steps) for kind, steps in recent.items()}
        known = [ratio for ratio in ratios.values() if ratio is not None]
        # What slows one kind of steps slows the others.
        usual = math.exp(sum(map(math.log, known)) / len(known)) if known else 1.0
        times_s, is_told = self._times_s.copy(), self._times_s > 0
        seen_kinds = kinds_of(seen)
        for kind, mask in kinds_of(self._rows).items():
            times_s[mask] *= ratios[kind] or usual
            is_told[mask] &= _is_outside(self._rows[mask], seen[seen_kinds[kind]])
        return self._rows[is_told], times_s[is_told]

    def _ratio(self, steps: Sequence[tuple[BatchRow, float]]) -> float | None:
        """The median of measured / predicted; None while there are few."""
        if len(steps) < MIN_RECENT:
            return None
        predicted_s = self._model.predict_rows_s(rows_of(row for row, _ in steps))
        measured_s = np.array([time_s for _, time_s in steps])
        told = predicted_s > 0
        return float(np.median(measured_s[told] / predicted_s[told])) if told.any() else None


def _is_outside(rows: FloatArray, seen: FloatArray) -> Any:
    """Which of the rows exceed what was seen, or stay below it, in any length."""
    if len(seen) < MIN_RECENT:
        return np.ones(len(rows), dtype=bool)
    low, high = np.quantile(seen[:, LENGTHS], SEEN_QUANTILES, axis=0)
    lengths = rows[:, LENGTHS]
    is_outside = ((lengths < low) | (lengths > high)).any(axis=1)
    # Attention behind a cached prefix is a straight line: who has seen several knows it.
    knows_cached = high[CACHED] > low[CACHED]
    return is_outside & ~(knows_cached & (lengths[:, CACHED] > 0))


def _steps(largest: Mapping[str, int]) -> list[BatchRow]:
    prefills, decodes = _prefills(largest), _decodes(largest)
    # Few: how much longer a step takes for both is one number.
    mixed = [
        prefill._replace(**{name: getattr(decode, name) for name in DECODE_COLUMNS})
        for prefill, decode in zip(
            prefills[:: 2 * len(CACHED_SHARES)], decodes[::-NUM_CONTEXTS], strict=False
        )
    ]
    return [*prefills, *decodes, *mixed]


def _prefills(largest: Mapping[str, int]) -> list[BatchRow]:
    """Steps that prefill one request, whose context is no longer than the longest was."""
    rows = []
    for new in _lengths(largest["prefill_tokens"], NUM_PREFILLS):
        longest = largest.get("max_prefill_tokens", new + largest["cached_tokens"])
        cached = min(largest["cached_tokens"], max(0, longest - new))
        for share in CACHED_SHARES:
            shape = BatchShape()
            shape.add_prefill(new, int(share * cached))
            rows.append(shape.row())
    # Those who had as many cached had fewer new ones.
    return [row for row in rows if row.prefill_area <= largest["prefill_area"]]


def _decodes(largest: Mapping[str, int]) -> list[BatchRow]:
    """Batches of equal contexts, as long as they were with so many requests."""
    return [
        BatchRow(0, 0, 0, 0, num, num * context, context)
        for num in _lengths(largest["num_decodes"], NUM_BATCHES)
        for context in _lengths(
            min(largest["max_decode_tokens"], largest["decode_tokens"] // num), NUM_CONTEXTS
        )
    ]


def _lengths(largest: int, count: int) -> list[int]:
    if largest < 1:
        return []
    values: FloatArray = np.geomspace(1.0, largest, count)
    return sorted({round(value) for value in values})
