"""How many requests, and how many tokens, a job keeps in the server at a time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_CRASHES = 3


def max_together(num_crashes: int, window: int) -> int:
    """How many requests may be in the server together with one that it died on so often.

    One of all that were in the server may have killed it. From a window of 256, the suspects go
    by 16 and then one by one: after `MAX_CRASHES` only a request that was alone is to blame.
    """
    return (window, max(1, math.isqrt(window)), 1)[min(num_crashes, MAX_CRASHES - 1)]


class SendLimit:
    """Counts what is in flight against its bounds; shrinks while the server refuses.

    Halving on a refusal and growing by one in `num` answers is TCP's rule: it settles near
    what the server takes, instead of asking it again and again with everything at once.
    `num_crashes` of a request says how often the server died with it, see `max_together`.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._limit = float(max_requests)
        self.num_requests = 0
        self._tokens = 0
        self._crashes: Counter[int] = Counter()  # of the requests in flight

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return max(1, int(self._limit))

    def fits(self, tokens: int, num_crashes: int = 0) -> bool:
        """Whether a request of that many tokens may go now; one alone always may."""
        if self.num_requests == 0:
            return True
        suspicion = max(num_crashes, *self._crashes)
        limit = min(self.limit, max_together(suspicion, self._max_requests))
        return self.num_requests < limit and self._tokens + tokens <= self._max_tokens

    def take(self, tokens: int, num_crashes: int = 0) -> None:
        self.num_requests += 1
        self._tokens += tokens
        self._crashes[num_crashes] += 1

    def give(self, tokens: int, num_crashes: int = 0) -> None:
        self.num_requests -= 1
        self._tokens -= tokens
        self._crashes[num_crashes] -= 1
        if not self._crashes[num_crashes]:
            del self._crashes[num_crashes]

    def shrink(self) -> None:
        """The server refused a request: keep half of what is in flight now."""
        self._limit = max(1.0, min(self._limit, self.num_requests) / 2)

    def grow(self) -> None:
        """The server answered a request."""
        self._limit = min(float(self._max_requests), self._limit + 1 / self._limit)


class Window:
    """A `SendLimit` that requests wait for, first come first served."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._sends = SendLimit(max_requests, max_tokens)
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()  # FIFO: small lines must not overtake a large one for ever

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return self._sends.limit

    @asynccontextmanager
    async def slot(self, tokens: int, num_crashes: int = 0) -> AsyncIterator[None]:
        """Hold a place for a request of that many tokens; one alone always fits."""
        async with self._turn, self._changed:
            await self._changed.wait_for(lambda: self._sends.fits(tokens, num_crashes))
            self._sends.take(tokens, num_crashes)
        try:
            yield
        finally:
            self._sends.give(tokens, num_crashes)
            async with self._changed:
                self._changed.notify_all()

    def shrink(self) -> None:
        """The server refused a request: keep half of what is in flight now."""
        self._sends.shrink()

    def grow(self) -> None:
        """The server answered a request."""
        self._sends.grow()


def backoff_s(
    attempt: int, rng: random.Random, *, base_s: float = 0.25, cap_s: float = 30.0
) -> float:
    """Seconds to wait before attempt number `attempt` (from 0): doubling, jittered, capped."""
    # Beyond 2^16 the cap holds for any base; the bound keeps the power small.
    return min(cap_s, base_s * 2.0 ** min(attempt, 16)) * rng.uniform(0.5, 1.0)
