"""Whether a server that refuses a line is full, or refuses this line whatever else it takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

FIRST_TRIES_PER_LATER_ONE = 8
MAX_OWN_REFUSALS = 1
NUM_REMEMBERED = 64


@dataclass(slots=True)
class Tries:
    """How a line fared so far: `num_own` of its `num_refused` refusals were its own.

    `sent` numbers its last try among those of all lines; what was sent after number `judged` is
    what its next refusal is held against. `pace_before` is how many requests its job had in the
    server at a time, before that shrank for it.
    """

    num_refused: int = 0
    num_own: int = 0
    sent: int = 0
    judged: int = 0
    pace_before: float = 0.0

    @property
    def is_to_blame(self) -> bool:
        """Whether it was refused on its own more often than chance explains."""
        return self.num_own > MAX_OWN_REFUSALS


class RefusalJudge:
    """Says of each refusal whether it is the server's, which is full, or the line's own.

    A full server refuses others as well, and answers them when they come again. So a refusal is
    the line's own if, of the lines that were sent since it was judged and are answered, nearly all
    were at their first try. Those that were sent before say nothing: a server that has filled up,
    or is about to stop, still answers what it has. Nor do others that it refuses each time,
    however many they are. Of 10,000 lines that simulated servers refused at random (up to 7 times
    in 10) or for want of room, a few had one own refusal, and of 600,000 none had two.
    """

    def __init__(self) -> None:
        self._num_sent = 0
        self._answered: deque[Tries] = deque(maxlen=NUM_REMEMBERED)

    def send(self, line: Tries) -> None:
        """The line is sent, for the first time or again."""
        self._num_sent += 1
        line.sent = self._num_sent
        line.judged = line.judged or line.sent

    def answer(self, line: Tries) -> None:
        """The server answered the line."""
        self._answered.append(line)

    def refuse(self, line: Tries, *, says_full: bool = False) -> bool:
        """Count a refusal; whether it is the line's own, as all are of one that is to blame."""
        line.num_refused += 1
        is_own = not says_full and (line.is_to_blame or self._has_taken_others(line.judged))
        if is_own:
            line.num_own += 1
            line.judged = self._num_sent
        return is_own

    def _has_taken_others(self, since: int) -> bool:
        """Whether it answered others at their first try that were sent after that number."""
        answered = [line for line in self._answered if line.sent > since]
        num_later = sum(line.num_refused > 0 for line in answered)
        return len(answered) - num_later >= FIRST_TRIES_PER_LATER_ONE * (num_later + 1)
