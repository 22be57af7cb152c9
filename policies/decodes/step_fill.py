"""Offline decodes that join a step while its predicted time stays within a limit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from echo_sgl.batch_shape import BatchRow, BatchShape
from echo_sgl.estimators.batch_time import StepPredictor

RESUME_SHARE = 0.9
# A step has enough decodes when twice as many would make less than so many times the tokens/s.
SATURATED_GAIN = 1.05
_CONTEXT_TOKENS = attrgetter("context_tokens")


class Decode(NamedTuple):
    """An offline request that could decode in the next step.

    `context_tokens`: what the next token attends to, itself included. `uncached_tokens`: what
    would be computed again if its KV were lost. `waiting_since_s`: when it was parked, None if
    it runs. `laxity_s`: time left until its job would miss its window, infinite without one.
    `sequence`: its place in the order of start, unique. A tuple, because 64 are made each step.
    """

    rid: str
    context_tokens: int
    uncached_tokens: int
    waiting_since_s: float | None
    laxity_s: float
    is_running: bool
    sequence: int


class StepFill:
    """A step that decodes join one after the other; who did is in `chosen`.

    A set fits when the predicted time is at most the least limit of its members: `limit_s` for
    those that run, `RESUME_SHARE` of it for those that are parked. It works on sums, so a probe
    costs O(1) however many decodes it is about, and the shape it started from stays as it is.
    NaN and negative limits let nobody in: no prediction is at or below them.
    """

    def __init__(
        self, shape: BatchShape, predictor: StepPredictor, limit_s: float, max_decodes: int
    ) -> None:
        self.chosen: list[Decode] = []
        self._row = shape.row()
        self._predictor = predictor
        self._limits_s = {True: limit_s, False: RESUME_SHARE * limit_s}
        self._max_decodes = max_decodes

    @property
    def room(self) -> int:
        """How many more may join by their number."""
        return self._max_decodes - len(self.chosen)

    def is_saturated(self, decodes: Sequence[Decode] = ()) -> bool:
        """Whether hardly more tokens a second came of twice the step with these."""
        row = self._row_of(decodes)
        twice = row._replace(num_decodes=2 * row.num_decodes, decode_tokens=2 * row.decode_tokens)
        once_s, twice_s = self._predictor.predict_s(row), self._predictor.predict_s(twice)
        return row.num_decodes > 0 and 2.0 * once_s <= SATURATED_GAIN * twice_s

    def fits(self, decodes: Sequence[Decode]) -> bool:
        """Whether all of them together could join. One prediction."""
        return self._fits(self._row_of(decodes), decodes)

    def take(self, decodes: Sequence[Decode]) -> bool:
        """Let all of them join, or none when they do not fit together. One prediction."""
        row = self._row_of(decodes)
        if is_within := self._fits(row, decodes):
            self._row = row
            self.chosen += decodes
        return is_within

    def take_prefix(self, decodes: Sequence[Decode]) -> int:
        """Let the longest prefix that fits join; returns how many that are.

        By bisection in O(log n) predictions: a longer prefix takes no less time, and none of its
        members raises the limit.
        """
        contexts = list(map(_CONTEXT_TOKENS, decodes))
        tokens, longest = list(accumulate(contexts)), list(accumulate(contexts, max))
        limits_s = list(accumulate(self._limits_of(decodes), min))
        fitting, beyond, best = 0, min(len(decodes), self.room) + 1, self._row
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            row = self._row_with(middle, tokens[middle - 1], longest[middle - 1])
            if self._predictor.predict_s(row) <= limits_s[middle - 1]:
                fitting, best = middle, row
            else:
                beyond = middle
        self._row = best
        self.chosen += decodes[:fitting]
        return fitting

    def _limits_of(self, decodes: Sequence[Decode]) -> list[float]:
        return [self._limits_s[decode.is_running] for decode in decodes]

    def _fits(self, row: BatchRow, decodes: Sequence[Decode]) -> bool:
        if len(decodes) > self.room:
            return False
        return self._predictor.predict_s(row) <= min(self._limits_of(decodes))

    def _row_of(self, decodes: Sequence[Decode]) -> BatchRow:
        contexts = [decode.context_tokens for decode in decodes]
        return self._row_with(len(decodes), sum(contexts), max(contexts, default=0))

    def _row_with(self, num_decodes: int, decode_tokens: int, longest_tokens: int) -> BatchRow:
        row = self._row
        return BatchRow(
            row.num_prefills,
            row.prefill_tokens,
            row.cached_tokens,
            row.prefill_area,
            row.num_decodes + num_decodes,
            row.decode_tokens + decode_tokens,
            max(row.max_decode_tokens, longest_tokens),
            row.max_prefill_tokens,
        )
