"""Which jobs are worked on, and which of them sends its next line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

URGENT_SHARE = 0.1  # of the window, at most
URGENT_S = 300.0


@dataclass(frozen=True, slots=True)
class JobLoad:
    """What the choice needs to know of a job that has a line to send.

    `sent_tokens`: its share so far, see `ShareLevel`.
    """

    number: int
    deadline_s: float
    window_s: float
    lines_left: int
    sent_tokens: int


@dataclass(frozen=True, slots=True)
class Applicant:
    """A job that may be worked on; `is_active` says whether it is now."""

    load: JobLoad
    tenant: str
    is_active: bool


Load = TypeVar("Load", bound=JobLoad)


def choose_job(loads: Iterable[Load], now_s: float, lines_per_s: float | None) -> Load:
    """The least laxity of what is in danger, else whoever had the smallest share so far.

    Equal shares keep a small job from waiting for a large one; ties go to the earlier deadline.
    What cannot be in time any more is not in danger: all others would wait for it in vain.
    """
    known = [(laxity_s(load, now_s, lines_per_s), load) for load in loads]
    urgent = [(spare_s, load.number, load) for spare_s, load in known if _is_urgent(load, spare_s)]
    if urgent:
        return min(urgent, key=lambda item: item[:2])[2]
    equal = (load for _, load in known)
    return min(equal, key=lambda load: (load.sent_tokens, load.deadline_s, load.number))


class ShareLevel:
    """The share, in tokens sent, from which a job starts that comes or comes back.

    It is where those that are here stand: who comes neither catches up on what went before nor
    waits for it. What counts is what was sent, not what is in the engine: a job whose lines fill
    the window one by one would else be first each time that it is empty.

    Source: start-time fair queueing (Goyal, Vin and Cheng, 1996).
    """

    def __init__(self) -> None:
        self._level_tokens = 0

    def among(self, sent_tokens: Iterable[int]) -> int:
        """The least that any of those who have a line to send now may stand at."""
        self._level_tokens = max(self._level_tokens, min(sent_tokens, default=0))
        return self._level_tokens


def choose_active(
    applicants: Iterable[Applicant], max_jobs: int, now_s: float, lines_per_s: float | None
) -> list[Applicant]:
    """The jobs that get one of `max_jobs` places, taken one by one.

    Each tenant gets a place before another one's second; then come jobs in danger, by least
    laxity; then the tenant with fewest places. Within a tenant what is active stays: its next
    lines share prefixes with its last. So whoever has to go is, of the tenant with most places,
    the job with most laxity.
    """
    queues: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    by_number = {one.load.number: one for one in applicants}
    for one in by_number.values():
        spare_s = laxity_s(one.load, now_s, lines_per_s)
        urgency_s = spare_s if _is_urgent(one.load, spare_s) else URGENT_S
        queues[one.tenant].append((urgency_s, not one.is_active, spare_s, one.load.number))
    for queue in queues.values():
        queue.sort(reverse=True)  # the next one of each stands last
    places: Counter[str] = Counter()
    chosen: list[Applicant] = []
    while queues and len(chosen) < max_jobs:
        tenant = min(queues, key=lambda name: _rank(places[name], queues[name][-1]))
        chosen.append(by_number[int(queues[tenant].pop()[-1])])
        places[tenant] += 1
        if not queues[tenant]:
            del queues[tenant]
    return chosen


def _rank(num_places: int, first: tuple[float, ...]) -> tuple[float, ...]:
    """Order of a tenant with so many places, whose next job is `first`."""
    urgency_s, *others = first
    return (num_places > 0, urgency_s, num_places, *others)


def laxity_s(load: JobLoad, now_s: float, lines_per_s: float | None) -> float:
    """Seconds to spare before the deadline, if the job had all servers to itself.

    Without a measured rate, all seconds that are left.
    """
    needed_s = load.lines_left / lines_per_s if lines_per_s else 0.0
    return load.deadline_s - now_s - needed_s


def _is_urgent(load: JobLoad, spare_s: float) -> bool:
    """Whether a window is in danger and can still be kept."""
    return 0 <= spare_s < min(URGENT_S, URGENT_SHARE * load.window_s)
