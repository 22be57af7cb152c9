"""What each step was planned to be and what it became, for traces: a ring buffer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echo_sgl.batch_shape import BatchRow

DEFAULT_CAPACITY = 20_000


@dataclass(slots=True)
class StepNote:
    """One step. Times in seconds on the step clock; `time_s` is None until it was measured.

    `predicted_s` and `upper_s`: what the estimator said when it was planned, see `StepLog`.

    `own_s` is the CPU time that Echo's own code took in the scheduler.
    `limit_s` and `slack_s` are infinite where nothing limited the step. `num_parked` and
    `num_pooled` are how many sit out and wait; the counts after them go on from the start of
    the scheduler, so that two steps tell what happened between them.
    """

    start_s: float
    row: BatchRow
    limit_s: float
    slack_s: float
    num_offline: int
    num_parked: int
    num_pooled: int
    num_evicted_tokens: int
    num_parks: int = 0
    num_resumes: int = 0
    num_retractions: int = 0
    num_prefill_parks: int = 0
    num_given_places: int = 0
    predicted_s: float = math.inf
    upper_s: float = math.inf
    time_s: float | None = None
    own_s: float | None = None

    def as_row(self) -> list[Any]:
        """Values in `COLUMNS`' order; None for what is infinite or unknown, as JSON wants it."""
        own = [getattr(self, name) for name in _OWN]
        return [*self.row, *(None if value == float("inf") else value for value in own)]


_OWN = (
    "start_s",
    "time_s",
    "predicted_s",
    "upper_s",
    "limit_s",
    "slack_s",
    "num_offline",
    "num_parked",
    "num_pooled",
    "num_evicted_tokens",
    "num_parks",
    "num_resumes",
    "num_retractions",
    "num_prefill_parks",
    "num_given_places",
    "own_s",
)
COLUMNS = (*BatchRow._fields, *_OWN)


class StepLog:
    """The last steps, oldest first.

    What they were predicted to take is asked for several at once: what the model ran left nothing
    of the estimator in the CPU's caches. It says the same as when they were planned, if it is
    asked before it learns anything: then `predict` is to be called, and before notes are read.
    """

    def __init__(
        self,
        predict_both_s: Callable[[BatchRow], tuple[float, float]],
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        self._predict_both_s = predict_both_s
        self._notes: deque[StepNote] = deque(maxlen=capacity)
        self._unpredicted: deque[StepNote] = deque(maxlen=capacity)

    def add(self, note: StepNote) -> None:
        self._notes.append(note)
        self._unpredicted.append(note)

    def predict(self) -> None:
        """Note what steps take, and take at most, of those added since the last call."""
        for note in self._unpredicted:
            note.predicted_s, note.upper_s = self._predict_both_s(note.row)
        self._unpredicted.clear()

    def since(self, start_s: float) -> list[StepNote]:
        """Steps that began at `start_s` or later."""
        self.predict()
        found: list[StepNote] = []
        for note in reversed(self._notes):
            if note.start_s < start_s:
                break
            found.append(note)
        return found[::-1]
