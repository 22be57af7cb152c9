"""Prefill admission: online requests first, offline ones in what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import (
    CLIP_MAX_NEW_TOKENS,
    AddReqResult,
    PrefillAdder,
    SchedulePolicy,
)

from echo_sgl.engine.tasks import task_of
from echo_sgl.types import Task

if TYPE_CHECKING:
    from echo_sgl.engine.kv_limits import KvLimits

# A neighbour's prefix is worth one step's wait when it saves at least this much prefill.
MIN_SHARED_TOKENS = 32


def is_offline(req: Req) -> bool:
    return task_of(req) is Task.OFFLINE


class EchoSchedulePolicy(SchedulePolicy):
    """SGLang's own order for the online requests; offline candidates stay behind them.

    `offered` and `offline_chunk_tokens` are set by the scheduler before each prefill pass.
    """

    offered: tuple[Req, ...] = ()
    offline_chunk_tokens: int | None = None

    def calc_priority(
        self, waiting_queue: list[Req], running_batch: Any = None, processed_tokens: int = 0
    ) -> None:
        offered = set(self.offered)
        online = [req for req in waiting_queue if req not in offered]
        super().calc_priority(online, running_batch, processed_tokens)
        waiting_queue[:] = [*online, *self.offered]

    def shortest_prefill_chunk_limit(
        self, chunked_req: Req, waiting_queue: list[Req], budget: int, page_size: int
    ) -> int | None:
        limit = super().shortest_prefill_chunk_limit(chunked_req, waiting_queue, budget, page_size)
        if self.offline_chunk_tokens is None or not is_offline(chunked_req):
            return limit
        chunk = max(1, self.offline_chunk_tokens // page_size) * page_size
        return chunk if limit is None else min(chunk, limit)


class EchoPrefillAdder(PrefillAdder):
    """Retracts offline requests, last started first, when an online one does not fit.

    `offline_tokens_left` bounds what offline requests may prefill in this step; None when
    only the chunk size does. `kv_limits` bounds the KV that they may hold active, of which
    this pass has promised `planned_tokens`. `inflight` are the requests whose prefill is
    launched but not yet in the tree. `yields_to_priorities` says whether SGLang's own
    preemption among online requests was asked for.
    """

    rem_chunk_tokens: int | None
    offline_tokens_left: int | None = None
    kv_limits: KvLimits | None = None
    planned_tokens: int = 0
    inflight: Sequence[Req] = ()
    yields_to_priorities: bool = False

    def add_one_req(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        if is_offline(req):
            return self._add_offline(req, has_chunked_req, truncation_align_size)
        result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        if self.kv_limits is not None and self._was_added(req):
            self.kv_limits.note_online_start(req)
        while result is AddReqResult.NO_TOKEN and not self._was_added(req):
            if not self._can_make_room(req) or not self._retract_last_started():
                break
            # Retraction evicts, perhaps from the prefix that this request had matched.
            req.init_next_round_input(self.tree_cache)
            result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        return result

    def add_chunked_req(self, req: Req) -> Req | None:
        before = self.rem_input_tokens
        unfinished = super().add_chunked_req(req)
        if is_offline(req):
            self._charge_offline(before - self.rem_input_tokens)
        return unfinished

    def preempt_to_schedule(self, req: Req) -> bool:
        """Free a request slot for an online request; an offline one waits."""
        if is_offline(req):
            return False
        if self._retract_last_started():
            return True
        return self.yields_to_priorities and super().preempt_to_schedule(req)

    def _add_offline(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        # SGLang tracks one unfinished chunk only; it has used up what this step had.
        spent = self.offline_tokens_left is not None and self.offline_tokens_left <= 0
        if has_chunked_req or spent or self._prefix_is_being_computed(req):
            return AddReqResult.OTHER
        if self.kv_limits is None:
            return self._add_within_share(req, has_chunked_req, truncation_align_size)
        if self.kv_limits.holds_back(req, self.planned_tokens + self._growth_tokens(req)):
            return AddReqResult.OTHER
        result = self._add_within_share(req, has_chunked_req, truncation_align_size)
        if self._was_added(req):
            # Its prefix is locked and so active from here on; the rest is only promised.
            self.planned_tokens += req.seqlen - req.prefix_len
            self.kv_limits.note_start(req)
        return result

    def _growth_tokens(self, req: Req) -> int:
        """What the offline requests with this one are yet to generate, as SGLang expects it.

        Without this headroom they would outgrow the limit soon and be retracted again. One
        alone may try: most answers end before their limit.
        """
        others = [self.running_batch.reqs[index] for index in self._offline_running()]
        if not others and not self.planned_tokens:
            return 0
        return int(sum(map(self._get_running_request_total_token_offset, [*others, req])))

    def _add_within_share(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        """Admit an offline request with what this step may prefill for offline ones."""
        whole_chunk = self.rem_chunk_tokens
        if whole_chunk is None or self.offline_tokens_left is None:
            return super().add_one_req(req, has_chunked_req, truncation_align_size)
        share = min(whole_chunk, self.offline_tokens_left)
        self.rem_chunk_tokens = share
        result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        used = share - self.rem_chunk_tokens
        self.rem_chunk_tokens = whole_chunk - used
        self._charge_offline(used)
        return result

    def _prefix_is_being_computed(self, req: Req) -> bool:
        """Whether a neighbour in prefix order computes, right now, what this one would.

        Its KV reaches the tree only after its step, so running both at once would compute the
        shared prefix twice; one step later it is a hit.
        """
        num_tokens = req.prefix_len + max(MIN_SHARED_TOKENS, self.page_size)
        most_tokens = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
        if num_tokens > most_tokens or not self.tree_cache.supports_prefix_sharing():
            return False
        start = req.origin_input_ids[:num_tokens]
        return any(
            neighbour.origin_input_ids[:num_tokens] == start
            and neighbour.extra_key == req.extra_key
            and neighbour.cache_salt == req.cache_salt
            for neighbour in (*self.inflight[-1:], *self.can_run_list[-1:])
        )

    def _charge_offline(self, num_tokens: int) -> None:
        if self.offline_tokens_left is not None:
            self.offline_tokens_left -= num_tokens

    def _was_added(self, req: Req) -> bool:
        return bool(self.can_run_list) and self.can_run_list[-1] is req

    def _offline_running(self) -> list[int]:
        """Indices of offline requests in the running batch, in order of their start."""
        return [
            index
            for index, req in enumerate(self.running_batch.reqs)
            if is_offline(req) and not req.finished() and req not in self.preempt_list
        ]

    def _can_make_room(self, req: Req) -> bool:
        """Whether the request could fit if every offline request were retracted.

        Otherwise retraction would throw work away and help nobody.
        """
        freed_tokens = sum(
            self.running_batch.reqs[index].seqlen
            + self._get_running_request_total_token_offset(self.running_batch.reqs[index])
            for index in self._offline_running()
        )
        max_new_tokens = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        needed_tokens = req.seqlen - req.prefix_len + max_new_tokens + self.page_size
        return needed_tokens <= self.rem_total_tokens + freed_tokens

    def _retract_last_started(self) -> bool:
        """Take the offline request that started last out of the running batch."""
        candidates = self._offline_running()
        if not candidates:
            return False
        victim = self.running_batch.reqs[candidates[-1]]
        self.memory_budget.total_offset -= self._get_running_request_total_token_offset(victim)
        retract(self.running_batch, candidates[-1])
        self.preempt_list.append(victim)
        return True


def retract(batch: ScheduleBatch, index: int) -> None:
    """Take a request out of the running batch; what it computed stays in the tree."""
    batch.release_req(index, len(batch.reqs) - 1)
    batch.filter_batch(keep_indices=[i for i in range(len(batch.reqs)) if i != index])


def decode_retraction_order(order: list[int], reqs: list[Req]) -> list[int]:
    """After SGLang ranked who keeps running: online by that rank, then offline by start.

    SGLang retracts from the end, so the offline request that started last goes first.
    """
    online = [index for index in order if not is_offline(reqs[index])]
    return online + [index for index in range(len(reqs)) if is_offline(reqs[index])]
