"""Which evictable leaf of the prefix tree goes first.

A leaf's place follows from `LeafFacts` alone. An order keeps the leaves sorted, so putting,
dropping and finding the victim cost O(log n) however many leaves there are, but for the sweep
that a heap makes each time its size in entries has gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any

from sortedcontainers import SortedList

from echo_sgl.policies.prefix_index import PrefixKey
from echo_sgl.types import Task

Cursor = Callable[[], PrefixKey | None]
"""Where the walk over the offline prompts stands, see `OfflineOrder.cursor`."""

# A heap this short is not worth sweeping.
_FEW = 64


@dataclass(frozen=True, slots=True)
class LeafFacts:
    """What decides a leaf's place.

    `last_access` grows with every use and is the same on all ranks. `task`: class of the
    last user. `is_protected`: in the online working set. `num_pending`: Echo's RC, the
    offline requests (waiting, parked or running) whose prompt runs through the leaf.
    `walk_key` and `is_next`: when the first of them comes, see `PrefixNeed`.
    """

    leaf: int
    last_access: float
    task: Task = Task.ONLINE
    is_protected: bool = False
    num_pending: int = 0
    walk_key: PrefixKey | None = None
    is_next: bool = False


class Worth(IntEnum):
    """Why a leaf is worth keeping, the least worth first."""

    DONE_OFFLINE = 0
    DONE_ONLINE = 1
    PENDING = 2
    PROTECTED = 3


def worth_of(facts: LeafFacts) -> Worth:
    """Echo's three classes (4.2), and the protected online working set above them."""
    if facts.is_protected:
        return Worth.PROTECTED
    if facts.num_pending:
        return Worth.PENDING
    return Worth.DONE_ONLINE if facts.task is Task.ONLINE else Worth.DONE_OFFLINE


def lru_key(facts: LeafFacts) -> tuple[float, ...]:
    """Least recently used first; an online leaf in use lately goes after all others."""
    return (facts.is_protected, facts.last_access)


def echo_key(facts: LeafFacts) -> tuple[float, ...]:
    """Finished offline, finished online, then pending by reference count; ties by recency.

    Source: Echo 4.2 (priorities 0, 0.5 and RC).
    """
    return (worth_of(facts), facts.num_pending, facts.last_access)


class EvictionOrder(ABC):
    """Evictable leaves, the next victim first.

    `needs_pending` tells whether the order looks at the offline requests at all.
    """

    needs_pending = True

    @abstractmethod
    def put(self, facts: LeafFacts) -> None:
        """Add a leaf, or move it to the place that its new facts give."""

    @abstractmethod
    def drop(self, leaf: int) -> None:
        """Forget a leaf, if it is here."""

    @abstractmethod
    def victims(self) -> Iterator[int]:
        """The leaves, next victim first; do not mutate while iterating."""

    @abstractmethod
    def __len__(self) -> int: ...


class KeyedOrder(EvictionOrder):
    """Leaves by a pure key, smallest first.

    A heap: what was moved or dropped stays in it until it comes up, or until it is half of all.
    """

    def __init__(self, key: Callable[[LeafFacts], tuple[Any, ...]]) -> None:
        self._key = key
        self._heap: list[tuple[Any, ...]] = []
        self._entries: dict[int, tuple[Any, ...]] = {}

    def put(self, facts: LeafFacts) -> None:
        entry = self._entries[facts.leaf] = (*self._key(facts), facts.leaf)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _FEW:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def drop(self, leaf: int) -> None:
        self._entries.pop(leaf, None)

    def victims(self) -> Iterator[int]:
        heap, entries = self._heap, self._entries
        while heap and entries.get(heap[0][-1]) is not heap[0]:
            heappop(heap)
        # Nothing in a heap is smaller than its parent: what comes next is below what came.
        below = [(heap[0], 0)] if heap else []
        while below:
            entry, place = heappop(below)
            if entries.get(entry[-1]) is entry:
                yield entry[-1]
            children = range(2 * place + 1, min(2 * place + 3, len(heap)))
            for child in children:
                heappush(below, (heap[child], child))

    def __len__(self) -> int:
        return len(self._entries)


class LruOrder(KeyedOrder):
    """Recency alone, beside the online share's protection."""

    needs_pending = False

    def __init__(self) -> None:
        super().__init__(lru_key)


class EchoOrder(KeyedOrder):
    """Echo's task-aware priority eviction."""

    def __init__(self) -> None:
        super().__init__(echo_key)


class WalkOrder(EvictionOrder):
    """Leaves that the prefix walk comes to, the last one first: all facts have a `walk_key`."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._sorted: SortedList[tuple[Any, ...]] = SortedList()
        self._entries: dict[int, tuple[Any, ...]] = {}

    def put(self, facts: LeafFacts) -> None:
        self.drop(facts.leaf)
        assert facts.walk_key is not None, f"no walk comes to leaf {facts.leaf}"
        entry = self._entries[facts.leaf] = (*facts.walk_key, facts.leaf)
        self._sorted.add(entry)

    def drop(self, leaf: int) -> None:
        if (entry := self._entries.pop(leaf, None)) is not None:
            self._sorted.remove(entry)

    def victims(self) -> Iterator[int]:
        """Backwards from the cursor to the start, then from the end to the cursor."""
        entries, cursor = self._sorted, self._cursor()
        if cursor is None:
            return (entry[-1] for entry in reversed(entries))
        passed = entries.irange(maximum=cursor, reverse=True)
        ahead = entries.irange(minimum=cursor, reverse=True)
        return (entry[-1] for entry in chain(passed, ahead))

    def __len__(self) -> int:
        return len(self._entries)


class NextUseOrder(EvictionOrder):
    """What nobody waits for by `echo_key`; the rest farthest next use first.

    The prefix walk visits the waiting prompts in token order and wraps around, so the leaf
    just behind its cursor is used last of all, and the one just before it next. No leaf's
    path runs through another leaf, so any pending prompt tells a leaf's place among them;
    the last one tells whether the walk still comes through. Leaves of requests that will be
    resumed are needed before all others; a request that runs has locked what it uses.

    Source: Belady (1966) on the order that HyGen's PSM (4.3) makes known.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._idle, self._soon = KeyedOrder(echo_key), KeyedOrder(echo_key)
        self._on_walk = WalkOrder(cursor)
        self._homes: dict[int, EvictionOrder] = {}

    def put(self, facts: LeafFacts) -> None:
        self.drop(facts.leaf)
        home: EvictionOrder = self._on_walk
        if facts.is_protected or facts.is_next:
            home = self._soon
        elif facts.walk_key is None:
            home = self._idle
        home.put(facts)
        self._homes[facts.leaf] = home

    def drop(self, leaf: int) -> None:
        if (home := self._homes.pop(leaf, None)) is not None:
            home.drop(leaf)

    def victims(self) -> Iterator[int]:
        yield from self._idle.victims()
        yield from self._on_walk.victims()
        yield from self._soon.victims()

    def __len__(self) -> int:
        return len(self._homes)


def create_eviction_order(name: str, *, cursor: Cursor) -> EvictionOrder:
    """Build an order by its config name. Errors: `ValueError` names the known ones."""
    if name == "lru":
        return LruOrder()
    if name == "echo":
        return EchoOrder()
    if name == "next-use":
        return NextUseOrder(cursor)
    raise ValueError(f"cache order is {name!r}; known are lru, echo, next-use")
