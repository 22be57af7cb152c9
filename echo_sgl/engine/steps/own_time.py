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
    nothing are not steps and leave no value. What is done after a step was launched, as for
    requests that ended in the one before, counts for the next step.
    """

    def __init__(self) -> None:
        self.steps_s: deque[float] = deque(maxlen=CAPACITY)
        self._sum_s = self._start_s = 0.0
        self._depth = 0
        self._has_run = False

    def __enter__(self) -> None:
        if not self._depth:
            self._start_s = time.thread_time()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._sum_s += time.thread_time() - self._start_s

    def begin_iteration(self) -> None:
        if not self._has_run:
            self._sum_s = 0.0
        self._has_run = False

    def end_step(self) -> float:
        """Keep the sum as this step's value, and return it."""
        spent_s, self._sum_s, self._has_run = self._sum_s, 0.0, True
        self.steps_s.append(spent_s)
        return spent_s
