"""In which order pending offline requests are taken.

`OfflineOrder` owns the accounting; a subclass adds only its order. Nothing here reads a
clock or draws at random: the same adds and removals give the same order on every rank.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sortedcontainers import SortedDict

from echo_sgl.policies.prefix_index import PrefixIndex, PrefixKey, prefix_key
from echo_sgl.types import PendingRequest


@dataclass(frozen=True, slots=True)
class PrefixNeed:
    """Which pending requests want a cached prefix.

    `num_pending`: Echo's reference count, of those that wait and those that were taken and have
    not ended. `walk_key` is the last of them on the prefix walk: compared with the walk's cursor it
    tells when the prefix is used next. `is_next`: one of them is resumed before all others.
    """

    num_pending: int
    walk_key: PrefixKey | None
    is_next: bool


class Walk:
    """Where a walk over prompts in prefix order stands: behind what was taken without a gap.

    What is listed may be taken in another order; who was passed over is listed first again.
    It remembers whom it came across ahead, at least `NUM_AHEAD` at a time, until `forget`: another
    one came, or it goes elsewhere. Who was taken or ended stays among them: so when they are more
    than `MOST_AHEAD`, because the first of them is passed over for long, it looks anew, too.
    """

    NUM_AHEAD, MOST_AHEAD = 16, 256

    def __init__(self) -> None:
        self.cursor: PrefixKey | None = None
        self._ahead: deque[PendingRequest] = deque()

    def listing(self, requests: Callable[[], Iterator[PendingRequest]]) -> Iterator[PendingRequest]:
        """Those ahead, in order; `requests` walks over all that wait, from the cursor on."""
        if len(self._ahead) > self.MOST_AHEAD:
            self.forget()
        number = 0
        while number < len(self._ahead) or self._look_ahead(requests()):
            yield self._ahead[number]
            number += 1

    def forget(self) -> None:
        """The next listing looks anew who is ahead."""
        self._ahead.clear()

    def advance(self, is_waiting: Callable[[PendingRequest], bool]) -> None:
        """Something was taken: go on to the first that still waits."""
        while self._ahead and not is_waiting(self._ahead[0]):
            self.cursor = prefix_key(self._ahead.popleft())

    def _look_ahead(self, requests: Iterator[PendingRequest]) -> bool:
        """Whether there are more than those that were remembered; some are now."""
        num_known, known = len(self._ahead), {request.sequence for request in self._ahead}
        others = (request for request in requests if request.sequence not in known)
        # Twice as many each time: a listing of all walks past each of them a few times.
        self._ahead.extend(itertools.islice(others, max(self.NUM_AHEAD, num_known)))
        return len(self._ahead) > num_known


class OfflineOrder(ABC):
    """Pending offline requests and which of them come next.

    Requests that had started and came back (retracted, parked) are resumed before any
    other, oldest first: HyGen reclaims preempted requests with their execution state.
    Who was taken stays in the index of prompts until `end`, for `need`; a walk goes past it.
    Cost: `add`, `remove`, `end` and the first pick take one way down a `PrefixIndex`; to come out
    of sequence, other than resumed, costs O(n), and happens to nobody on a server.
    """

    def __init__(self) -> None:
        # Kept in order of sequence; a tree would compare its way past others at each removal.
        self._by_age: OrderedDict[int, PendingRequest] = OrderedDict()
        self._resumed: SortedDict[int, PendingRequest] = SortedDict()
        self._by_prefix = PrefixIndex()
        self._resumed_by_prefix = PrefixIndex()

    def __len__(self) -> int:
        return len(self._by_age) + len(self._resumed)

    def __contains__(self, request: PendingRequest) -> bool:
        return request.sequence in self._by_age or request.sequence in self._resumed

    def add(self, request: PendingRequest, *, resumed: bool = False) -> None:
        """Let a request wait; its `sequence` must not be waiting already."""
        if request in self:
            raise ValueError(f"request {request.rid!r} is already waiting")
        if resumed:
            self._resumed[request.sequence] = request
            self._resumed_by_prefix.add(request)
        else:
            is_newest = not self._by_age or request.sequence > next(reversed(self._by_age))
            self._by_age[request.sequence] = request
            if not is_newest:
                self._by_age = OrderedDict(sorted(self._by_age.items()))
            self._by_prefix.add(request)

    def remove(self, request: PendingRequest) -> None:
        """Forget a request that ended while it waited. Errors: `KeyError` if it does not wait."""
        if request.sequence in self._resumed:
            del self._resumed[request.sequence]
            self._resumed_by_prefix.remove(request)
        else:
            del self._by_age[request.sequence]
            self._by_prefix.remove(request)

    def take(self, request: PendingRequest, *, is_aside: bool = False) -> bool:
        """A request was picked from `upcoming`: it waits no more. Errors: as `remove`.

        True if it was resumed: then nobody may be next on its prefix any more, see `PrefixNeed`.
        `is_aside`: somebody else picked it, and this order goes on where it stands.
        """
        if self._resumed.pop(request.sequence, None) is not None:
            self._resumed_by_prefix.remove(request)
            self._by_prefix.add(request)
            return True
        del self._by_age[request.sequence]
        if not is_aside:
            self._advance(request)
        return False

    def end(self, request: PendingRequest) -> None:
        """Forget a request that was taken: it ended, or comes back to wait."""
        self._by_prefix.remove(request)

    def upcoming(self, *, looks_only: bool = False) -> Iterator[PendingRequest]:
        """All waiting requests, next pick first; lazy, so the first k cost O(k + log n).

        The order holds until the next `add`, `remove` or `take`; do not mutate while iterating.
        `looks_only`: nobody is taken from these, and nothing is remembered. All ranks must list
        alike for those that are taken; who asks one of them what is in line looks only.
        """
        return itertools.chain(self._resumed.values(), self.unstarted(looks_only=looks_only))

    def oldest(self) -> PendingRequest | None:
        """The waiting request with the lowest sequence number."""
        heads = [next(iter(index.items())) for index in (self._by_age, self._resumed) if index]
        return min(heads)[1] if heads else None

    def need(self, namespace: str, path: Sequence[int]) -> PrefixNeed:
        """Who wants the prefix `path` (at least one token); ways down `PrefixIndex`es."""
        num_resumed = self._resumed_by_prefix.count_through(namespace, path)
        walk_key, num_others = self._by_prefix.last_and_count(namespace, path)
        return PrefixNeed(num_others + num_resumed, walk_key, num_resumed > 0)

    def shared_tokens(self, namespace: str, path: Sequence[int], *, at_least: int) -> int:
        """How much of `path` is the start of a pending prompt; a way down each `PrefixIndex`.

        0 if it is fewer than `at_least` tokens.
        """
        indexes = self._by_prefix, self._resumed_by_prefix
        return max(one.shared_tokens(namespace, path, at_least=at_least) for one in indexes)

    @property
    def cursor(self) -> PrefixKey | None:
        """Where the prefix walk stands; None before the first pick and in other orders."""
        return None

    @abstractmethod
    def unstarted(self, *, looks_only: bool = False) -> Iterator[PendingRequest]:
        """The requests that have not started, next pick first; see `upcoming`."""

    def _advance(self, request: PendingRequest) -> None:
        """Note that a request that had not started was picked."""


class FcfsOrder(OfflineOrder):
    """First come, first served."""

    def unstarted(self, *, looks_only: bool = False) -> Iterator[PendingRequest]:
        return iter(self._by_age.values())


class PsmOrder(OfflineOrder):
    """Prefix-sharing maximisation with freshness.

    Sorting prompts token by token visits them exactly as a depth-first walk over their
    prefix tree does (children in token order), which is how `PrefixIndex` keeps them.
    The walk goes on from the last pick and wraps around: newcomers to its left wait for the
    next round, as an elevator's passengers do, and do not pull it away from the prefix that
    is in the cache. A pick from further down the line does not move it past those before.

    With probability `1 - utility_ratio` a pick is the stalest request instead; such a pick
    leaves the walk where it is. The n-th draw depends only on `seed` and n.

    Source: HyGen 4.3, A.2 and A.3.
    """

    def __init__(self, *, utility_ratio: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        if not 0.0 <= utility_ratio <= 1.0:
            raise ValueError(f"utility_ratio is {utility_ratio}; allowed is 0 to 1")
        self._utility_ratio = utility_ratio
        self._seed = seed
        self._num_picked = 0
        # Of the picks to come, as far as somebody looked ahead: whether they follow the walk.
        self._follow: deque[bool] = deque()
        self._walk = Walk()

    @property
    def cursor(self) -> PrefixKey | None:
        return self._walk.cursor

    def _advance(self, request: PendingRequest) -> None:
        self._num_picked += 1
        if self._follow:
            self._follow.popleft()
        self._walk.advance(self._is_unstarted)

    def add(self, request: PendingRequest, *, resumed: bool = False) -> None:
        super().add(request, resumed=resumed)
        if not resumed:
            self._walk.forget()

    def unstarted(self, *, looks_only: bool = False) -> Iterator[PendingRequest]:
        seen: set[int] = set()
        by_age = (self._by_age[one] for one in self._by_age if one not in seen)
        walk = self._around_cursor() if looks_only else self._walk.listing(self._around_cursor)
        by_prefix = (one for one in walk if self._is_unstarted(one) and one.sequence not in seen)
        for num_ahead in itertools.count():
            request = next(by_prefix if self._follows_prefix(num_ahead) else by_age, None)
            if request is None:
                return
            seen.add(request.sequence)
            yield request

    def _follows_prefix(self, num_ahead: int) -> bool:
        """Whether so many picks from now the walk is followed."""
        while len(self._follow) <= num_ahead:
            draw = uniform_draw(self._seed, self._num_picked + len(self._follow))
            self._follow.append(draw < self._utility_ratio)
        return self._follow[num_ahead]

    def _around_cursor(self) -> Iterator[PendingRequest]:
        """Depth first from behind the cursor, then from the start."""
        return filter(self._is_unstarted, self._by_prefix.around(self.cursor))

    def _is_unstarted(self, request: PendingRequest) -> bool:
        return self._by_age.get(request.sequence) is request


def uniform_draw(seed: int, index: int) -> float:
    """The index-th draw of a seeded stream, uniform in [0, 1): any draw without the ones before.

    Source: SplitMix64 (Steele, Lea and Flood, 2014), its finaliser applied to a counter.
    """
    mask = (1 << 64) - 1
    state = (seed * 0xD1342543DE82EF95 + (index + 1) * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return float((state ^ (state >> 31)) >> 11) / float(1 << 53)


def create_offline_order(name: str, *, utility_ratio: float, seed: int) -> OfflineOrder:
    """Build an order by its config name. Errors: `ValueError` names the known ones."""
    if name == "psm":
        return PsmOrder(utility_ratio=utility_ratio, seed=seed)
    if name == "fcfs":
        return FcfsOrder()
    raise ValueError(f"offline order is {name!r}; known are psm, fcfs")
