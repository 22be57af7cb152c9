"""The time that batches go by: it does not jump while a server runs, and servers agree on it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

Clock = Callable[[], float]  # Unix seconds

MAX_STEP_S = 3600.0
REREAD_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
logger = logging.getLogger(__name__)


def since_boot_s() -> float:
    """Seconds that nobody can set; unlike `time.monotonic` they go on while a machine is asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def steady_clock(record: Path, last_stored_s: float = 0.0) -> Clock:
    """Unix seconds, read from the wall once and then counted.

    Windows are stored in Unix seconds, but an operator or NTP who sets the clock must not expire
    a day's work. `record` is a file that says what the clock was at the last start; until the
    machine is booted again it tells how much time has passed. `last_stored_s` is the latest time
    that an earlier run stored. A wall that goes against them by more than `MAX_STEP_S` was set:
    forward it is not believed, since that would expire what waits; backward it is, since a time
    that was once too late would else hold for ever.
    """
    boot_s = since_boot_s()
    start_s = _start_s(time.time(), _counted_s(record, boot_s), last_stored_s, record)
    with contextlib.suppress(OSError):  # the next start then goes by the wall
        record.write_text(f"{_boot_id()} {boot_s!r} {start_s!r}\n")
    offset_s = start_s - boot_s
    return lambda: offset_s + since_boot_s()


class SharedClock:
    """The clock of a database that servers share, so that they agree whatever their own clocks say.

    `read_s` asks the database, which `keep` has done whenever it is `REREAD_S` ago: a machine that
    is stopped for a while, or whose clock runs fast, goes along again.
    """

    def __init__(self) -> None:
        self._offset_s = 0.0
        self._next_read_s = float("-inf")

    def __call__(self) -> float:
        return self._offset_s + since_boot_s()

    def keep(self, read_s: Callable[[], float]) -> None:
        """Go by the database's Unix seconds again, if it is time to."""
        before_s = since_boot_s()
        if before_s < self._next_read_s:
            return
        found_s = read_s()
        after_s = since_boot_s()
        self._offset_s = found_s - (before_s + after_s) / 2
        self._next_read_s = after_s + REREAD_S


def _start_s(wall_s: float, counted_s: float | None, last_stored_s: float, record: Path) -> float:
    if counted_s is not None and wall_s > counted_s + MAX_STEP_S:
        logger.error(
            "the clock was set forward by %.0f s since the last start; the batch service goes on "
            "from %s. If the clock is right now, remove %s and start again",
            wall_s - counted_s,
            _shown(counted_s),
            record,
        )
        return counted_s
    known_s = max(counted_s or 0.0, last_stored_s)
    if known_s > wall_s + MAX_STEP_S:
        logger.error(
            "the job store has been used until %s, and the clock says %s: it is believed, so "
            "batches and files from before end later by that much",
            _shown(known_s),
            _shown(wall_s),
        )
        return wall_s
    return max(wall_s, last_stored_s)


def _counted_s(record: Path, boot_s: float) -> float | None:
    """What the clock of the last start would show now; None after another boot."""
    try:
        boot_id, then_boot_s, then_s = record.read_text().split()
        passed_s = boot_s - float(then_boot_s)
        return float(then_s) + passed_s if boot_id == _boot_id() and passed_s >= 0 else None
    except (OSError, ValueError):
        return None


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _shown(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))
