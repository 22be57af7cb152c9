"""SGLang's order of its queue, with offline candidates behind it for the length of a pass."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy

from echo_sgl.batch_shape import BatchShape
from echo_sgl.engine.requests.places import queued
from echo_sgl.engine.requests.tasks import is_offline

if TYPE_CHECKING:
    from echo_sgl.policies.step_planner import StepPlanner


class EchoSchedulePolicy(SchedulePolicy):
    """SGLang's own order for the online requests; offline candidates stay behind them.

    Those whose first tokens are late go behind those that can be in time, or whoever is due first
    goes first, if the planner says so.

    `offered`, `offline_chunk_tokens` and `decodes` (beside the prefills of the step) are set by the
    scheduler before each prefill pass; `planner` says how long a chunk may be.
    """

    offered: tuple[Req, ...] = ()
    offline_chunk_tokens: int | None = None
    decodes: BatchShape
    planner: StepPlanner

    def calc_priority(
        self, waiting_queue: list[Req], running_batch: Any = None, processed_tokens: int = 0
    ) -> None:
        online = self._online(waiting_queue)
        super().calc_priority(online, running_batch, processed_tokens)
        if self.planner.late_last.wait_s:
            online.sort(key=lambda req: self.planner.goes_last(queued(req)))
        if self.planner.sorts_queue:
            online.sort(key=lambda req: queued(req).due_s)
        waiting_queue[:] = [*online, *self.offered]

    def shortest_prefill_chunk_limit(
        self, chunked_req: Req, waiting_queue: list[Req], budget: int, page_size: int
    ) -> int | None:
        # No offered one starts beside a request between chunks: none is to be left room.
        online = self._online(waiting_queue)
        limit = super().shortest_prefill_chunk_limit(chunked_req, online, budget, page_size)
        left = len(chunked_req.full_untruncated_fill_ids) - int(chunked_req.prefix_len)
        most = left if limit is None else min(left, limit)
        room = partial(
            self.planner.offline_chunk_tokens
            if is_offline(chunked_req)
            else self.planner.online_chunk_tokens,
            self.decodes,
            cached_tokens=int(chunked_req.prefix_len),
            page_size=page_size,
        )
        if is_offline(chunked_req) and self.offline_chunk_tokens is not None:
            most = min(most, max(1, self.offline_chunk_tokens // page_size) * page_size)
        if is_offline(chunked_req) and self.planner.online_waits:
            # It cannot be set aside, and the longer it takes the longer some online prompts wait;
            # others fit beside it.
            return min(most, max(1, budget // 2 // page_size) * page_size)
        # Whether it runs at all was decided before; SGLang wants to see it make progress.
        return room(max_tokens=most) or min(most, page_size)

    def _online(self, waiting_queue: list[Req]) -> list[Req]:
        offered = set(self.offered)
        return [req for req in waiting_queue if req not in offered]
