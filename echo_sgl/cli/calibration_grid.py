"""Which steps a calibration measures: waves of requests that the server has room for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DECODE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests sent at once: (cached tokens, new tokens, tokens to generate) of each.

    All their prompts begin with the same `shared_tokens` tokens, which are cached before.
    """

    requests: tuple[tuple[int, int, int], ...]
    shared_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """KV that they hold together."""
        return self.shared_tokens + sum(sum(request) for request in self.requests)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a wave may hold. `most`: tokens of one prompt, `longest`: of one of ordinary waves.

    `pool_tokens`: half of the pool. `chunk`: tokens of one step's prefills.
    """

    pool_tokens: int
    most: int
    chunk: int
    longest: int
    running: int

    @classmethod
    def of(cls, server: dict[str, Any]) -> Limits:
        """Those of a server, by what `/echo/steps` tells of it."""
        pool_tokens = server["max_total_tokens"] // 2
        most = min(server["max_context_tokens"] - DECODE_TOKENS - 1, pool_tokens)
        chunk = server["chunked_prefill_tokens"] or most
        running = server["max_running_requests"]
        return cls(pool_tokens, most, chunk, min(4 * chunk, most), running)

    def batch(self, num_requests: int) -> int:
        """Requests that decode at once: so many, or as many as have places and room."""
        most = (self.pool_tokens - 2) // (DECODE_TOKENS + 1)
        return max(1, min(num_requests, self.running, most))


def grid(server: dict[str, Any], rng: random.Random) -> Iterator[Wave]:
    """Waves without end: prefills cold and behind a cached prefix, alone and together, decodes.

    All fit the server's limits, so that no step is shaped by a retraction. The largest batches of
    long contexts fit only because they share a prefix, as a job's requests do.
    """
    limits = Limits.of(server)
    while True:
        yield from _prefills(limits, rng)
        yield from _decodes(limits, rng)


def _prefills(limits: Limits, rng: random.Random) -> Iterator[Wave]:
    yield Wave(((0, _length(rng, limits.longest), 1),))
    cached = _length(rng, limits.longest)
    yield Wave(((cached, _length(rng, max(1, limits.longest - cached)), 1),))
    together = rng.randint(2, 8)
    room = min(limits.chunk, limits.pool_tokens)
    each = max(1, min(limits.most, room // together + 1))
    yield Wave(tuple((0, _length(rng, each), 1) for _ in range(together)))


def _decodes(limits: Limits, rng: random.Random) -> Iterator[Wave]:
    batch = limits.batch(2 ** rng.randint(0, 6))
    context = max(1, min(limits.longest, limits.pool_tokens // batch - DECODE_TOKENS))
    yield Wave(
        tuple((0, _length(rng, context), rng.randint(2, DECODE_TOKENS)) for _ in range(batch))
    )
    batch = limits.batch(2 ** rng.randint(1, 6))
    room = limits.pool_tokens - batch * (DECODE_TOKENS + 1)
    shared = rng.randint(1, max(1, min(limits.longest, room) - 1))
    own = min(limits.longest - shared, (limits.pool_tokens - shared) // batch - DECODE_TOKENS)
    requests = ((0, _length(rng, max(1, own)), DECODE_TOKENS) for _ in range(batch))
    yield Wave(tuple(requests), shared_tokens=shared)


def _length(rng: random.Random, longest: int) -> int:
    """Short lengths as often as long ones: uniform in the logarithm."""
    return max(1, min(longest, int(longest ** rng.random())))
