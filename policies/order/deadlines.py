"""Pending offline work by the end of its job's window, and the rate at which work gets done.

The rule for work that is overdue: it must not push out work that can still be in time. It comes
behind every deadline that needs the capacity now, and before what is not urgent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from sortedcontainers import SortedDict

from echo_sgl.policies.order.answer_lengths import AnswerLengths, ExpectedAnswers
from echo_sgl.policies.prefix_index import PrefixIndex, PrefixKey
from echo_sgl.types import PendingRequest

# Windows are of minutes: what ended is taken in so often at most, and what runs, where all that do
# have to be looked at, less often.
ADVANCE_EVERY_S, LOOK_EVERY_S = 0.1, 1.0


def has_deadline(request: PendingRequest) -> bool:
    """Whether its job ends at a time; never, and what is no time, count as none."""
    return request.deadline_s is not None and math.isfinite(request.deadline_s)


@dataclass(slots=True)
class _Group:
    """The pending requests that share a deadline; none of them has started."""

    by_prefix: PrefixIndex = field(default_factory=PrefixIndex)
    sequences: set[int] = field(default_factory=set)
    prompt_tokens: int = 0
    answers: ExpectedAnswers = field(default_factory=ExpectedAnswers)

    def add(self, request: PendingRequest) -> None:
        self.sequences.add(request.sequence)
        self.by_prefix.add(request)
        self.prompt_tokens += request.work.prompt_tokens
        self.answers.add(request.work.max_output_tokens)

    def remove(self, request: PendingRequest) -> None:
        """Errors: `KeyError` if it is not here."""
        self.sequences.remove(request.sequence)
        self.by_prefix.remove(request)
        self.prompt_tokens -= request.work.prompt_tokens
        self.answers.remove(request.work.max_output_tokens)


class DeadlineBook:
    """Pending requests that have a deadline, one group for each deadline, in prefix order; and
    how much those have left that run, or ran and wait to go on, which they do before all others.

    A deadline is that of a job, so there are few: adding and removing cost O(log n) in the
    requests, and what looks at the deadlines costs O(deadlines). What is left of a request goes by
    how long answers are on average when it is asked for, not when the request came.

    Source: ours; least laxity first is Mok's rule (1983). Units: seconds, tokens.
    """

    def __init__(self) -> None:
        self._groups: SortedDict[float, _Group] = SortedDict()
        self._running: dict[float, int] = {}
        # By deadline and sequence.
        self._resumed: dict[float, dict[int, PendingRequest]] = {}
        self.answer_lengths = AnswerLengths()

    def __len__(self) -> int:
        return sum(len(group.sequences) for group in self._groups.values())

    @property
    def is_empty(self) -> bool:
        return not (self._groups or self._running or self._resumed)

    def set_running(self, work_tokens: Mapping[float, int]) -> None:
        """Take in what requests that run have left to do, by their deadlines."""
        self._running = dict(work_tokens)

    def add(self, request: PendingRequest) -> None:
        """Note a request; one without a deadline is not for this book.

        Errors: `ValueError` when it is here already, or its deadline is none.
        """
        deadline_s = request.deadline_s
        if not has_deadline(request):
            raise ValueError(f"deadline_s of {request.rid!r} is {deadline_s}; it must be a time")
        if deadline_s not in self._groups:
            self._groups[deadline_s] = _Group()
        group = self._groups[deadline_s]
        if request.sequence in group.sequences:
            raise ValueError(f"request {request.rid!r} is in the book already")
        group.add(request)

    def remove(self, request: PendingRequest) -> None:
        """Forget a request. Errors: `KeyError` if it is not here."""
        group = self._groups[request.deadline_s]
        group.remove(request)
        if not group.sequences:
            del self._groups[request.deadline_s]

    def note_started(self, request: PendingRequest) -> None:
        """One that waited runs now; `set_running` will tell how much it has left."""
        if (deadline_s := request.deadline_s) is not None and has_deadline(request):
            self._running[deadline_s] = self._running.get(deadline_s, 0) + self._left(request)

    def note_resumed(self, request: PendingRequest) -> None:
        """One that had started waits again. Errors: `ValueError` when its deadline is none."""
        if (deadline_s := request.deadline_s) is None or not has_deadline(request):
            raise ValueError(f"deadline_s of {request.rid!r} is {deadline_s}; it must be a time")
        self._resumed.setdefault(deadline_s, {})[request.sequence] = request
        running_tokens = self._running.pop(deadline_s, 0) - self._left(request)
        if running_tokens > 0:
            self._running[deadline_s] = running_tokens

    def forget_resumed(self, request: PendingRequest) -> None:
        """It goes on, or has ended. Errors: `KeyError` if it was not noted."""
        assert request.deadline_s is not None
        resumed = self._resumed[request.deadline_s]
        del resumed[request.sequence]
        if not resumed:
            del self._resumed[request.deadline_s]

    def overdue(self, now_s: float) -> list[float]:
        """The deadlines that have passed, the earliest first."""
        return list(self._groups.irange(None, now_s))

    def work_until(self, deadline_s: float, now_s: float) -> int:
        """Tokens of work due by `deadline_s`; overdue work, which yields, not counted."""
        return sum(work for _, work in self._due(now_s, deadline_s))

    def urgent_deadline(
        self, now_s: float, rate_tokens_per_s: float | None, safety: float = 1.0
    ) -> float | None:
        """The earliest deadline that would be missed, or None.

        It would be when the work due until then, at the measured rate and times `safety`, takes
        longer than the time left. None while there is no rate: then nothing can be told.
        """
        if rate_tokens_per_s is None:
            return None
        work_tokens = 0
        for deadline_s, more_tokens in self._due(now_s):
            work_tokens += more_tokens
            if work_tokens * safety > rate_tokens_per_s * (deadline_s - now_s):
                return float(deadline_s)
        return None

    def _due(self, now_s: float, until_s: float = math.inf) -> Iterator[tuple[float, int]]:
        """Deadlines to come, the earliest first, with the work that waits or runs."""
        pending = self._groups.irange(now_s, until_s, inclusive=(False, True))
        started = self._running.keys() | self._resumed.keys()
        others = (one for one in started if now_s < one <= until_s and one not in self._groups)
        answer_tokens = self.answer_lengths.expected_tokens
        for deadline_s in sorted(chain(pending, others)):
            work_tokens = self._running.get(deadline_s, 0)
            if (group := self._groups.get(deadline_s)) is not None:
                work_tokens += group.prompt_tokens + group.answers.total(answer_tokens)
            if (resumed := self._resumed.get(deadline_s)) is not None:
                work_tokens += sum(one.work.left_tokens(answer_tokens) for one in resumed.values())
            yield float(deadline_s), work_tokens

    def _left(self, request: PendingRequest) -> int:
        return request.work.left_tokens(self.answer_lengths.expected_tokens)

    def laxity_s(
        self, deadline_s: float | None, now_s: float, rate_tokens_per_s: float | None
    ) -> float:
        """Time left until `deadline_s` less what the work due by then takes at the rate.

        Infinite without a deadline or a rate, and when the deadline has passed: such work has
        nothing to lose any more, see the rule above. Below 0 the deadline would be missed.
        """
        if deadline_s is None or rate_tokens_per_s is None or deadline_s <= now_s:
            return math.inf
        if not (work_tokens := self.work_until(deadline_s, now_s)):
            return deadline_s - now_s
        if rate_tokens_per_s <= 0:
            return -math.inf
        return deadline_s - now_s - work_tokens / rate_tokens_per_s

    def walk(self, deadline_s: float, cursor: PrefixKey | None) -> Iterator[PendingRequest]:
        """The requests of one deadline, depth first from behind `cursor`, then from the start.

        Lazy: the first k cost O(k + log n). Empty when nothing is due then.
        """
        group: _Group | None = self._groups.get(deadline_s)
        return group.by_prefix.around(cursor) if group is not None else iter(())

    def count_through(self, deadline_s: float, namespace: str, path: Sequence[int]) -> int:
        """How many prompts due at `deadline_s` start with `path`, see `PrefixIndex`."""
        group: _Group | None = self._groups.get(deadline_s)
        return group.by_prefix.count_through(namespace, path) if group else 0


class InWork(NamedTuple):
    """A request that holds KV: its tokens now, those of them that were counted before, what it is
    expected to have in the end, and when its job's window ends; infinite without one.
    """

    num_tokens: int
    num_counted: int
    num_expected: int
    deadline_s: float


def progress(requests: Iterable[InWork]) -> tuple[int, dict[float, int]]:
    """Tokens done since they were counted, and what is left, by deadline.

    What is computed a second time was counted before. One longer than expected ends any moment.
    """
    num_done, left = 0, dict[float, int]()
    for one in requests:
        num_done += max(0, one.num_tokens - one.num_counted)
        if math.isfinite(one.deadline_s):
            num_left = max(1, one.num_expected - one.num_tokens)
            left[one.deadline_s] = left.get(one.deadline_s, 0) + num_left
    return num_done, left


class RateMeter:
    """Offline tokens per second, weighted towards the last `window_s` of work.

    Tell it after each step while offline work runs or waits, with 0 tokens where online work
    left nothing: that is part of the rate. Call `pause` when there is no offline work; such
    time does not count, nor does a stretch longer than `window_s` or a clock that steps back.

    Both the tokens and the seconds fade by exp(-dt / `window_s`), so that the rate lies between
    the lowest and the highest that was observed. Units: seconds, tokens per second.
    Errors: `ValueError` unless 0 < `least_s` < `window_s`: more than fades is never seen.
    """

    def __init__(self, *, window_s: float = 60.0, least_s: float = 5.0) -> None:
        if not 0 < least_s < window_s:
            raise ValueError(
                f"least_s is {least_s} and window_s {window_s}; allowed is 0 < least_s < window_s"
            )
        self._window_s, self._least_s = window_s, least_s
        self._last_s: float | None = None
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None until `least_s` of work was seen."""
        return self._tokens / self._seconds if self._seconds >= self._least_s else None

    def observe(self, now_s: float, num_tokens: int) -> None:
        """Note the offline tokens computed since the last observation."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or not 0 <= now_s - last_s <= self._window_s:
            return
        kept = math.exp((last_s - now_s) / self._window_s)
        self._tokens = self._tokens * kept + num_tokens
        self._seconds = self._seconds * kept + now_s - last_s

    def pause(self) -> None:
        """There is no offline work: what passes until the next observation does not count."""
        self._last_s = None
