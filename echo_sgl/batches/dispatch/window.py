"""How many requests, and how many tokens, jobs keep in the server at a time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

MAX_CRASHES = 3


@dataclass(frozen=True, slots=True)
class Weight:
    """What a line puts on the server: tokens, and the requests that the engine makes of it.

    `num_crashes` says how often the server died with it, see `max_together`.
    """

    tokens: int
    num_requests: int = 1
    num_crashes: int = 0


def max_together(num_crashes: int, window: int) -> int:
    """How many lines may be in the server together with one that it died on so often.

    One of all that were in the server may have killed it. From a window of 256, the suspects go
    by 16 and then one by one: after `MAX_CRASHES` only a line that was alone is to blame.
    """
    return (window, max(1, math.isqrt(window)), 1)[min(num_crashes, MAX_CRASHES - 1)]


class Pace:
    """How many requests go to a server at a time that refuses some; without bound before it does.

    Halving on a refusal and growing by one in a window of answers is TCP's rule: it settles near
    what the server takes, instead of asking it again and again with everything at once. As there,
    refusals of what was under way together halve it once.
    """

    def __init__(self) -> None:
        self.limit = math.inf
        self._num_requests = 0
        self._num_taken = self._num_heeded = 0

    def fits(self, num_requests: int) -> bool:
        """Whether a line of so many requests may go now; one alone always may."""
        return self._num_requests == 0 or self._num_requests + num_requests <= self.limit

    def take(self, num_requests: int) -> int:
        """A line of so many requests goes; which one it is, for `shrink`."""
        self._num_requests += num_requests
        self._num_taken += 1
        return self._num_taken

    def give(self, num_requests: int) -> None:
        self._num_requests -= num_requests

    def shrink(self, number: int) -> None:
        """The server refused that line: keep half of what is in flight now.

        Unless others that were in flight with it were refused before.
        """
        if number <= self._num_heeded:
            return
        self._num_heeded = self._num_taken
        self.limit = max(1.0, min(self.limit, self._num_requests) / 2)

    def raise_to(self, limit: float) -> None:
        """It was no sign of a full server that it shrank from there."""
        self.limit = max(self.limit, limit)

    def grow(self, num_requests: int) -> None:
        """The server answered a line of so many requests, which are a window at most."""
        self.limit += min(1.0, num_requests / self.limit)


class SendLimit:
    """Counts what is in flight against its bounds."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.num_lines = 0
        self._num_requests = 0
        self._tokens = 0
        self._crashes: Counter[int] = Counter()  # of the lines in flight

    def fits(self, line: Weight) -> bool:
        """Whether such a line may go now; one alone always may."""
        if self.num_lines == 0:
            return True
        suspicion = max(line.num_crashes, *self._crashes)
        return (
            self.num_lines < max_together(suspicion, self._max_requests)
            and self._num_requests + line.num_requests <= self._max_requests
            and self._tokens + line.tokens <= self._max_tokens
        )

    def take(self, line: Weight) -> None:
        self.num_lines += 1
        self._num_requests += line.num_requests
        self._tokens += line.tokens
        self._crashes[line.num_crashes] += 1

    def give(self, line: Weight) -> None:
        self.num_lines -= 1
        self._num_requests -= line.num_requests
        self._tokens -= line.tokens
        self._crashes[line.num_crashes] -= 1
        if not self._crashes[line.num_crashes]:
            del self._crashes[line.num_crashes]


class Window:
    """A `SendLimit` and a `Pace` that lines wait for, first come first served."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._sends = SendLimit(max_requests, max_tokens)
        self._pace = Pace()
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()  # FIFO: small lines must not overtake a large one for ever

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return int(min(self._max_requests, self._pace.limit))

    @asynccontextmanager
    async def slot(self, line: Weight) -> AsyncIterator[int]:
        """Hold a place for such a line, which is numbered; one alone always fits."""
        async with self._turn, self._changed:
            await self._changed.wait_for(lambda: self._fits(line))
            self._sends.take(line)
            number = self._pace.take(line.num_requests)
        try:
            yield number
        finally:
            self._sends.give(line)
            self._pace.give(line.num_requests)
            async with self._changed:
                self._changed.notify_all()

    def _fits(self, line: Weight) -> bool:
        return self._sends.fits(line) and self._pace.fits(line.num_requests)

    def shrink(self, number: int) -> None:
        """The server refused that line: see `Pace.shrink`."""
        self._pace.shrink(number)

    def grow(self, num_requests: int = 1) -> None:
        """The server answered a line of so many requests."""
        self._pace.grow(num_requests)


def backoff_s(
    attempt: int, rng: random.Random, *, base_s: float = 0.25, cap_s: float = 30.0
) -> float:
    """Seconds to wait before attempt number `attempt` (from 0): doubling, jittered, capped."""
    # Beyond 2^16 the cap holds for any base; the bound keeps the power small.
    return min(cap_s, base_s * 2.0 ** min(attempt, 16)) * rng.uniform(0.5, 1.0)
