"""Events in order of time; at one time by priority, then first come first served."""

from __future__ import annotations

import heapq
import math
from enum import IntEnum
from typing import Any


class Priority(IntEnum):
    """Of events at one time: who arrives as a step ends is there for the next one."""

    ARRIVAL = 0
    STEP = 1


class EventQueue:
    """A heap with the key (time, priority, sequence); time never goes back.

    Units: seconds. Errors: `ValueError` for an event before the last one that was taken.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, Priority, int, Any]] = []
        self._num_pushed = 0
        self.now_s = -math.inf

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_s(self) -> float:
        """When the next event is; infinite without any."""
        return self._heap[0][0] if self._heap else math.inf

    def push(self, at_s: float, priority: Priority, event: Any) -> None:
        if not at_s >= self.now_s:
            raise ValueError(f"event at {at_s} s is before {self.now_s} s, which is now")
        heapq.heappush(self._heap, (at_s, priority, self._num_pushed, event))
        self._num_pushed += 1

    def pop(self) -> tuple[float, Priority, Any]:
        at_s, priority, _, event = heapq.heappop(self._heap)
        self.now_s = at_s
        return at_s, priority, event
