"""How many requests, and how many tokens, a batch run keeps in the server at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Window:
    """Bounds the requests in flight, first come first served; shrinks while the server refuses.

    Halving on a refusal and growing by one in `num` answers is TCP's rule: it settles near
    what the server takes, instead of asking it again and again with everything at once.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._limit = float(max_requests)
        self._requests = 0
        self._tokens = 0
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()  # FIFO: small lines must not overtake a large one for ever

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return max(1, int(self._limit))

    @asynccontextmanager
    async def slot(self, tokens: int) -> AsyncIterator[None]:
        """Hold a place for a request of that many tokens; one alone always fits."""
        async with self._turn, self._changed:
            await self._changed.wait_for(lambda: self._fits(tokens))
            self._requests += 1
            self._tokens += tokens
        try:
            yield
        finally:
            self._requests -= 1
            self._tokens -= tokens
            async with self._changed:
                self._changed.notify_all()

    def shrink(self) -> None:
        """The server refused a request: keep half of what is in flight now."""
        self._limit = max(1.0, min(self._limit, self._requests) / 2)

    def grow(self) -> None:
        """The server answered a request."""
        self._limit = min(float(self._max_requests), self._limit + 1 / self._limit)

    def _fits(self, tokens: int) -> bool:
        if self._requests == 0:
            return True
        return self._requests < self.limit and self._tokens + tokens <= self._max_tokens


def backoff_s(
    attempt: int, rng: random.Random, *, base_s: float = 0.25, cap_s: float = 30.0
) -> float:
    """Seconds to wait before attempt number `attempt` (from 0): doubling, jittered, capped."""
    # Beyond 2^16 the cap holds for any base; the bound keeps the power small.
    return min(cap_s, base_s * 2.0 ** min(attempt, 16)) * rng.uniform(0.5, 1.0)
