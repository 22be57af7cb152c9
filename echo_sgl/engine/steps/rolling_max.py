"""The largest of the recent values, in constant memory."""

from __future__ import annotations


class RollingMax:
    """Over the last `window_s` at least, and twice that at most: two windows take turns."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._start_s: float | None = None
        self._before = self._now = 0.0

    def observe(self, value: float, now_s: float) -> None:
        """Take in a value that is at least 0."""
        self._turn(now_s)
        self._now = max(self._now, value)

    def value(self, now_s: float) -> float:
        """The largest; 0 when there was none lately."""
        self._turn(now_s)
        return max(self._before, self._now)

    def _turn(self, now_s: float) -> None:
        if self._start_s is None:
            self._start_s = now_s
        num_turns = int((now_s - self._start_s) // self._window_s)
        if num_turns > 0:
            self._before, self._now = (self._now if num_turns == 1 else 0.0), 0.0
            self._start_s += num_turns * self._window_s
