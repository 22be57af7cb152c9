"""Offline requests whose job would miss its window come before any other order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from echo_sgl.policies.order.deadlines import DeadlineBook, has_deadline
from echo_sgl.policies.order.offline_order import OfflineOrder, PrefixNeed, Walk
from echo_sgl.policies.prefix_index import PrefixKey
from echo_sgl.types import PendingRequest

# What is urgent stays so until there is that much more time: a walk that went to and fro
# between two parts of the prompts at every pick would find neither of them in the cache.
_RELEASE = 1.1


class DeadlineOrder(OfflineOrder):
    """Another order, with urgent requests ahead of both its prefix walk and its ages.

        resumed -> the deadline that would be missed -> overdue work -> the other order

    What is ahead is taken in prefix order, from where the other order's walk stands; that walk
    itself stays where it is until nothing is ahead, as it does for a pick by age. Which deadline
    is urgent changes only in `escalate`, once a step: in between the order holds.

    For eviction, `need` calls a prefix next when a request ahead waits for it: exact at the time
    of asking. An order of eviction keeps the answer until it is told of that prefix anew; so
    after an escalation it learns of it prompt by prompt, as requests on that prefix come, start
    or end. And it knows that what is ahead comes first, but not in which order: it goes by
    recency there. Both cost recomputation at worst, never a wrong result.

    Source: ours (least laxity). Units: seconds, tokens. Errors: `ValueError` if `safety` < 1.
    """

    def __init__(self, other: OfflineOrder, *, safety: float = 1.2) -> None:
        if not safety >= 1:
            raise ValueError(
                f"safety is {safety}; it must be at least 1: "
                "with less, a job would be hurried only after it could still be in time"
            )
        super().__init__()
        self.book = DeadlineBook()
        self._other = other
        self._safety = safety
        self._urgent: float | None = None
        self._ahead: tuple[float, ...] = ()
        self._walk = Walk()

    def __len__(self) -> int:
        return len(self._other)

    @property
    def cursor(self) -> PrefixKey | None:
        return self._other.cursor

    def escalate(self, now_s: float, rate_tokens_per_s: float | None) -> float | None:
        """Decide what comes ahead from now on; returns the urgent deadline. O(deadlines)."""
        if self.book.is_empty and not self._ahead:
            return None
        safety = self._safety if self._urgent is None else self._safety * _RELEASE
        self._urgent = self.book.urgent_deadline(now_s, rate_tokens_per_s, safety)
        urgent = () if self._urgent is None else (self._urgent,)
        self._ahead = (*urgent, *self.book.overdue(now_s))
        if not self._ahead:
            self._walk = Walk()
        return self._urgent

    def __contains__(self, request: PendingRequest) -> bool:
        return request in self._other

    def add(self, request: PendingRequest, *, resumed: bool = False) -> None:
        self._other.add(request, resumed=resumed)
        if resumed:
            self._resumed[request.sequence] = request
        if has_deadline(request):
            (self.book.note_resumed if resumed else self.book.add)(request)

    def remove(self, request: PendingRequest) -> None:
        self._other.remove(request)
        self._forget(request)

    def take(self, request: PendingRequest, *, is_aside: bool = False) -> bool:
        is_ahead = self._is_ahead(request)
        was_resumed = self._other.take(request, is_aside=is_aside or is_ahead)
        self._forget(request)
        self.book.note_started(request)
        if is_ahead:
            self._walk.advance(self.__contains__)
        return was_resumed

    def end(self, request: PendingRequest) -> None:
        self._other.end(request)

    def oldest(self) -> PendingRequest | None:
        return self._other.oldest()

    def need(self, namespace: str, path: Sequence[int]) -> PrefixNeed:
        need = self._other.need(namespace, path)
        if need.is_next or not need.num_pending:
            return need
        is_ahead = any(self.book.count_through(one, namespace, path) for one in self._ahead)
        return replace(need, is_next=is_ahead)

    def shared_tokens(self, namespace: str, path: Sequence[int], *, at_least: int) -> int:
        return self._other.shared_tokens(namespace, path, at_least=at_least)

    def unstarted(self, *, looks_only: bool = False) -> Iterator[PendingRequest]:
        others = self._other.unstarted(looks_only=looks_only)
        if not self._ahead:
            return others
        behind = (request for request in others if not self._is_ahead(request))
        if looks_only:
            return chain(self._requests_ahead(), behind)
        # Since the last listing others may have come, or another deadline be urgent.
        self._walk.forget()
        return chain(self._walk.listing(self._requests_ahead), behind)

    def _requests_ahead(self) -> Iterator[PendingRequest]:
        cursor = self._walk.cursor or self._other.cursor
        return chain.from_iterable(self.book.walk(one, cursor) for one in self._ahead)

    def _is_ahead(self, request: PendingRequest) -> bool:
        return request.deadline_s in self._ahead and request.sequence not in self._resumed

    def _forget(self, request: PendingRequest) -> None:
        was_resumed = self._resumed.pop(request.sequence, None) is not None
        if has_deadline(request):
            (self.book.forget_resumed if was_resumed else self.book.remove)(request)
