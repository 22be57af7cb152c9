"""What the pool offers to a prefill pass, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from echo_sgl.batch_shape import BatchShape
from echo_sgl.config import OfflineConfig
from echo_sgl.engine.admission import is_offline
from echo_sgl.engine.pool_intake import PoolIntake
from echo_sgl.engine.refusals import NO_ROOM, Reason
from echo_sgl.engine.settings import active_config
from echo_sgl.engine.weighing import Weighing
from echo_sgl.policies.gathering import Gathering
from echo_sgl.policies.offer_size import OfferSize


class Offers(PoolIntake):
    """SGLang's scheduler whose prefill passes look at a few of the pool's requests.

    They stand behind the online ones in SGLang's queue for the time of a pass; what was not
    admitted stays in the pool.
    """

    offline_config: OfflineConfig
    offer_size: OfferSize
    weighing: Weighing | None
    _parked_chunks: list[Req]
    _shed: list[Req]

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

    def _keeps_chunk_waiting(self, running_batch: ScheduleBatch) -> bool:
        """Whether an offline request waits for its next chunk while all others decode."""
        req = self.chunked_req
        if req is None or not is_offline(req) or self.waiting_queue:
            return False
        if self.kv_limits.excess_tokens(self._num_offline(running_batch)):
            return False  # a pass sheds
        decodes = self._decodes_of_mixed_step(running_batch)
        return self.step_control.keeps_chunk_waiting(req, decodes, self.page_size)

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
                self._gathering.note_pass(BatchShape(), is_full=len(self.offline_pool) > 0)
        offered = self.offline_pool.upcoming(max(0, limit))
        if self.weighing is None:
            return tuple(offered)
        return self.weighing.reorder(offered, self.step_control.planner, self.echo_clock.now_s)

    def _take_back_offered(self, batch: ScheduleBatch | None) -> None:
        """Settle who left the pool, and put back what was parked or shed."""
        offered, self.policy.offered = set(self.policy.offered), ()
        started = [req for req in batch.reqs if req in offered] if batch is not None else []
        for req in started:
            self.offline_pool.take(req)
        if offered:
            self.waiting_queue = [req for req in self.waiting_queue if req not in offered]
            self._note_pass(started, len(offered))
        for req in self._parked_chunks:
            self.step_control.counts.num_prefill_parks += 1
            self._pool(req, resumed=True)
        for req in self._shed:
            self._add_request_to_queue(req, is_retracted=True)
        self._parked_chunks, self._shed = [], []

    def _note_pass(self, started: Sequence[Req], num_offered: int) -> None:
        """Learn how many passes start, and whether this one ended for want of room."""
        self.offer_size.note(len(started), num_offered)
        if self.is_mixed_chunk:
            return  # decodes stop for nobody, so nobody waits for others
        refusal = self.step_control.refusal
        found_no_room = refusal is not None and refusal.reason in NO_ROOM
        is_full = found_no_room and self.chunked_req is None and len(self.offline_pool) > 0
        prefills = BatchShape()
        for req in started:
            prefills.add_prefill(req.seqlen - req.prefix_len, req.prefix_len)
        self._gathering.note_pass(prefills, is_full=is_full)

    @property
    def _gathering(self) -> Gathering:
        return self.step_control.planner.gathering
