"""One clock for all ranks: rank 0 reads it, the value rides the broadcast of the step."""

from __future__ import annotations

import time
from dataclasses import dataclass

TICK_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class ClockTick:
    """A message among a step's requests."""

    now_s: float


class StepClock:
    """What time it is in this step, the same on every rank; it never goes back."""

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._last_tick_s = 0.0
        self.now_s = 0.0

    def tick(self) -> list[ClockTick]:
        """On rank 0: what to broadcast now. A single rank needs no message."""
        now_s = time.monotonic()
        if not self._is_shared or now_s - self._last_tick_s < TICK_INTERVAL_S:
            return []
        self._last_tick_s = now_s
        return [ClockTick(now_s)]

    def take_ticks(self, messages: list[object]) -> list[object]:
        """Advance to the ticks among the messages; return the others."""
        if not self._is_shared:
            self.now_s = time.monotonic()
            return messages
        for message in messages:
            if isinstance(message, ClockTick):
                self.now_s = max(self.now_s, message.now_s)
        return [message for message in messages if not isinstance(message, ClockTick)]
