"""What the pool offers to a prefill pass, and what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch, retract_all

from echo_sgl.batch_shape import BatchShape
from echo_sgl.config import OfflineConfig
from echo_sgl.engine.admission.prefill_adder import EchoPrefillAdder
from echo_sgl.engine.cache.kv_limits import KvLimits, needed_tokens
from echo_sgl.engine.decodes.adapters import claimed_adapters
from echo_sgl.engine.decodes.parking import has_prompt_logprobs
from echo_sgl.engine.pool.weighing import Weighing
from echo_sgl.engine.pool_intake import PoolIntake
from echo_sgl.engine.requests.positions import KeptPositions, kept_positions, restore_positions
from echo_sgl.engine.requests.refusals import NO_ROOM, Reason
from echo_sgl.engine.requests.roster import may_sit_out
from echo_sgl.engine.requests.tasks import is_offline
from echo_sgl.engine.settings import active_config
from echo_sgl.policies.order.offer_size import OfferSize
from echo_sgl.policies.prefills.gathering import Gathering


class Offers(PoolIntake):
    """SGLang's scheduler whose prefill passes look at a few of the pool's requests.

    They stand behind the online ones in SGLang's queue for the time of a pass; what was not
    admitted stays in the pool.
    """

    offline_config: OfflineConfig
    offer_size: OfferSize
    kv_limits: KvLimits
    weighing: Weighing | None
    lora_drainer: Any
    _parked_chunks: list[Req]
    _shed: list[Req]
    _kept_positions: list[KeptPositions]
    _adder: EchoPrefillAdder

    def init_lora_drainer(self) -> None:
        """SGLang keeps an adapter's requests waiting once those of another one wait for too long.

        Offline ones wait for hours, and are no reason for it.
        """
        super().init_lora_drainer()
        if (drainer := self.lora_drainer) is not None:
            update = drainer.update_draining_state
            drainer.update_draining_state = lambda waiting, running: update(
                [req for req in waiting if not is_offline(req)], running
            )

    def _offline_chunk_tokens(self) -> int | None:
        limit = self.offline_config.max_prefill_tokens_per_step
        return limit if limit and self.step_control.planner.view.is_present else None

    def _num_offline(self, running_batch: ScheduleBatch) -> int:
        """How many offline requests hold memory: decoding, parked or between chunks."""
        chunked = [self.chunked_req] if self.chunked_req is not None else []
        num_running = sum(is_offline(req) for req in (*running_batch.reqs, *chunked))
        return num_running + len(self.step_control.parked)

    def _decodes_of_mixed_step(self, running_batch: ScheduleBatch) -> BatchShape:
        """What decodes beside the prefills that are being admitted: nothing, unless mixed."""
        shape = BatchShape()
        if self.is_mixed_chunk:
            for req in running_batch.reqs:
                shape.add_decode(req.seqlen)
        return shape

    def _keeps_offline_waiting(self, running_batch: ScheduleBatch) -> bool:
        """Whether offline requests wait for their first or next chunk while all others decode."""
        req = self.chunked_req
        if self.waiting_queue or (req is not None and not is_offline(req)):
            return False
        if req is None:
            is_asked = len(self.offline_pool) > 0 and self.kv_limits.is_within
            return is_asked and not self.step_control.num_worth_starting(1)
        if self.kv_limits.excess_tokens(self._num_offline(running_batch)):
            return False  # a pass sheds
        decodes = self._decodes_of_mixed_step(running_batch)
        return self.step_control.keeps_chunk_waiting(req, decodes, self.page_size)

    def _park_offline_chunk(self) -> None:
        """Set an unfinished offline prefill aside when an online request waits.

        Its finished chunks were put into the tree at the start of this step and stay there,
        evictable. It returns to the pool after this pass, so that the result of its last
        chunk, perhaps still in flight, is drained before it starts again.
        """
        # Where no tree keeps its chunks, it would begin anew each time.
        if self.waiting_queue and not self.tree_cache.disable:
            self._set_chunk_aside()

    def _set_chunk_aside(self, *, is_online: bool = False) -> bool:
        """Free what a prefill between chunks holds; whether there was one of this class."""
        req = self.chunked_req
        if req is None or is_offline(req) == is_online:
            return False
        if req is self._pending_chunked_abort_req or not may_sit_out(req):
            return False
        if has_prompt_logprobs(req) or req.positional_embed_overrides is not None:
            return False  # the logprobs would be lost with its chunks, the others' KV is in no tree
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
        req.echo_was_set_aside = True
        self._parked_chunks.append(req)
        return True

    def _pool_chunks_set_aside(self) -> None:
        for req in self._parked_chunks:
            if is_offline(req):
                self.step_control.counts.num_prefill_parks += 1
                self._pool(req, resumed=True)
            else:
                self._add_request_to_queue(req, is_retracted=True)
        self._parked_chunks = []

    def _free_for_decode(self, batch: ScheduleBatch) -> None:
        """Before SGLang retracts from those that decode: who does not gives up what it holds."""
        while not batch.check_decode_mem():
            if self._retract_parked(batch) or self._set_chunk_aside():
                continue
            # SGLang would end the last decode: one of two requests has to wait, and it can.
            if len(batch.reqs) > 1 or not self._set_chunk_aside(is_online=True):
                break
        self._pool_chunks_set_aside()
        if self.step_control.without_turn and not batch.check_decode_mem():
            self.step_control.take_back_left_out(batch)

    def _retract_parked(self, batch: ScheduleBatch) -> bool:
        victim = self.step_control.retract_one(batch, ())
        if victim is not None:
            self._add_request_to_queue(victim, is_retracted=True)
        return victim is not None

    def _shed_offline(self, running_batch: ScheduleBatch) -> None:
        """Retract offline requests that outgrew what the reserve leaves, parked ones first.

        They return to the pool after this pass: a token of theirs may be in flight, and would be
        counted twice if they started again at once.
        """
        # They are counted only where it may matter: one alone may have more than several.
        if self.kv_limits.is_within:
            return
        while self.kv_limits.excess_tokens(self._num_offline(running_batch)):
            victim = self.step_control.retract_one(running_batch, running_batch.reqs)
            if victim is None:
                return
            self._shed.append(victim)

    def _shed_without_a_pass(self, running_batch: ScheduleBatch) -> None:
        """The same where decodes go first, perhaps for long: nobody starts in this step."""
        self._shed_offline(running_batch)
        if self._shed:
            running_batch.batch_is_full = False
        self._queue_shed()

    def _queue_shed(self) -> None:
        for req in self._shed:
            self._add_request_to_queue(req, is_retracted=True)
        self._shed = []

    def _queue_offered(self, offered: tuple[Req, ...]) -> None:
        """For the time of a pass, until `_take_back_offered`."""
        self.policy.offered = offered
        self._fetch_from_storage(offered)
        self.waiting_queue.extend(offered)
        is_asked = self.model_config.is_multimodal
        self._kept_positions = kept_positions(self.waiting_queue) if is_asked else []

    def can_schedule_lora_req(self, req: Req, running_loras: set[str | None]) -> bool:
        """SGLang asks before it starts a request; `running_loras`: of all that run or start."""
        control = self.step_control
        # A mixed step's decodes have made way already.
        if control.can_park and not (self.is_mixed_chunk and not is_offline(req)):
            running_loras = claimed_adapters(
                req,
                running=self._adder.running_batch.reqs,
                starting=self._adder.can_run_list,
                parked=control.parked,
            )
        can_start: bool = super().can_schedule_lora_req(req, running_loras)
        if not can_start:
            control.refuse(Reason.ADAPTER, req.rid, num_adapters=len(running_loras))
        return can_start

    def _fetch_from_storage(self, offered: Iterable[Req]) -> None:
        """Ask for what SGLang's storage has of those that a pass looks at for the first time.

        SGLang asks when a request comes. What it fetches for one fills a part of the host tier
        until that one starts: pooled for hours, they would leave online requests nothing of it.
        """
        for req in offered:
            if not req.echo_is_fetched:
                req.echo_is_fetched = True
                self._prefetch_kvcache(req)

    def _offer(self, running_batch: ScheduleBatch) -> tuple[Req, ...]:
        """The offline candidates of this pass, next pick first."""
        num_free = max(0, self.get_num_allocatable_reqs(len(running_batch.reqs)))
        limit = self.offer_size.limit(num_free, active_config().steps.candidates)
        if self.offline_config.max_running_requests:
            running = self._num_offline(running_batch)
            most = self.offline_config.max_running_requests
            limit = min(limit, most - running)
            if limit <= 0:
                self.step_control.refuse(Reason.SLOT, None, num_running=running, most=most)
                if not self.is_mixed_chunk:
                    self._gathering.note_pass(BatchShape(), is_full=len(self.offline_pool) > 0)
        if not len(self.offline_pool):
            return ()
        limit = self.step_control.num_worth_starting(max(0, min(limit, len(self.offline_pool))))
        most_tokens = self.kv_limits.limit_tokens(num_offline=1)
        offered = self.offline_pool.upcoming_that_fit(
            limit, lambda req: needed_tokens(req) <= most_tokens
        )
        control = self.step_control
        if self.weighing is None or not control.estimator.is_ready:
            return tuple(offered)
        predictor, now_s = control.estimator.upper, self.echo_clock.now_s
        return self.weighing.reorder(offered, predictor, control.length_bucket, now_s)

    def _take_back_offered(self, batch: ScheduleBatch | None) -> None:
        """Settle who left the pool, and put back what was parked or shed."""
        offered, self.policy.offered = set(self.policy.offered), ()
        started = [req for req in batch.reqs if req in offered] if batch is not None else []
        for req in started:
            self.offline_pool.take(req)
            _leave_out_the_wait(req.time_stats)
        if self.weighing is not None:
            self.weighing.note_started(started)
        if offered:
            self.waiting_queue = [req for req in self.waiting_queue if req not in offered]
            self._note_pass(started, len(offered))
        restore_positions(self._kept_positions, batch.reqs if batch is not None else ())
        self._pool_chunks_set_aside()
        self._queue_shed()

    def _note_pass(self, started: Sequence[Req], num_offered: int) -> None:
        """Learn how many passes start, and whether this one ended for want of room."""
        self.offer_size.note(len(started), num_offered)
        gating = self.step_control.planner.gating
        if gating.is_on:
            gating.note_started(_prefills_of(req for req in started if not _was_set_aside(req)))
        if self.is_mixed_chunk:
            return  # decodes stop for nobody, so nobody waits for others
        refusal = self.step_control.refusal
        found_no_room = refusal is not None and refusal.reason in NO_ROOM
        is_full = found_no_room and self.chunked_req is None and len(self.offline_pool) > 0
        self._gathering.note_pass(_prefills_of(started), is_full=is_full)

    def _note_online_pass(self, batch: ScheduleBatch | None, running: ScheduleBatch) -> None:
        """Learn how many online requests a pass starts, and whether others found no room.

        With SGLang's priorities one that comes later may be more urgent than all that wait.
        """
        lots = self.step_control.planner.online_lots
        if not lots.is_on or self.is_mixed_chunk or self.enable_priority_scheduling:
            return
        started = [req for req in batch.reqs if not is_offline(req)] if batch is not None else []
        if started or self.waiting_queue:
            is_full = running.batch_is_full and self.chunked_req is None
            lots.note_pass(_prefills_of(started), is_full=is_full and len(self.waiting_queue) > 0)

    @property
    def _gathering(self) -> Gathering:
        return self.step_control.planner.gathering


def _prefills_of(reqs: Iterable[Req]) -> BatchShape:
    """Their prefills, to the last chunk."""
    prefills = BatchShape()
    for req in reqs:
        prefills.add_prefill(req.seqlen - req.prefix_len, req.prefix_len)
    return prefills


def _leave_out_the_wait(stats: Any) -> None:
    """Of one that ran before it came back to the pool: it did not run while it waited there.

    SGLANG_REQ_RUNNING_TIMEOUT goes by when a request ran first, and would end it at once.
    """
    if 0 < stats.forward_entry_time < stats.wait_queue_entry_time:
        stats.forward_entry_time += time.perf_counter() - stats.wait_queue_entry_time


def _was_set_aside(req: Req) -> bool:
    """Whether this start goes on with one that an online request stopped between two chunks."""
    was_set_aside = getattr(req, "echo_was_set_aside", False)
    req.echo_was_set_aside = False
    return was_set_aside
