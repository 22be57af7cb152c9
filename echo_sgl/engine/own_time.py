"""How long Echo's own code takes in each step of the scheduler."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

CAPACITY = 4096


class OwnTime:
    """Adds up what is done inside `with own_time:` between two steps, in seconds of this thread.

    What other processes take of the core meanwhile is not counted: it may hit any code, and says
    how many cores there are, not what ours costs. Iterations of the scheduler's loop that run
    nothing are not steps and leave no value.
    """

    def __init__(self) -> None:
        self.steps_s: deque[float] = deque(maxlen=CAPACITY)
        self._sum_s = self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = time.thread_time()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sum_s += time.thread_time() - self._start_s

    def begin_iteration(self) -> None:
        self._sum_s = 0.0

    def end_step(self) -> float:
        """Keep the sum as this step's value, and return it."""
        self.steps_s.append(self._sum_s)
        return self._sum_s
