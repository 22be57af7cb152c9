"""Whether a server that refuses a line is full, or refuses this line whatever else it takes."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from echo_sgl.batches.lines.replies import Reply

FIRST_TRIES_PER_LATER_ONE = 8
MAX_OWN_REFUSALS = 1
NUM_REMEMBERED = 64
LASTING_S = 600.0
LEAST_LASTING_REFUSALS = 10
FORGET_S = 300.0
MAX_REASONS = 64
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class Tries:
    """How a line fared so far: `num_own` of its `num_refused` refusals were its own.

    `sent` numbers its last try among those of all lines; what was sent after number `judged` is
    what its next refusal is held against. `pace_before` is how many requests its job had in the
    server at a time, before that shrank for it. `reasons` are those that it was refused for, and
    `sent_s` when it was sent last.
    """

    num_refused: int = 0
    num_own: int = 0
    sent: int = 0
    judged: int = 0
    pace_before: float = 0.0
    sent_s: float = 0.0
    reasons: set[str] = field(default_factory=set)

    @property
    def is_to_blame(self) -> bool:
        """Whether it was refused on its own more often than chance explains."""
        return self.num_own > MAX_OWN_REFUSALS


@dataclass(slots=True)
class _Reason:
    """One for which lines are refused, and none of them was answered since."""

    since_s: float
    last_s: float
    num_refusals: int = 0

    @property
    def is_lasting(self) -> bool:
        is_often = self.num_refusals >= LEAST_LASTING_REFUSALS
        return is_often and self.last_s - self.since_s >= LASTING_S


class LastingReasons:
    """Finds what lines are refused for that does not pass, as far as it was seen.

    A reason is given in words, whatever their numbers. One is lasting after `LASTING_S` in which
    lines were refused for it, and none that was has been answered. It begins anew where none was
    sent for `FORGET_S` after a refusal, as while a batch is paused.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, _Reason] = {}  # the one that was met last stands last

    def meet(self, line: Tries, words: str, now_s: float) -> bool:
        """Note that the line was refused for this; whether that is lasting."""
        words = _NUMBER.sub("#", words)
        line.reasons.add(words)
        reason = self._reasons.pop(words, None)
        if reason is None or line.sent_s - reason.last_s > FORGET_S:
            reason = _Reason(now_s, now_s)
        reason.last_s = now_s
        reason.num_refusals += 1
        self._reasons[words] = reason
        if len(self._reasons) > MAX_REASONS:
            del self._reasons[next(iter(self._reasons))]
        return reason.is_lasting

    def pass_by(self, line: Tries) -> None:
        """The line is answered: what it was refused for has passed."""
        for words in line.reasons:
            self._reasons.pop(words, None)


class RefusalJudge:
    """Says of each refusal whether it is the server's, which is full, or the line's own.

    A full server refuses others as well, and answers them when they come again. So a refusal is
    the line's own if, of the lines that were sent since it was judged and are answered, nearly all
    were at their first try. Those that were sent before say nothing: a server that has filled up,
    or is about to stop, still answers what it has. Nor do others that it refuses each time,
    however many they are. Of 10,000 lines that simulated servers refused at random (up to 7 times
    in 10) or for want of room, a few had one own refusal, and of 600,000 none had two.

    Where too few others are sent to tell, it is the line's own once its reason is lasting, unless
    that says itself that it passes.
    """

    def __init__(self) -> None:
        self._num_sent = 0
        self._answered: deque[Tries] = deque(maxlen=NUM_REMEMBERED)
        self._lasting = LastingReasons()

    def send(self, line: Tries, now_s: float) -> None:
        """The line is sent, for the first time or again."""
        self._num_sent += 1
        line.sent_s = now_s
        line.sent = self._num_sent
        line.judged = line.judged or line.sent

    def answer(self, line: Tries) -> None:
        """The server answered the line."""
        self._answered.append(line)
        self._lasting.pass_by(line)

    def refuse(self, line: Tries, reply: Reply, now_s: float) -> bool:
        """Count a refusal; whether it is the line's own, as all are of one that is to blame."""
        line.num_refused += 1
        if not reply.says_for_now and self._lasting.meet(line, reply.reason, now_s):
            line.num_own = max(line.num_own, MAX_OWN_REFUSALS)
            is_own = True
        else:
            is_taken = line.is_to_blame or self._has_taken_others(line.judged)
            is_own = is_taken and not reply.says_full
        if is_own:
            line.num_own += 1
            line.judged = self._num_sent
        return is_own

    def _has_taken_others(self, since: int) -> bool:
        """Whether it answered others at their first try that were sent after that number."""
        answered = [line for line in self._answered if line.sent > since]
        num_later = sum(line.num_refused > 0 for line in answered)
        return len(answered) - num_later >= FIRST_TRIES_PER_LATER_ONE * (num_later + 1)
