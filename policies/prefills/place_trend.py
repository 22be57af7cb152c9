"""How many of a server's places online requests come to hold, if they go on as they did."""

from __future__ import annotations

import math


class PlaceTrend:
    """What is taken, and as much more as it is above its mean over the last `window_s`.

        taken   0.2 ───┐            ahead   0.2 ───┐ 0.8 ╲
                       └─ 0.5                            ╲__ 0.5 after some windows

    A burst takes places faster than requests end, and what is taken says so late: offline work that
    yields from then on has lengthened the decodes that hold them already. At a steady load the
    trend is nothing, however many are taken; where fewer are than were, that is what counts.

    The mean is exponential in time. Source: ours, Holt's linear trend over one horizon. Units:
    seconds on the caller's clock, shares of the places. `window_s` 0: there is no trend.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._mean = self._taken = 0.0
        self._since_s: float | None = None

    def ahead(self, now_s: float, taken: float) -> float:
        """The share that comes to be taken; `taken` now, and until the next call."""
        if not self._window_s:
            return taken
        if self._since_s is not None:
            past = -math.expm1(-max(0.0, now_s - self._since_s) / self._window_s)
            self._mean += past * (self._taken - self._mean)
        self._since_s, self._taken = now_s, taken
        return taken + max(0.0, taken - self._mean)
