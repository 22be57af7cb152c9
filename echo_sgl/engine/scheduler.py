"""SGLang's scheduler with a second class of work.

Online requests take SGLang's own path. Offline ones wait in a pool; before each prefill
pass a bounded number of them is offered behind the online queue, and what was not admitted
stays in the pool. `StepControl` holds every step with offline work against its limit.
Everything decided here follows from the requests received, the memory held and what rank 0
broadcasts, which all ranks share, never from a clock of their own.
"""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_observability, get_parallel

from echo_sgl.engine.admission.prefill_adder import EchoPrefillAdder
from echo_sgl.engine.admission.queue_order import EchoSchedulePolicy
from echo_sgl.engine.cache.kv_limits import KvLimits
from echo_sgl.engine.clock import Measured, StepClock
from echo_sgl.engine.decodes.adapters import AdapterRoom
from echo_sgl.engine.metrics.load import with_pooled_load
from echo_sgl.engine.metrics.recording import RecordingLog
from echo_sgl.engine.metrics.request_metrics import SchedulerMetrics
from echo_sgl.engine.offers import Offers
from echo_sgl.engine.pool.deadlines import DeadlineWatch
from echo_sgl.engine.pool.offline_pool import OfflinePool
from echo_sgl.engine.pool.weighing import Weighing
from echo_sgl.engine.questions import answer_question, obey
from echo_sgl.engine.requests.tasks import is_offline
from echo_sgl.engine.server_facts import server_facts
from echo_sgl.engine.settings import (
    active_config,
    describe_active,
    refuse_aligned_chunks,
    refuse_foreign_cache,
    refuse_unsupported,
)
from echo_sgl.engine.steps.estimation import FloorWatch, create_live_batch_time
from echo_sgl.engine.steps.step_control import StepControl
from echo_sgl.engine.steps.step_timing import install_step_timer
from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.offer_size import OfferSize
from echo_sgl.policies.order.offline_order import create_offline_order
from echo_sgl.types import Task

logger = logging.getLogger(__name__)

# Prompts of requests that ended without a word count as pending for no longer than this.
FORGET_EVERY_S = 1.0
# While requests run, and for as long again until a step decodes; who asks an idle server is to
# find what is true. Steps that were measured are learned from at once.
ADVANCE_EVERY_S = 0.1


class EchoScheduler(Offers):
    """Online first, offline in prefix order in what is left (HyGen algorithms 2-4)."""

    chunked_req: Req | None
    load_inquirer: Any
    invariant_checker: Any
    enable_priority_preemption: bool

    def init_running_status(self) -> None:
        super().init_running_status()
        refuse_unsupported(self.server_args, active_config())
        self.offline_config = active_config().offline
        order = DeadlineOrder(
            create_offline_order(
                self.offline_config.order,
                utility_ratio=self.offline_config.utility_ratio,
                seed=self.offline_config.seed,
            )
        )
        self.deadline_watch = DeadlineWatch(order)
        self.offline_pool = OfflinePool(order, self.offline_config.max_pool_requests)
        self.offer_size = OfferSize()
        self._forgot_s = self._advanced_s = -math.inf
        self._parked_chunks: list[Req] = []
        self._shed: list[Req] = []
        self._is_left_for_one = False
        self.recording = RecordingLog()

    def init_schedule_policy(self) -> None:
        super().init_schedule_policy()
        self._bind_cache()
        self.step_timer = install_step_timer(self.tp_worker.model_runner)
        self.echo_clock = StepClock(
            self.step_timer.take_fresh, is_shared=get_parallel().tp_size > 1
        )
        leads = _leads_its_replica()
        self.step_control = StepControl(
            active_config(),
            create_live_batch_time(active_config(), server_facts(self)),
            self.step_timer,
            max_requests=self.max_running_requests,
            chunk_tokens=self.chunked_prefill_size or self.max_prefill_tokens,
            watch=self.deadline_watch,
            rank=get_parallel().tp_rank,
            # Loaded ahead of a step, an adapter of who sits out could be gone when it resumes.
            can_park=not self.enable_lora_overlap_loading,
        )
        self.step_control.adapters = AdapterRoom.create(self)
        self.step_control.launched = self._launched_prefills
        self.echo_metrics = SchedulerMetrics.create(
            enabled=get_observability().enable_metrics and leads
        )
        if leads:
            self.step_control.floor_watch = FloorWatch.create(self.step_timer)
            logger.info(describe_active())
        self.policy = EchoSchedulePolicy(
            self.schedule_policy,
            self.tree_cache,
            self.enable_hierarchical_cache,
            self.enable_priority_scheduling,
            self.schedule_low_priority_values_first,
        )
        self.policy.planner = self.step_control.planner
        if self.enable_priority_scheduling:
            self.step_control.planner.keep_turns()
        self.yields_to_priorities = self.enable_priority_preemption
        # Else somebody of higher priority could wait for one of lower, or its KV would be lost.
        keeps_kv = not (self.tree_cache.disable or self.tree_cache.supports_mamba())
        self.trades_places = keeps_kv and not self.enable_priority_scheduling
        # SGLang then asks our adder whether a full batch can make room for a request.
        self.enable_priority_preemption = True

    def check_truncation_align_fits_chunk(self) -> None:
        refuse_aligned_chunks(self.truncation_align_size)
        super().check_truncation_align_fits_chunk()

    def _bind_cache(self) -> None:
        """Let the cache know who waits for it, and the pool who ended."""
        refuse_foreign_cache(self.tree_cache)
        allocator = self.token_to_kv_pool_allocator
        self.kv_limits = KvLimits(active_config().reserve, self.tree_cache, allocator)
        self.tree_cache.on_end = self._request_ended
        self.weighing = None
        if (core := self.tree_cache.echo_core) is not None:
            core.pending = self.offline_pool
            self.offline_pool.on_change = core.prompt_changed
            num_candidates = active_config().steps.candidates
            self.weighing = Weighing(core, allocator, self.deadline_watch, num_candidates)

    def _request_ended(self, req: Req, num_cached_tokens: int) -> None:
        if not len(self.offline_pool):
            self._advanced_s = -math.inf  # SGLang may sleep once it has looked around
        with self.step_control.own_time:
            self.step_control.note_end(req)
            self.recording.note_end(req, self.echo_clock.now_s)
            if is_offline(req):
                self.deadline_watch.note_end(req)
                self.offline_pool.end(req, num_cached_tokens=num_cached_tokens)
                self.echo_metrics.note_offline_end(getattr(req, "echo_recomputed_tokens", 0))

    def init_invariant_checker(self) -> None:
        super().init_invariant_checker()
        # Its memory check adds up what requests hold: those that sit out hold theirs.
        control = self.step_control
        self.invariant_checker.get_running_batch = lambda: SimpleNamespace(
            reqs=[*self.running_batch.reqs, *control.parked, *control.without_turn]
        )

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        control = self.step_control
        sitting_out = control.parked, control.without_turn
        self.load_inquirer = with_pooled_load(self.load_inquirer, self.offline_pool, sitting_out)

    def get_prefill_adder_class(self) -> Any:
        return partial(self._new_adder)

    # ---- one step --------------------------------------------------------------------------

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        own_time = self.step_control.own_time
        own_time.begin_iteration()
        with own_time:
            requests, measured = self.echo_clock.take_ticks(recv_reqs)
            if self.step_control.without_turn:
                self._rejoin(self.step_control.take_left_out())
        super().process_input_requests(requests)
        with own_time:
            self._advance(measured)

    def _advance(self, measured: Measured) -> None:
        """Let all that keeps time know what time it is, and what was measured since."""
        now_s = self.echo_clock.now_s
        if (core := self.tree_cache.echo_core) is not None:
            core.now_s = now_s
        is_due = not self.running_batch.reqs or now_s - self._advanced_s >= 2 * ADVANCE_EVERY_S
        if measured or is_due:
            self.step_control.observe(measured, now_s)
        if is_due:
            self._keep_time()

    def _keep_time(self) -> None:
        """What goes by time and not by steps; a step that decodes has the least else to do."""
        now_s, core = self.echo_clock.now_s, self.tree_cache.echo_core
        self._advanced_s = now_s
        has_looked = self.deadline_watch.advance(now_s, self._has_offline_work, self.running_reqs)
        # Not all that comes once a second in one step.
        forgets_after_s = FORGET_EVERY_S + (ADVANCE_EVERY_S if has_looked else 0.0)
        if now_s - self._forgot_s >= forgets_after_s:
            self._forgot_s = now_s
            self.offline_pool.forget_ended()
            self.step_control.tell_log(now_s)
        # Here and not where a batch is made: the loop comes by while the engine is paused, too.
        self.echo_metrics.publish(
            self.offline_pool, core, self.kv_limits, self.step_control, time.perf_counter()
        )

    def _has_offline_work(self) -> bool:
        return len(self.offline_pool) > 0 or self.kv_limits.offline_tokens > 0

    def get_internal_state(self, recv_req: Any) -> Any:
        own = answer_question(self, recv_req.rid)
        return super().get_internal_state(recv_req) if own is None else own

    def set_internal_state(self, recv_req: Any) -> Any:
        own = obey(self, recv_req.server_args)
        return super().set_internal_state(recv_req) if own is None else own

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: Any) -> Any:
        # SGLang looks for nobody to decode where nobody runs.
        if self.step_control.parked and not self._anybody_runs(running_batch, last_batch):
            self._resume_all()
            running_batch = self.running_batch
        return super().get_next_batch_to_run(running_batch, last_batch)

    def _anybody_runs(self, running_batch: ScheduleBatch, last_batch: Any) -> bool:
        if not all(req.finished() for req in running_batch.reqs):
            return True
        if last_batch is None or not last_batch.forward_mode.is_extend():
            return False
        # Who is through with its prefill decodes from now on, as do those of a mixed step.
        between_chunks = self.chunked_req, last_batch.chunked_req
        return not all(req.finished() or req in between_chunks for req in last_batch.reqs)

    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        core = self.tree_cache.echo_core
        own_time = self.step_control.own_time
        with own_time:
            is_late = self.echo_clock.now_s - self._advanced_s >= ADVANCE_EVERY_S
            if is_late and batch.forward_mode.is_decode():
                self._keep_time()
            note = self.step_control.launch(
                batch,
                self.waiting_queue,
                num_pooled=len(self.offline_pool),
                num_evicted_tokens=core.counts.num_evicted_tokens if core is not None else 0,
            )
        own_s = own_time.end_step()
        if note is not None:
            note.own_s = own_s
        return super().run_batch(batch, pp_proxy_tensors)

    def _should_defer_prefill(self, running_batch: ScheduleBatch) -> bool:
        with self.step_control.own_time:
            is_full = self._is_full(running_batch)
            self._begin_step(running_batch, is_full=is_full)
            is_deferred = super()._should_defer_prefill(running_batch)
            if not is_deferred and self.is_mixed_chunk:
                is_deferred = self._keeps_offline_waiting(running_batch)
            elif not is_deferred:
                # A pass that starts nobody may have to shed.
                is_deferred = (is_full and self.kv_limits.is_within) or self._decodes_first()
                if is_deferred:
                    self._shed_without_a_pass(running_batch)
        if is_deferred:
            self._take_in_compiled()
        return is_deferred

    def _begin_step(self, running_batch: ScheduleBatch, *, is_full: bool) -> None:
        """Show who runs and waits to those who decide about this step."""
        control, now_s = self.step_control, self.echo_clock.now_s
        control.begin(
            now_s,
            running_batch,
            self.waiting_queue,
            self.chunked_req,
            num_pooled=0 if is_full else len(self.offline_pool),
        )
        self.kv_limits.observe(now_s, control.online_tokens)
        if self.is_mixed_chunk:
            # A step that prefills decodes as well: who decodes must be settled first.
            control.select_decodes(running_batch, awaited=self.waiting_queue)

    def _decodes_first(self) -> bool:
        return self.step_control.defers_prefill(
            online_prefill_waits=self._online_prefill_waits(),
            last_was_prefill=self.last_batch is not None
            and self.last_batch.forward_mode.is_extend(),
            chunked=self.chunked_req,
            num_pooled=len(self.offline_pool),
            limits=self.kv_limits,
        )

    def _is_full(self, running_batch: ScheduleBatch) -> bool:
        """Whether a pass would start nobody: none has left since the last one found no room."""
        if self._is_left_for_one and not self.waiting_queue:
            # That one went away.
            self._is_left_for_one = running_batch.batch_is_full = False
        return (
            running_batch.batch_is_full
            and not running_batch.is_empty()
            and not self.waiting_queue
            and self.chunked_req is None
        )

    def _take_in_compiled(self) -> None:
        """Requests whose grammars are compiled now; SGLang asks for them in its pass only."""
        if self.grammar_manager.has_waiting_grammars():
            for req in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(req)

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        if not self.is_mixed_chunk:
            with self.step_control.own_time:
                self.step_control.select_decodes(batch)
        # Those whose last token is on its way free theirs a step later, and SGLang waits for it.
        if not batch.check_decode_mem() and not self._reqs_finishing_inflight(batch):
            self._free_for_decode(batch)
        retractions = self.step_control.counts.num_retractions
        num_before = retractions[Task.OFFLINE]
        decode_batch: ScheduleBatch | None = super().update_running_batch(batch)
        for _ in range(retractions[Task.OFFLINE] - num_before):
            self.step_control.planner.gating.note_lost()
        return decode_batch

    def _online_prefill_waits(self) -> bool:
        chunked_online = self.chunked_req is not None and not is_offline(self.chunked_req)
        return bool(self.waiting_queue) or chunked_online

    def _get_new_batch_prefill_raw(
        self, prefill_delayer_single_pass: Any, running_batch: ScheduleBatch
    ) -> tuple[ScheduleBatch | None, ScheduleBatch]:
        was_full = running_batch.batch_is_full and not running_batch.is_empty()
        num_left = self.step_control.counts.num_left
        with self.step_control.own_time:
            self.kv_limits.look()
            self._park_offline_chunk()
            self._shed_offline(running_batch)
            self.policy.offline_chunk_tokens = self._offline_chunk_tokens()
            self.policy.decodes = self._decodes_of_mixed_step(running_batch)
            self._queue_offered(() if was_full else self._offer(running_batch))
        batch, running_batch = super()._get_new_batch_prefill_raw(
            prefill_delayer_single_pass, running_batch
        )
        with self.step_control.own_time:
            self._take_back_offered(batch)
            self._note_online_pass(batch, running_batch)
            for req in batch.reqs if batch is not None else ():
                self.step_control.note_start(req)
        # For one that is yet to start.
        has_left = self.step_control.counts.num_left > num_left
        self._is_left_for_one = batch is None and (has_left or self._is_left_for_one)
        if was_full and batch is None:
            # Preemption support made SGLang clear the flag; nothing has left the batch since.
            running_batch.batch_is_full = True
        return batch, running_batch

    def _launched_prefills(self) -> list[Req]:
        """Requests of a prefill step whose result overlap scheduling has yet to process."""
        if not self.result_queue:
            return []
        batch = self.result_queue[-1][0]
        return batch.reqs if batch.forward_mode.is_extend() else []

    def _new_adder(self, *args: Any, **kwargs: Any) -> EchoPrefillAdder:
        adder = EchoPrefillAdder(*args, **kwargs)
        # Else nobody is asked, and what was said before still holds.
        if self.waiting_queue or self.chunked_req is not None:
            self.step_control.refusal = None
        self._adder = adder
        adder.offline_tokens_left = self.policy.offline_chunk_tokens
        adder.kv_limits = self.kv_limits
        adder.control = self.step_control
        adder.expect_growth_of(self.step_control.without_turn)
        adder.shape = self._decodes_of_mixed_step(adder.running_batch)
        adder.inflight = self._launched_prefills()
        adder.yields_to_priorities = self.yields_to_priorities
        adder.trades_places = self.trades_places
        return adder


def _leads_its_replica() -> bool:
    parallel = get_parallel()
    return parallel.attn_tp_rank == parallel.attn_cp_rank == parallel.pp_rank == 0
