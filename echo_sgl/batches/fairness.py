"""Which of several jobs sends its next line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

URGENT_SHARE = 0.1  # of the window, at most
URGENT_S = 300.0


@dataclass(frozen=True, slots=True)
class JobLoad:
    """What the choice needs to know of a job that has a line to send."""

    number: int
    deadline_s: float
    window_s: float
    lines_left: int
    tokens_in_flight: int


Load = TypeVar("Load", bound=JobLoad)


def choose_job(loads: Iterable[Load], now_s: float, lines_per_s: float | None) -> Load:
    """The least laxity when a window is in danger, else whoever has least in the engine.

    A job's laxity is the time that would be left if it had the engine to itself. Equal shares
    keep a small job from waiting for a large one; ties go to the earlier deadline.
    """
    known = list(loads)
    urgent = [load for load in known if laxity_s(load, now_s, lines_per_s) < _margin_s(load)]
    if urgent:
        return min(urgent, key=lambda load: (laxity_s(load, now_s, lines_per_s), load.number))
    return min(known, key=lambda load: (load.tokens_in_flight, load.deadline_s, load.number))


def laxity_s(load: JobLoad, now_s: float, lines_per_s: float | None) -> float:
    """Seconds to spare before the deadline; without a measured rate, all that are left."""
    needed_s = load.lines_left / lines_per_s if lines_per_s else 0.0
    return load.deadline_s - now_s - needed_s


def _margin_s(load: JobLoad) -> float:
    return min(URGENT_S, URGENT_SHARE * load.window_s)
