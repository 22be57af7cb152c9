"""When a scheduler learns from the steps that ended."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from echo_sgl.batch_shape import BatchRow

# A model's step leaves nothing of the estimator in the CPU's caches, and to fetch it takes longer
# than to learn from a step: short ones are learned from together. Not many, or the bound that a
# scheduler plans by is older than what it was to cover: after a tenth of a second, 91.7 % of a
# GPU's decodes stay below a bound for 95 %.
LEARN_EVERY_S = 0.02


class Learner(Protocol):
    """What lessons are for: `LiveBatchTime`."""

    def observe(self, step: BatchRow, time_s: float, now_s: float) -> None: ...

    def advance(self, now_s: float) -> None: ...


class Lessons:
    """Passes each step on once and in order, at most every `LEARN_EVERY_S`; times in seconds."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._ahead: list[tuple[BatchRow, float]] = []
        self._learned_s = -math.inf

    def take(self, measured: Iterable[tuple[BatchRow, float]], now_s: float) -> None:
        """Steps have ended since; those whose time could not be measured have 0."""
        self._ahead.extend(measured)
        if now_s - self._learned_s < LEARN_EVERY_S:
            return
        for row, time_s in self._ahead:
            if time_s > 0:
                self._learner.observe(row, time_s, now_s)
        self._ahead.clear()
        self._learner.advance(now_s)
        self._learned_s = now_s
