"""Cached prefixes that were evicted although offline requests still needed them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

_BUCKET_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Lost:
    namespace: str
    path: Sequence[int]
    start: int

    @property
    def bucket(self) -> tuple[str, tuple[int, ...]]:
        return _bucket(self.namespace, self.path)


class LostPrefixes:
    """What eviction threw away too early, until somebody computes it again.

    The tokens that are then computed twice are the price of the eviction: the punishment P
    of Echo 3.1. Bounded: the oldest entries are forgotten beyond `capacity` of them, or
    `capacity_tokens` in all, and prefixes of fewer than 16 tokens, the length that entries are
    looked up by, are not kept.
    """

    def __init__(self, capacity: int = 1024, capacity_tokens: int = 4_000_000) -> None:
        self._capacity, self._capacity_tokens = capacity, capacity_tokens
        self._num_tokens = 0
        # By identity, the oldest first: all, and those that begin alike, as prompts of a job do.
        self._by_age: OrderedDict[int, _Lost] = OrderedDict()
        self._by_bucket: dict[tuple[str, tuple[int, ...]], dict[int, _Lost]] = {}

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, namespace: str, path: Sequence[int], start: int) -> None:
        """Tokens `start` to the end of `path` were evicted while a request needed them."""
        if len(path) < _BUCKET_TOKENS:
            return
        lost = _Lost(namespace, path[:], start)
        self._by_bucket.setdefault(lost.bucket, {})[id(lost)] = lost
        self._by_age[id(lost)] = lost
        self._num_tokens += len(lost.path)
        while len(self) > self._capacity or self._num_tokens > self._capacity_tokens:
            self._forget(next(iter(self._by_age.values())))

    def charge(self, namespace: str, prompt: MutableSequence[int], num_cached: int) -> int:
        """Tokens of the prompt that are computed again because they were evicted.

        `num_cached` leading tokens are in the cache; the rest of the prompt is computed now,
        so what is charged is forgotten.
        """
        again = [
            lost
            for lost in self._by_bucket.get(_bucket(namespace, prompt), {}).values()
            if len(lost.path) > num_cached and _begins_with(prompt, lost.path)
        ]
        computed: set[int] = set()
        for lost in again:
            computed.update(range(max(lost.start, num_cached), len(lost.path)))
            self._forget(lost)
        return len(computed)

    def clear(self) -> None:
        self._by_bucket.clear()
        self._by_age.clear()
        self._num_tokens = 0

    def _forget(self, lost: _Lost) -> None:
        del self._by_age[id(lost)]
        self._num_tokens -= len(lost.path)
        bucket = lost.bucket
        entries = self._by_bucket[bucket]
        del entries[id(lost)]
        if not entries:
            del self._by_bucket[bucket]


def _begins_with(prompt: MutableSequence[int], path: Sequence[int]) -> bool:
    """The last token first: most paths of a job only begin alike, and a copy costs more."""
    num = len(path)
    return num <= len(prompt) and prompt[num - 1] == path[-1] and prompt[:num] == path


def _bucket(namespace: str, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    return namespace, tuple(tokens[:_BUCKET_TOKENS])
