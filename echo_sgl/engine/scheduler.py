"""SGLang's scheduler with a second class of work.

Online requests take SGLang's own path. Offline ones wait in a pool; before each prefill
pass a bounded number of them is offered behind the online queue, and what was not admitted
stays in the pool. Everything decided here follows from the requests received and the
memory held, which all ranks share, never from a clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch, retract_all
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req
from sglang.srt.runtime_context import get_observability, get_parallel

from echo_sgl.config import OfflineConfig
from echo_sgl.engine.admission import (
    EchoPrefillAdder,
    EchoSchedulePolicy,
    is_offline,
    retract,
)
from echo_sgl.engine.clock import StepClock
from echo_sgl.engine.install import describe_active
from echo_sgl.engine.kv_limits import KvLimits
from echo_sgl.engine.load import with_pooled_load
from echo_sgl.engine.metrics import SchedulerMetrics
from echo_sgl.engine.offline_pool import OfflinePool
from echo_sgl.engine.routes import STEPS_REQUEST_ID, steps_state
from echo_sgl.engine.server_facts import server_facts
from echo_sgl.engine.settings import active_config, refuse_unsupported
from echo_sgl.engine.step_timing import install_step_timer, row_of_batch
from echo_sgl.policies.offline_order import create_offline_order

logger = logging.getLogger(__name__)

# Enough to fill any prefill step whose prompts are mostly cached, and a constant per step.
MAX_OFFERED = 64


class EchoScheduler(Scheduler):
    """Online first, offline in prefix order in what is left (HyGen algorithms 2-4)."""

    waiting_queue: list[Req]
    chunked_req: Req | None
    load_inquirer: Any
    enable_priority_preemption: bool

    def init_running_status(self) -> None:
        super().init_running_status()
        refuse_unsupported(self.server_args, active_config())
        self.offline_config: OfflineConfig = active_config().offline
        order = create_offline_order(
            self.offline_config.order,
            utility_ratio=self.offline_config.utility_ratio,
            seed=self.offline_config.seed,
        )
        self.offline_pool = OfflinePool(order, self.offline_config.max_pool_requests)
        self._parked: list[Req] = []
        self.echo_clock = StepClock(is_shared=get_parallel().tp_size > 1)

    def init_schedule_policy(self) -> None:
        super().init_schedule_policy()
        self._bind_cache()
        self.step_timer = install_step_timer(self.tp_worker.model_runner)
        leads = _leads_its_replica()
        self.echo_metrics = SchedulerMetrics.create(
            enabled=get_observability().enable_metrics and leads
        )
        if leads:
            logger.info(describe_active())
        self.policy = EchoSchedulePolicy(
            self.schedule_policy,
            self.tree_cache,
            self.enable_hierarchical_cache,
            self.enable_priority_scheduling,
            self.schedule_low_priority_values_first,
        )
        self.yields_to_priorities = self.enable_priority_preemption
        # SGLang then asks our adder whether a full batch can make room for a request.
        self.enable_priority_preemption = True

    def _bind_cache(self) -> None:
        """Let the cache know who waits for it, and the pool who ended."""
        allocator = self.token_to_kv_pool_allocator
        self.kv_limits = KvLimits(active_config().reserve, self.tree_cache, allocator)
        self.tree_cache.on_end = self._offline_ended
        if (core := self.tree_cache.echo_core) is not None:
            core.pending = self.offline_pool
            self.offline_pool.on_change = core.prompt_changed

    def _offline_ended(self, req: Req) -> None:
        if is_offline(req):
            self.offline_pool.end(req)
            self.echo_metrics.observe_offline_end(getattr(req, "echo_recomputed_tokens", 0))

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        self.load_inquirer = with_pooled_load(self.load_inquirer, self.offline_pool)

    def get_prefill_adder_class(self) -> Any:
        return partial(self._new_adder)

    # ---- requests in and out -------------------------------------------------------------

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if req.is_retracted:
            self.echo_metrics.count_retraction(req)
        if not is_offline(req) or req.to_finish is not None:
            super()._add_request_to_queue(req, is_retracted)
        elif not self._set_or_validate_priority(req):
            self._release_aborted_request(req)
        elif self.offline_pool.is_full and not req.is_retracted:
            self._reject_full_pool(req)
        else:
            self._pool(req, resumed=req.is_retracted)

    def _pool(self, req: Req, *, resumed: bool) -> None:
        self._prefetch_kvcache(req)
        req.time_stats.set_wait_queue_entry_time()
        req.arrival_processed_tokens = self.processed_tokens_counter
        entry_s = req.time_stats.wait_queue_entry_time
        self.offline_pool.add(req, entry_s=entry_s, resumed=resumed)

    def _reject_full_pool(self, req: Req) -> None:
        message = (
            f"The offline pool holds {len(self.offline_pool)} requests, its limit is "
            f"{self.offline_pool.capacity} (offline.max_pool_requests). Send this one again later."
        )
        reason = {
            "type": "abort",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "message": message,
        }
        self._release_aborted_request(req)
        self.send_abort_output(_make_abort_req(req, finished_reason=reason), req)

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        super().process_input_requests(self.echo_clock.take_ticks(recv_reqs))
        if (core := self.tree_cache.echo_core) is not None:
            core.now_s = self.echo_clock.now_s
        self.kv_limits.observe(self.echo_clock.now_s, self._running_reqs())
        # Here and not where a batch is made: the loop comes by while the engine is paused, too.
        self.echo_metrics.publish(
            self.offline_pool, self.tree_cache.echo_core, self.kv_limits, time.perf_counter()
        )

    def abort_request(self, recv_req: AbortReq) -> None:
        # SGLang aborts what it finds in its own queue; pooled requests end the same way there.
        prefix = "" if recv_req.abort_all else recv_req.rid
        self.waiting_queue.extend(self.offline_pool.remove(prefix))
        super().abort_request(recv_req)

    def _poll_timeout_aborts(self) -> list[Any]:
        aborts: list[Any] = [*self.echo_clock.tick(), *super()._poll_timeout_aborts()]
        if (timeout_s := envs.SGLANG_REQ_WAITING_TIMEOUT.get()) > 0:
            deadline_s = time.perf_counter() - timeout_s
            late = self.offline_pool.waiting_since_before(deadline_s)
            aborts += [_waiting_timeout_abort(req.rid) for req in late]
        return aborts

    def record_weight_version_change(self, new_version: str | None) -> None:
        # SGLang walks its queue for requests that already generated under the old weights.
        num_online = len(self.waiting_queue)
        self.waiting_queue.extend(req for req in self.offline_pool if req.output_ids)
        super().record_weight_version_change(new_version)
        del self.waiting_queue[num_online:]

    # ---- what others may know --------------------------------------------------------------

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        pooled = len(self.offline_pool) > 0 and not ignore_waiting
        return not pooled and super().is_fully_idle(for_health_check, ignore_waiting)

    def get_internal_state(self, recv_req: Any) -> Any:
        if recv_req.rid == STEPS_REQUEST_ID:
            return steps_state(
                self.step_timer,
                server_facts(self),
                num_running=sum(1 for _ in self._running_reqs()),
                num_waiting=len(self.waiting_queue) + len(self.offline_pool),
            )
        return super().get_internal_state(recv_req)

    # ---- one step --------------------------------------------------------------------------

    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        self.step_timer.collect()
        self.step_timer.expect(row_of_batch(batch))
        return super().run_batch(batch, pp_proxy_tensors)

    def _should_defer_prefill(self, running_batch: ScheduleBatch) -> bool:
        return super()._should_defer_prefill(running_batch) or self._online_decode_is_due(
            running_batch
        )

    def _online_decode_is_due(self, running_batch: ScheduleBatch) -> bool:
        """Whether offline prefill just held up online decodes: then they go before more of it.

        SGLang prefills whenever it can, so a long pool would keep online requests from
        decoding. With mixed chunks every prefill step decodes too.
        """
        if self.is_mixed_chunk or self._online_prefill_waits() or self.last_batch is None:
            return False
        if not self.last_batch.forward_mode.is_extend():
            return False
        return any(not is_offline(req) for req in running_batch.reqs)

    def _online_prefill_waits(self) -> bool:
        chunked_online = self.chunked_req is not None and not is_offline(self.chunked_req)
        return bool(self.waiting_queue) or chunked_online

    def _get_new_batch_prefill_raw(
        self, prefill_delayer_single_pass: Any, running_batch: ScheduleBatch
    ) -> tuple[ScheduleBatch | None, ScheduleBatch]:
        was_full = running_batch.batch_is_full and not running_batch.is_empty()
        self._park_offline_chunk()
        self._shed_offline(running_batch)
        self.policy.offline_chunk_tokens = self._offline_chunk_tokens(running_batch)
        self.policy.offered = () if was_full else self._offer(running_batch)
        self.waiting_queue.extend(self.policy.offered)
        batch, running_batch = super()._get_new_batch_prefill_raw(
            prefill_delayer_single_pass, running_batch
        )
        self._take_back_offered(batch)
        if was_full and batch is None:
            # Preemption support made SGLang clear the flag; nothing has left the batch since.
            running_batch.batch_is_full = True
        return batch, running_batch

    def _park_offline_chunk(self) -> None:
        """Set an unfinished offline prefill aside when an online request waits.

        Its finished chunks were put into the tree at the start of this step and stay there,
        evictable. It returns to the pool after this pass, so that the result of its last
        chunk, perhaps still in flight, is drained before it starts again.
        """
        req = self.chunked_req
        if req is None or not is_offline(req) or not self.waiting_queue:
            return
        if req is self._pending_chunked_abort_req or req.to_finish is not None:
            return
        inflight_middle_chunks, retraction_count = req.inflight_middle_chunks, req.retraction_count
        retract_all(
            reqs=[req],
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=self.hisparse_coordinator,
        )
        # It lost nothing: its result in flight is a middle chunk's, not a retracted request's.
        req.is_retracted = False
        req.inflight_middle_chunks = inflight_middle_chunks
        req.retraction_count = retraction_count
        self.chunked_req = None
        self._parked.append(req)

    def _shed_offline(self, running_batch: ScheduleBatch) -> None:
        """Retract offline requests, last started first, that outgrew what the reserve leaves."""
        while self.kv_limits.excess_tokens and (victim := _last_offline(running_batch)) is not None:
            req = running_batch.reqs[victim]
            retract(running_batch, victim)
            self._add_request_to_queue(req, is_retracted=True)

    def _running_reqs(self) -> Iterable[Req]:
        """Requests that hold KV, each once: decoding, just prefilled, or between chunks."""
        launched = self.last_batch.reqs if self.last_batch is not None else []
        chunked = [self.chunked_req] if self.chunked_req is not None else []
        by_rid = {req.rid: req for req in (*self.running_batch.reqs, *launched, *chunked)}
        return (req for req in by_rid.values() if not req.finished())

    def _offline_chunk_tokens(self, running_batch: ScheduleBatch) -> int | None:
        limit = self.offline_config.max_prefill_tokens_per_step
        online = self._online_prefill_waits() or any(
            not is_offline(req) for req in running_batch.reqs
        )
        return limit if limit and online else None

    def _offer(self, running_batch: ScheduleBatch) -> tuple[Req, ...]:
        """The offline candidates of this pass, next pick first."""
        limit = MAX_OFFERED
        if self.offline_config.max_running_requests:
            running = sum(is_offline(req) for req in running_batch.reqs)
            running += self.chunked_req is not None and is_offline(self.chunked_req)
            limit = min(limit, self.offline_config.max_running_requests - running)
        return tuple(self.offline_pool.upcoming(max(0, limit)))

    def _take_back_offered(self, batch: ScheduleBatch | None) -> None:
        """Settle who left the pool, and put back what was parked."""
        offered, self.policy.offered = set(self.policy.offered), ()
        started = [req for req in batch.reqs if req in offered] if batch is not None else []
        for req in started:
            self.offline_pool.take(req)
        if offered:
            self.waiting_queue = [req for req in self.waiting_queue if req not in offered]
        for req in self._parked:
            self.echo_metrics.count_park()
            self._pool(req, resumed=True)
        self._parked = []

    def _launched_prefills(self) -> list[Req]:
        """Requests of a prefill step whose result overlap scheduling has yet to process."""
        if not self.result_queue:
            return []
        batch = self.result_queue[-1][0]
        return batch.reqs if batch.forward_mode.is_extend() else []

    def _new_adder(self, *args: Any, **kwargs: Any) -> EchoPrefillAdder:
        adder = EchoPrefillAdder(*args, **kwargs)
        adder.offline_tokens_left = self.policy.offline_chunk_tokens
        adder.kv_limits = self.kv_limits
        adder.inflight = self._launched_prefills()
        adder.yields_to_priorities = self.yields_to_priorities
        return adder


def _last_offline(batch: ScheduleBatch) -> int | None:
    """Index of the running offline request that started last."""
    running = [i for i, req in enumerate(batch.reqs) if is_offline(req) and not req.finished()]
    return running[-1] if running else None


def _leads_its_replica() -> bool:
    parallel = get_parallel()
    return parallel.attn_tp_rank == 0 and parallel.pp_rank == 0


def _waiting_timeout_abort(rid: str) -> AbortReq:
    message = "Request waiting timeout reached."
    return AbortReq(
        rid=rid,
        abort_message=message,
        finished_reason={
            "type": "abort",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "message": message,
        },
    )
