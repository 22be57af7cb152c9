"""Prompts in token order: how many run through a prefix, and which of them comes last.

Sorting token arrays puts all prompts that share a prefix side by side, so the set behind a
node of the prefix tree is one range of a sorted list, found by two binary searches.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence

from sortedcontainers import SortedList

from echo_sgl.types import PendingRequest

PrefixKey = tuple[str, Sequence[int], int]
"""Namespace, prompt, sequence number: unique, and sorted as a depth-first walk visits it."""

_BEFORE_ALL = -1


def prefix_key(request: PendingRequest) -> PrefixKey:
    return request.namespace, request.prompt, request.sequence


class PrefixIndex:
    """Requests sorted by prompt. Every operation costs O(log n) comparisons of prompts.

    Prompts and paths must be of one type, which must compare as lists do (list, array).
    """

    def __init__(self) -> None:
        self._keys: SortedList[PrefixKey] = SortedList()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[PrefixKey]:
        return iter(self._keys)

    def add(self, request: PendingRequest) -> None:
        self._keys.add(prefix_key(request))

    def remove(self, request: PendingRequest) -> None:
        """Errors: `ValueError` if the request is not here."""
        self._keys.remove(prefix_key(request))

    def after(self, key: PrefixKey) -> Iterator[PrefixKey]:
        """The keys behind `key`, in order; `key` itself need not be here."""
        keys: Iterator[PrefixKey] = self._keys.irange(key, inclusive=(False, True))
        return keys

    def up_to(self, key: PrefixKey) -> Iterator[PrefixKey]:
        """The keys from the first one to `key`, in order."""
        keys: Iterator[PrefixKey] = self._keys.irange(None, key)
        return keys

    def count_through(self, namespace: str, path: MutableSequence[int]) -> int:
        """How many prompts start with `path` (at least one token)."""
        start, end = self._range(namespace, path)
        return end - start

    def last_and_count(
        self, namespace: str, path: MutableSequence[int]
    ) -> tuple[PrefixKey | None, int]:
        """The last key whose prompt starts with `path`, and how many there are."""
        start, end = self._range(namespace, path)
        return (self._keys[end - 1] if end > start else None), end - start

    def _range(self, namespace: str, path: MutableSequence[int]) -> tuple[int, int]:
        if not self._keys:
            return 0, 0
        behind = path[:]
        behind[-1] += 1
        start = self._keys.bisect_left((namespace, path, _BEFORE_ALL))
        if start == len(self._keys) or self._keys[start] >= (namespace, behind, _BEFORE_ALL):
            return start, start
        return start, self._keys.bisect_left((namespace, behind, _BEFORE_ALL))
