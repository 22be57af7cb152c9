"""How requests come into the scheduler and leave it again: the pool beside SGLang's queue."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from itertools import chain
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req

from echo_sgl.engine.admission.queue_order import EchoSchedulePolicy
from echo_sgl.engine.cache.kv_limits import KvLimits
from echo_sgl.engine.clock import StepClock
from echo_sgl.engine.metrics.request_metrics import SchedulerMetrics
from echo_sgl.engine.pool.deadlines import DeadlineWatch
from echo_sgl.engine.pool.offline_pool import OfflinePool
from echo_sgl.engine.requests.places import enter
from echo_sgl.engine.requests.terms import terms_of
from echo_sgl.engine.steps.step_control import StepControl

# SGLang 0.5.23 ends with its scheduler when it is to compute a step of no tokens.
NO_PROMPT = "The prompt holds no tokens; send at least one."


class PoolIntake(Scheduler):
    """SGLang's scheduler whose offline requests wait in a pool, or sit out with their KV kept.

    Whatever SGLang does to requests that wait or run reaches these as well: abort, timeout,
    pause, new weights.
    """

    chunked_req: Req | None
    policy: EchoSchedulePolicy
    waiting_queue: list[Req]
    running_batch: ScheduleBatch
    offline_pool: OfflinePool
    deadline_watch: DeadlineWatch
    kv_limits: KvLimits
    step_control: StepControl
    echo_clock: StepClock
    echo_metrics: SchedulerMetrics

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        terms = terms_of(req, self.echo_clock.now_s)
        has_given_place = not terms.is_offline and terms.waiting_since_s is not None
        if req.is_retracted and not has_given_place:
            self.step_control.counts.num_retractions[terms.task] += 1
        if has_given_place and req.to_finish is None:
            # It waits for others' sake: the limit of the queue is for those that come.
            self._prefetch_kvcache(req)
            self._note_entry(req)
            self._enter(req)
        elif not req.origin_input_ids:
            self._reject(req, HTTPStatus.BAD_REQUEST, NO_PROMPT)
        elif not terms.is_offline or req.to_finish is not None:
            super()._add_request_to_queue(req, is_retracted)
            if self.waiting_queue and self.waiting_queue[-1] is req:
                self._enter(self.waiting_queue.pop())
        elif not self._set_or_validate_priority(req):
            self._release_aborted_request(req)
        elif self.offline_pool.is_full and not req.is_retracted:
            self._reject(req, HTTPStatus.SERVICE_UNAVAILABLE, self._full_pool())
        elif problem := self.kv_limits.never_fits(req):
            self._reject(req, HTTPStatus.BAD_REQUEST, problem)
        else:
            self._pool(req, resumed=req.is_retracted)

    def _enter(self, req: Req) -> None:
        enter(self.step_control.planner.places, self.waiting_queue, req)

    def _note_entry(self, req: Req) -> None:
        req.time_stats.set_wait_queue_entry_time()
        req.arrival_processed_tokens = self.processed_tokens_counter

    def _pool(self, req: Req, *, resumed: bool) -> None:
        self._note_entry(req)
        # From the storage, see `_fetch_from_storage`; anew after it lost its memory.
        req.echo_is_fetched, req.storage_prefetch_retry_attempts = False, 0
        entry_s = req.time_stats.wait_queue_entry_time
        deadline_s, work = self.deadline_watch.terms(req)
        self.offline_pool.add(
            req, entry_s=entry_s, resumed=resumed, deadline_s=deadline_s, work=work
        )

    def _full_pool(self) -> str:
        return (
            f"The offline pool holds {len(self.offline_pool)} requests, its limit is "
            f"{self.offline_pool.capacity} (offline.max_pool_requests). Send this one again later."
        )

    def _reject(self, req: Req, status: HTTPStatus, message: str) -> None:
        reason = {"type": "abort", "status_code": status, "message": message}
        self._release_aborted_request(req)
        self.beam_coordinator.retire_group(req)  # counted since it came
        self.send_abort_output(_make_abort_req(req, finished_reason=reason), req)

    def abort_request(self, recv_req: AbortReq) -> None:
        # SGLang aborts what it finds in its own queue; pooled requests end the same way there.
        rid, is_all = recv_req.rid, recv_req.abort_all
        if not (rid or is_all):
            return  # every id begins with nothing
        for req in self.waiting_queue:
            if is_all or req.rid == rid:
                self.step_control.note_abandoned(req)
        self.waiting_queue.extend(self.offline_pool.remove(None if is_all else rid))
        if any(is_all or req.rid == rid for req in self.step_control.parked):
            self._resume_all()
        with _hidden([] if is_all else self._namesakes(rid)):
            super().abort_request(recv_req)

    def _namesakes(self, rid: str) -> list[Req]:
        """Those whose ids only begin with this one: SGLang would abort them, too, and ids are the
        clients' to choose.
        """
        chunked = [self.chunked_req] if self.chunked_req is not None else []
        compiling = self.grammar_manager.grammar_queue
        everybody = chain(self.waiting_queue, compiling, self.collect_inflight_reqs(), chunked)
        return [
            req for req in dict.fromkeys(everybody) if req.rid != rid and req.rid.startswith(rid)
        ]

    def _abort_on_queued_limit(self, recv_req: Req) -> bool:
        offered = self.policy.offered
        if not offered:
            return super()._abort_on_queued_limit(recv_req)
        # Those that this pass offers are in the queue for its length only: they do not fill it.
        self.waiting_queue = [req for req in self.waiting_queue if req not in offered]
        is_aborted: bool = super()._abort_on_queued_limit(recv_req)
        self.waiting_queue.extend(offered)
        return is_aborted

    def _poll_timeout_aborts(self) -> list[Any]:
        aborts: list[Any] = [*self.echo_clock.tick(), *super()._poll_timeout_aborts()]
        if (timeout_s := envs.SGLANG_REQ_WAITING_TIMEOUT.get()) > 0:
            deadline_s = time.perf_counter() - timeout_s
            late = self.offline_pool.waiting_since_before(deadline_s)
            aborts += [_timeout_abort(req.rid, "waiting") for req in late]
        if (timeout_s := envs.SGLANG_REQ_RUNNING_TIMEOUT.get()) > 0:
            deadline_s = time.perf_counter() - timeout_s
            aborts += [
                _timeout_abort(req.rid, "running")
                for req in self._out_of_batches()
                if req.to_finish is None and 0 < req.time_stats.forward_entry_time < deadline_s
            ]
        return aborts

    def _out_of_batches(self) -> Iterator[Req]:
        """Requests that run and are in no batch of SGLang's: they sit out, or wait for a chunk."""
        yield from self.step_control.parked
        yield from self.step_control.without_turn
        chunked, last = self.chunked_req, self.last_batch
        if chunked is None or chunked is self._pending_chunked_abort_req:
            return
        if last is None or chunked not in last.reqs:
            yield chunked

    def record_weight_version_change(self, new_version: str | None) -> None:
        # SGLang walks its queue for requests that already generated under the old weights.
        self._resume_all()
        num_online = len(self.waiting_queue)
        self.waiting_queue.extend(req for req in self.offline_pool if req.output_ids)
        super().record_weight_version_change(new_version)
        del self.waiting_queue[num_online:]

    def pause_generation(self, recv_req: Any) -> None:
        self._resume_all()
        super().pause_generation(recv_req)

    def _resume_all(self) -> None:
        """End all parking: what SGLang does to running requests must reach these, too."""
        self._rejoin(self.step_control.take_all_parked())

    def _rejoin(self, batch: ScheduleBatch | None) -> None:
        """Let these decode on with all others."""
        if batch is None:
            return
        if self.running_batch.is_empty():
            batch.batch_is_full = False
            self.running_batch = batch
        else:
            self.running_batch.merge_batch(batch)

    def running_reqs(self) -> Iterable[Req]:
        """Requests that hold KV, each once: decoding, parked, just prefilled, between chunks."""
        launched = self.last_batch.reqs if self.last_batch is not None else []
        chunked = [self.chunked_req] if self.chunked_req is not None else []
        holding = chain(self.running_batch.reqs, self.step_control.parked, launched, chunked)
        return (req for req in dict.fromkeys(holding) if not req.finished())

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        pooled = len(self.offline_pool) > 0 and not ignore_waiting
        if pooled or self.step_control.parked:
            return False
        if any(req.kv.holds_kv for req in self.offline_pool):
            return False  # a session's turn, which was lent what the session holds
        return super().is_fully_idle(for_health_check, ignore_waiting)


@contextmanager
def _hidden(reqs: Iterable[Req]) -> Iterator[None]:
    """These have ids within the block that no client gives."""
    reqs = list(reqs)
    for req in reqs:
        req.rid = f"\0{req.rid}"
    try:
        yield
    finally:
        for req in reqs:
            req.rid = req.rid[1:]


def _timeout_abort(rid: str, kind: str) -> AbortReq:
    message = f"Request {kind} timeout reached."
    return AbortReq(
        rid=rid,
        abort_message=message,
        finished_reason={
            "type": "abort",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "message": message,
        },
    )
