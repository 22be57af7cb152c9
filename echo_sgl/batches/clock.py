"""The time that batches go by: wall-clock time that does not jump while the server runs."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]  # Unix seconds


def steady_clock(not_before_s: float = 0.0) -> Clock:
    """Unix seconds, read from the wall once and then from the monotonic clock.

    Windows are stored in Unix seconds, but an operator or NTP who sets the clock must not expire
    a day's work. `not_before_s` is the last time that an earlier run stored.
    """
    start_s = max(time.time(), not_before_s) - time.monotonic()
    return lambda: start_s + time.monotonic()
