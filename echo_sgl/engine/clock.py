"""One clock for all ranks: rank 0 reads it, the value rides the broadcast of the step.

So do the times that steps took: ranks that learned from their own would come to decide
differently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from echo_sgl.batch_shape import BatchRow
from echo_sgl.estimators.lessons import LEARN_EVERY_S

IDLE_INTERVAL_S = 0.05

Measured = list[tuple[BatchRow, float]]


@dataclass(frozen=True, slots=True)
class ClockTick:
    """A message among a step's requests."""

    now_s: float
    measured: Measured


class StepClock:
    """What time it is in this step and which steps ended, the same on every rank.

    It never goes back. `take_measured` hands over the steps that ended on this rank. One rank alone
    is asked for them when they are learned from: to look takes longer than to take several.
    """

    def __init__(self, take_measured: Callable[[], Measured], *, is_shared: bool) -> None:
        self._take_measured, self._is_shared = take_measured, is_shared
        self._has_ticked = False
        self._last_tick_s = 0.0
        self._taken_s = -math.inf
        self.now_s = 0.0

    def tick(self) -> list[ClockTick]:
        """On rank 0: what to broadcast now. A single rank needs no message.

        Nothing ran while there is nothing measured: then a tick now and then is enough.
        """
        if not self._is_shared:
            return []
        self._has_ticked = True
        now_s, measured = time.perf_counter(), self._take_measured()
        if not measured and now_s - self._last_tick_s < IDLE_INTERVAL_S:
            return []
        self._last_tick_s = now_s
        return [ClockTick(now_s, measured)]

    def take_ticks(self, messages: list[object]) -> tuple[list[object], Measured]:
        """Advance to the ticks among the messages; return the others, and the steps that ended."""
        if not self._is_shared:
            self.now_s = time.perf_counter()
            if self.now_s - self._taken_s < LEARN_EVERY_S:
                return messages, []
            self._taken_s = self.now_s
            return messages, self._take_measured()
        if not self._has_ticked:
            self._take_measured()  # nobody else asks for what this rank measured
        measured: Measured = []
        for message in messages:
            if isinstance(message, ClockTick):
                self.now_s = max(self.now_s, message.now_s)
                measured += message.measured
        return [one for one in messages if not isinstance(one, ClockTick)], measured
