"""Where simulated offline requests wait: the order of the policies, as in the server."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.deadlines import LOOK_EVERY_S, InWork, RateMeter, progress
from echo_sgl.policies.order.offer_size import in_line
from echo_sgl.policies.order.offline_order import PrefixNeed
from echo_sgl.policies.prefix_index import PrefixKey
from echo_sgl.sim.workload import SimRequest
from echo_sgl.types import PendingRequest, Work


class SimOfflinePool:
    """Waiting requests in policy order, and the paths of those that started.

    Estimates of work know answers that ended, never the true length of one that did not.
    `on_change` is told each path whose request comes, goes or is resumed.
    """

    def __init__(self, order: DeadlineOrder) -> None:
        self._order, self._rate = order, RateMeter()
        self._waiting: dict[str, tuple[SimRequest, PendingRequest]] = {}
        self._started: dict[str, PendingRequest] = {}
        self._sequences = count()
        self._tokens_done = 0
        self._looked_s, self._is_running = -math.inf, False
        self.is_late = False  # whether a job would miss its window
        self.on_change: Callable[[array[int]], None] = lambda blocks: None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def cursor(self) -> PrefixKey | None:
        return self._order.cursor

    def need(self, namespace: str, path: Sequence[int]) -> PrefixNeed:
        return self._order.need(namespace, path)

    def shared_blocks(self, path: Sequence[int], *, at_least: int) -> int:
        return self._order.shared_tokens("", path, at_least=at_least)

    def add(self, request: SimRequest, *, resumed: bool) -> None:
        self._forget_start(request)
        if request.sequence < 0:
            request.sequence = next(self._sequences)
        pending = PendingRequest(
            rid=request.rid,
            prompt=request.blocks,
            sequence=request.sequence,
            deadline_s=request.deadline_s if math.isfinite(request.deadline_s) else None,
            work=_work(request),
        )
        self._order.add(pending, resumed=resumed)
        self._waiting[request.rid] = request, pending
        self.on_change(request.blocks)

    def take(self, request: SimRequest) -> None:
        """Remove a request because it starts."""
        self._looked_s = -math.inf
        _, self._started[request.rid] = self._waiting.pop(request.rid)
        if self._order.take(self._started[request.rid]):
            self.on_change(request.blocks)

    def end(self, request: SimRequest) -> None:
        """A request that started is done."""
        self._forget_start(request)
        self._tokens_done += max(0, request.seq_tokens - request.counted_tokens)
        self._order.book.answer_lengths.note(request.num_outputs)

    def upcoming(self, limit: int, most_tokens: int) -> list[SimRequest]:
        """The next in the policy's order that need no more than so much; they stay."""
        waiting = (self._waiting[one.rid][0] for one in self._order.upcoming())
        return in_line(waiting, limit, lambda one: one.needed_tokens <= most_tokens)

    def advance(self, now_s: float, running: Callable[[], Iterable[SimRequest]]) -> None:
        """Measure the rate, let a late job go ahead. `running`: offline requests that hold KV."""
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            requests = list(running())
            num_done, left = progress(map(self._in_work, requests))
            self._tokens_done += num_done
            self._order.book.set_running(left)
            for one in requests:
                one.counted_tokens = max(one.counted_tokens, one.seq_tokens)
            self._is_running = bool(requests)
        if not len(self) and not self._is_running:
            self._rate.pause()
            return
        self._rate.observe(now_s, self._tokens_done)
        self._tokens_done = 0
        self.is_late = self._order.escalate(now_s, self._rate.tokens_per_s) is not None

    def pause(self) -> None:
        """Nobody offline waits or runs: this time says nothing of the rate."""
        self._rate.pause()
        self._looked_s = -math.inf

    def _in_work(self, request: SimRequest) -> InWork:
        expected_tokens = _work(request).expected_tokens(
            self._order.book.answer_lengths.expected_tokens
        )
        return InWork(
            request.seq_tokens, request.counted_tokens, expected_tokens, request.deadline_s
        )

    def laxity_s(self, request: SimRequest, now_s: float) -> float:
        if math.isinf(request.deadline_s):
            return math.inf
        rate = self._rate.tokens_per_s
        return self._order.book.laxity_s(request.deadline_s, now_s, rate)

    def _forget_start(self, request: SimRequest) -> None:
        if (pending := self._started.pop(request.rid, None)) is not None:
            self._order.end(pending)
            self.on_change(request.blocks)


def _work(request: SimRequest) -> Work:
    return Work(request.prompt_tokens, request.max_new_tokens, request.counted_tokens)
