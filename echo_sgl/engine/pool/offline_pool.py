"""Where offline requests wait inside the scheduler, apart from SGLang's waiting queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from echo_sgl.engine.cache.node_path import namespace_of
from echo_sgl.policies.order.offer_size import in_line
from echo_sgl.policies.order.offline_order import OfflineOrder, PrefixNeed
from echo_sgl.policies.prefix_index import PrefixKey
from echo_sgl.types import NO_WORK, PendingRequest, Work


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Waiting(PendingRequest):
    """What the policy is told of a request, and the request: one leads to the other at once."""

    req: Any
    entry_s: float
    num_tokens: int


class OfflinePool:
    """Pooled SGLang requests by id, by time of entry, and in the order a policy gives.

    Every operation but `remove` costs a way down a `PrefixIndex` or less; nothing is done per
    scheduler step, so 50,000 waiting requests cost a step no more than ten. It
    also knows the requests that left it to run, until `end`: together they are the pending
    ones that cached prefixes wait for. `on_change` is told each prompt that the order answers
    otherwise for: its request comes or goes, or is resumed.
    """

    on_change: Callable[[Any, Any], None] | None = None

    def __init__(self, order: OfflineOrder, capacity: int) -> None:
        self.capacity = capacity
        self.num_tokens = 0
        self._order = order
        # Insertion order is order of entry, which timeouts go by; retracted ones enter anew.
        self._waiting: dict[str, _Waiting] = {}
        self._started: dict[str, _Waiting] = {}
        self._sequences = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, rid: str) -> bool:
        return rid in self._waiting

    def __iter__(self) -> Iterator[Any]:
        return (waiting.req for waiting in self._waiting.values())

    @property
    def is_full(self) -> bool:
        return len(self) >= self.capacity

    def add(
        self,
        req: Any,
        *,
        entry_s: float,
        resumed: bool,
        deadline_s: float | None = None,
        work: Work = NO_WORK,
    ) -> None:
        """Let a request wait. One that `resumed` keeps the place in line of its first entry."""
        self.end(req)
        if not hasattr(req, "echo_sequence"):
            req.echo_sequence = next(self._sequences)
        prompt = req.origin_input_ids + req.output_ids if resumed else req.origin_input_ids
        if getattr(req, "session", None) is not None:
            prompt = prompt[:]  # the session's next turn changes the array in place
        waiting = _Waiting(
            rid=req.rid,
            prompt=prompt,
            sequence=req.echo_sequence,
            namespace=namespace_of(req),
            deadline_s=deadline_s,
            work=work,
            req=req,
            entry_s=entry_s,
            num_tokens=req.seqlen,
        )
        self._order.add(waiting, resumed=resumed)
        self._waiting[req.rid] = waiting
        self.num_tokens += waiting.num_tokens
        self._changed(waiting)

    def find(self, rid: str) -> Any | None:
        """The request of that id, if it waits."""
        waiting = self._waiting.get(rid)
        return waiting.req if waiting is not None else None

    def upcoming(self, limit: int, *, looks_only: bool = False) -> list[Any]:
        """The next `limit` requests in the policy's order; they stay in the pool.

        `looks_only`: for one rank alone, see `OfflineOrder.upcoming`.
        """
        waiting: Iterator[Any] = islice(self._order.upcoming(looks_only=looks_only), limit)
        return [one.req for one in waiting]

    def upcoming_that_fit(self, limit: int, fits: Callable[[Any], bool]) -> list[Any]:
        """The same without those that could not start now if nobody else ran, see `in_line`."""
        line: Iterator[Any] = self._order.upcoming()
        return in_line((waiting.req for waiting in line), limit, fits)

    def take(self, req: Any) -> None:
        """Remove a request because it starts."""
        waiting = self._pop(req.rid)
        self._started[req.rid] = waiting
        if self._order.take(waiting):
            self._changed(waiting)

    def end(self, req: Any, *, num_cached_tokens: int = 0) -> None:
        """Forget a request that started, if it is known: it ended, or comes back to wait.

        `num_cached_tokens`: so many of its tokens the cache took in just now. If its prompt is
        among them, no leaf further up is the end of what it waited for, and nobody is told.
        """
        if (started := self._started.pop(req.rid, None)) is not None:
            self._order.end(started)
            if num_cached_tokens < len(started.prompt):
                self._changed(started)

    def forget_ended(self) -> None:
        """Forget those that started and hold no KV any more.

        SGLang ends some without a word: out of memory, or aborted in its queue after they were
        retracted. A look at all that started; not between a retraction and `add`.
        """
        for started in [one for one in self._started.values() if not one.req.kv.holds_kv]:
            self.end(started.req)

    def need(self, namespace: str, path: Sequence[int]) -> PrefixNeed:
        """Echo's reference count of a prefix, and which requests it counts."""
        return self._order.need(namespace, path)

    def shared_tokens(self, namespace: str, path: Sequence[int], *, at_least: int) -> int:
        """How much of `path` is the start of a pending prompt; 0 if fewer than `at_least`."""
        return self._order.shared_tokens(namespace, path, at_least=at_least)

    @property
    def cursor(self) -> PrefixKey | None:
        return self._order.cursor

    def remove(self, rid: str | None) -> list[Any]:
        """Remove and return the request of that id, if it waits; None empties the pool."""
        rids = list(self._waiting) if rid is None else [rid] if rid in self._waiting else []
        return [self._remove_one(one) for one in rids]

    def waiting_since_before(self, deadline_s: float) -> Iterator[Any]:
        """Requests that entered before the deadline, oldest entry first."""
        for waiting in self._waiting.values():
            if waiting.entry_s >= deadline_s:
                return
            yield waiting.req

    def oldest_age_s(self, now_s: float) -> float:
        """How long the request that has been in line longest has waited since it entered."""
        oldest = self._order.oldest()
        return now_s - self._waiting[oldest.rid].entry_s if oldest else 0.0

    def _remove_one(self, rid: str) -> Any:
        waiting = self._pop(rid)
        self._order.remove(waiting)
        self._changed(waiting)
        return waiting.req

    def _changed(self, waiting: _Waiting) -> None:
        if self.on_change is not None:
            self.on_change(waiting.req, waiting.prompt)

    def _pop(self, rid: str) -> _Waiting:
        waiting = self._waiting.pop(rid)
        self.num_tokens -= waiting.num_tokens
        return waiting
