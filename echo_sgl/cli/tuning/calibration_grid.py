"""Which steps a calibration measures: waves of requests that the server has room for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DECODE_TOKENS = 16
# Ordinary batches have up to so many requests; larger ones, of short prompts, up to the other.
MOST_TOGETHER, MOST_AT_ONCE = 64, 512
AT_ONCE_PROMPT_TOKENS, AT_ONCE_DECODE_TOKENS = 16, 64


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests sent at once: (cached tokens, new tokens, tokens to generate) of each.

    All their prompts begin with the same `shared_tokens` tokens, which are cached before.
    `is_large`: it may take long, and the next large one longer.
    """

    requests: tuple[tuple[int, int, int], ...]
    shared_tokens: int = 0
    is_large: bool = False

    @property
    def num_tokens(self) -> int:
        """KV that they hold together."""
        return self.shared_tokens + sum(sum(request) for request in self.requests)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a wave may hold.

    `pool_tokens`: half of the pool. `most`: tokens of a prompt, `longest`: of one in ordinary
    waves, `alone`: of one that has the server for itself. `chunk`: tokens of one step's prefills.
    """

    pool_tokens: int
    most: int
    chunk: int
    longest: int
    alone: int
    running: int

    @classmethod
    def of(cls, server: dict[str, Any]) -> Limits:
        """Those of a server, by what `/echo/steps` tells of it."""
        pool_tokens = server["max_total_tokens"] // 2
        context = server["max_context_tokens"] - DECODE_TOKENS - 1
        most = min(context, pool_tokens)
        alone = max(most, min(context, server["max_total_tokens"] * 7 // 8 - DECODE_TOKENS))
        chunk = server["chunked_prefill_tokens"] or most
        running = server["max_running_requests"]
        return cls(pool_tokens, most, chunk, min(4 * chunk, most), alone, running)

    def batch(self, num_requests: int) -> int:
        """Requests that decode at once: so many, or as many as have places and room."""
        most = (self.pool_tokens - 2) // (DECODE_TOKENS + 1)
        return max(1, min(num_requests, self.running, most))


def grid(server: dict[str, Any], rng: random.Random) -> Iterator[Wave]:
    """Waves without end: prefills cold and behind a cached prefix, alone and together, decodes.

    Large ones come between them, once each: batches of more requests and longer prompts, each
    twice as large as the one before, up to what the server takes. A slow server is busy with the
    ordinary ones until the time is over.

    All fit the server's limits, so that no step is shaped by a retraction. The largest batches of
    long contexts fit only because they share a prefix, as a job's requests do.
    """
    limits = Limits.of(server)
    large = _large_waves(limits, rng)
    while True:
        yield from _prefills(limits, rng)
        yield from _decodes(limits, rng)
        yield from itertools.islice(large, 1)


def _large_waves(limits: Limits, rng: random.Random) -> Iterator[Wave]:
    """A batch and a prompt in turn, from just above the ordinary ones to the largest."""
    room = limits.pool_tokens // (AT_ONCE_PROMPT_TOKENS + AT_ONCE_DECODE_TOKENS)
    batches = _doubled(MOST_TOGETHER, min(limits.running, MOST_AT_ONCE, room))
    prompts = _doubled(limits.longest, limits.alone)
    for batch, prompt in itertools.zip_longest(batches, prompts):
        if batch:
            decodes = (rng.randint(DECODE_TOKENS, AT_ONCE_DECODE_TOKENS) for _ in range(batch))
            lengths = ((0, _length(rng, AT_ONCE_PROMPT_TOKENS), one) for one in decodes)
            yield Wave(tuple(lengths), is_large=True)
        if prompt:
            yield Wave(((0, prompt, DECODE_TOKENS),), is_large=True)


def _doubled(size: int, most: int) -> Iterator[int]:
    """Twice the size and so on; the last is `most`."""
    while size < most:
        size = min(2 * size, most)
        yield size


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
