"""Prefill admission: online requests first, offline ones in what they leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult

from echo_sgl.batch_shape import BatchShape
from echo_sgl.engine.admission.room import RoomAdder
from echo_sgl.engine.admission.shared_prefixes import begins_like, shared_tokens
from echo_sgl.engine.requests.places import queued
from echo_sgl.engine.requests.refusals import Reason
from echo_sgl.engine.requests.tasks import is_held_back, is_offline
from echo_sgl.policies.prefills.first_tokens import MIN_SHARED_TOKENS, Joining

if TYPE_CHECKING:
    from echo_sgl.engine.cache.kv_limits import KvLimits

# For a prefix that a step in flight computes, and for one beside it.
MAX_PREFIX_WAITS = 3


class EchoPrefillAdder(RoomAdder):
    """Retracts offline requests, parked ones first, when an online one does not fit.

    `offline_tokens_left` bounds what offline requests may prefill in this step; None when
    only the chunk size does. `kv_limits` bounds the KV that they may hold active, of which
    this pass has promised `planned_tokens`. `inflight` are the requests whose prefill is
    launched but not yet in the tree. `shape` is the step as it stands, held against the limit by
    `control`; `first_due_s` when the first of the online requests is due that it prefills to the
    end.
    """

    offline_tokens_left: int | None = None
    kv_limits: KvLimits | None = None
    shape: BatchShape
    planned_tokens: int = 0
    first_due_s: float = math.inf
    inflight: Sequence[Req] = ()

    def add_one_req(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        if self.chunk_waits or (self.can_run_list and self.can_run_list[-1].beam_group is not None):
            return AddReqResult.OTHER  # beams take their slots when the prefill has ended
        if self.rem_chunk_tokens is not None and self.rem_chunk_tokens <= 0:
            return AddReqResult.OTHER  # SGLang asks on where memory has run out as well
        add = self._add_offline if is_held_back(req) else self._add_online_making_room
        result = add(req, has_chunked_req, truncation_align_size)
        if result is AddReqResult.NO_TOKEN and not self._was_added(req):
            self._refuse_for_memory(req)
        return result

    def _add_online_making_room(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        result = self._add_online(req, has_chunked_req, truncation_align_size)
        while result is AddReqResult.NO_TOKEN and not self._was_added(req):
            if not self._can_make_room(req) or not self._retract_one():
                break
            # Retraction evicts, perhaps from the prefix that this request had matched; and what
            # SGLang noted of all requests' lengths (without a tree) holds no more.
            self._forget_state(req)
            req.init_next_round_input(self.tree_cache)
            self.req_states = None
            result = self._add_online(req, has_chunked_req, truncation_align_size)
        # Who comes back finds what it computed itself: no prompt that others share, and no burst.
        if self.kv_limits is not None and self._was_added(req) and not req.output_ids:
            self.kv_limits.note_online_start(req)
        return result

    def _add_online(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        with self.control.own_time:
            if self._starts_later(req) or self._waits_for_prefix(req):
                return AddReqResult.OTHER
            chunk_tokens = self.control.planner.online_chunk_tokens(
                self.shape,
                cached_tokens=_cached_tokens(req),
                max_tokens=_new_tokens(req),
                page_size=self.page_size,
            )
        if has_chunked_req and not self._fits_whole(req, chunk_tokens):
            # One request at a time may be between chunks; this one comes after it.
            return AddReqResult.OTHER
        return self._add_chunk(req, chunk_tokens, has_chunked_req, truncation_align_size)

    def _starts_later(self, req: Req) -> bool:
        """Whether it would make the first token of an online request late that is in the step."""
        planner, first_due_s = self.control.planner, self.first_due_s
        if math.isinf(first_due_s):
            return False
        due_s, new_tokens = queued(req).due_s, _new_tokens(req)
        most_tokens = new_tokens if self.rem_chunk_tokens is None else self.rem_chunk_tokens
        joining = Joining(min(new_tokens, most_tokens), _cached_tokens(req), due_s)
        if not planner.online_starts_later(self.shape, joining, first_due_s=first_due_s):
            return False
        due_in_s = first_due_s - planner.view.now_s
        self.control.refuse(Reason.STEP, req.rid, first_due_in_s=due_in_s)
        return True

    def _waits_for_prefix(self, req: Req) -> bool:
        """Whether it is sooner, or no later, once this step has computed what it shares with it."""
        planner, neighbours = self.control.planner, (*self.inflight, *self.can_run_list)
        if not (neighbours and planner.shares_online and self.tree_cache.supports_prefix_sharing()):
            return False
        cached_tokens = _cached_tokens(req)
        # Some look alike and share nothing, as embeddings in place of tokens: they wait in vain.
        num_waits = getattr(req, "echo_prefix_waits", {}).get(cached_tokens, 0)
        if num_waits >= MAX_PREFIX_WAITS:
            return False
        shared = shared_tokens(req, cached_tokens, neighbours, self.page_size)
        joining = Joining(_new_tokens(req), cached_tokens, queued(req).due_s)
        if not planner.online_waits_for_prefix(self.shape, joining, shared):
            return False
        req.echo_prefix_waits = {cached_tokens: num_waits + 1}
        self.control.refuse(Reason.PREFIX, req.rid)
        return True

    def _fits_whole(self, req: Req, chunk_tokens: int) -> bool:
        """Whether neither the limit nor what is left of SGLang's chunk would cut it.

        A request between chunks leaves some of the chunk when the limit cut it shorter.
        """
        need, left = _new_tokens(req), self.rem_chunk_tokens
        return need <= chunk_tokens and (left is None or self.ceil_paged_tokens(need) <= left)

    def add_chunked_req(self, req: Req) -> Req | None:
        before = self.rem_input_tokens
        unfinished = self._add_fitting_chunk(req)
        if self._was_added(req):
            self._note_added(req, ends=unfinished is None)
            self.planned_tokens += req.extend_len if is_offline(req) else 0
        if is_offline(req):
            self._charge_offline(before - self.rem_input_tokens)
        return unfinished

    def preempt_to_schedule(self, req: Req) -> bool:
        """Free a request slot for an online request; an offline one waits."""
        if not (is_held_back(req) or self.chunk_waits) and self._makes_place(req):
            return True
        sitting_out = len(self.control.parked) + len(self.control.without_turn)
        num_running = len(self.running_batch.reqs) + sitting_out
        self.control.refuse(Reason.SLOT, req.rid, num_running=num_running)
        return False

    def _add_offline(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        with self.control.own_time:
            is_refused = self._refuses(req, has_chunked_req)
        if is_refused:
            return AddReqResult.OTHER
        result = self._add_within_limit(req, has_chunked_req, truncation_align_size)
        if self.kv_limits is None:
            return result
        if self._was_added(req):
            # Its prefix is locked and so active from here on; the rest is only promised.
            self.planned_tokens += req.seqlen - req.prefix_len
            self.kv_limits.note_start(req)
        elif result is AddReqResult.NO_TOKEN and self._is_passed_over(req, self.kv_limits):
            self._refuse_for_memory(req)
            return AddReqResult.OTHER  # not that the batch is full: those behind it may fit
        return result

    def _refuses(self, req: Req, has_chunked_req: bool) -> bool:
        """Whether an offline request is to wait, however much time and memory the step has."""
        # SGLang tracks one unfinished chunk only; it has used up what this step had.
        spent = self.offline_tokens_left is not None and self.offline_tokens_left <= 0
        if has_chunked_req or spent:
            self.control.refuse(Reason.ORDER, req.rid)
            return True
        if self._prefix_is_being_computed(req):
            self.control.refuse(Reason.PREFIX, req.rid)
            return True
        return self.kv_limits is not None and self._refuses_for_reserve(req, self.kv_limits)

    def _refuses_for_reserve(self, req: Req, limits: KvLimits) -> bool:
        """Whether offline requests would hold more than the reserve leaves with this one, too.

        Without headroom for what they are yet to generate they would outgrow it soon and be
        retracted again. One alone may try: most answers end before their limit.
        """
        own_growth_tokens = self._get_running_request_total_token_offset(req)
        # SGLang has summed up what all that run are yet to generate, online ones included.
        most_tokens = int(self.memory_budget.total_offset + own_growth_tokens)
        if limits.has_room(req, self.planned_tokens + most_tokens):
            return False
        num_others, num_parked = self._num_others_offline(), len(self.control.parked)
        planned_tokens = self.planned_tokens
        if num_others > num_parked:
            planned_tokens += int(self._offline_growth()[1] + own_growth_tokens)
        num_offline = 1 + num_others
        if not limits.holds_back(req, planned_tokens, num_offline):
            return False
        facts = limits.facts(req, planned_tokens, num_offline)
        self.control.refuse(Reason.RESERVE, req.rid, **facts)
        return True

    def _is_passed_over(self, req: Req, limits: KvLimits) -> bool:
        """Whether those behind an offline request that lacks memory need not wait for it, since no
        offline one would make it room by ending.
        """
        if self._num_others_offline():
            return False
        limits.note_shortage(req, self._answer_tokens(req) + int(self.memory_budget.total_offset))
        return not limits.could_start(req)

    def _num_others_offline(self) -> int:
        """How many offline requests hold memory, or are to in this step."""
        num_running, _ = self._offline_growth()
        num_starting = sum(map(is_offline, self.can_run_list))
        return num_running + num_starting + len(self.control.parked)

    def _add_within_limit(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        """Admit an offline request with what the limits leave to prefill in this step."""
        need = most = _new_tokens(req)
        if self.offline_tokens_left is not None:
            most = min(most, self.offline_tokens_left)
        planner = self.control.planner
        with self.control.own_time:
            allowed = planner.offline_chunk_tokens(
                self.shape,
                cached_tokens=_cached_tokens(req),
                max_tokens=most,
                page_size=self.page_size,
            )
        whole_or_nothing = self.rem_chunk_tokens is None and allowed < need
        if not allowed or (whole_or_nothing and planner.view.is_present):
            self.control.refuse_for_time(
                req.rid, self.shape, max_tokens=most, cached=_cached_tokens(req)
            )
            # Where no prompt may be cut, a shorter one behind it may fit. SGLang takes a recurrent
            # state back only where its loop ends.
            goes_on = whole_or_nothing and not self.tree_cache.supports_mamba()
            return AddReqResult.CONTINUE if goes_on else AddReqResult.OTHER
        before = self.rem_input_tokens
        result = self._add_chunk(req, allowed, has_chunked_req, truncation_align_size)
        self._charge_offline(before - self.rem_input_tokens)
        return result

    def _add_chunk(
        self,
        req: Req,
        chunk_tokens: int,
        has_chunked_req: bool,
        truncation_align_size: int | None,
    ) -> AddReqResult:
        """SGLang's admission with at most `chunk_tokens` of what is left of the chunk."""
        whole_chunk = share = self.rem_chunk_tokens
        if whole_chunk is not None and chunk_tokens < _new_tokens(req):
            # Only then: SGLang counts whole pages, and one page more than the prompt's tokens.
            share = min(whole_chunk, chunk_tokens)
        self.rem_chunk_tokens = share
        result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        if whole_chunk is not None and share is not None:
            self.rem_chunk_tokens = whole_chunk - (share - (self.rem_chunk_tokens or 0))
        if not self._was_added(req):
            return result
        ends = self.new_chunked_req is not req
        self._note_added(req, ends=ends)
        # One request at a time may be between chunks; else go on while the whole chunk lasts.
        return self.budget_state() if ends else AddReqResult.OTHER

    def _note_added(self, req: Req, *, ends: bool) -> None:
        """The step prefills a part of its prompt; `ends`: the last one."""
        self.shape.add_prefill(req.extend_len, req.prefix_len)
        if ends and not is_offline(req):
            self.first_due_s = min(self.first_due_s, queued(req).due_s)

    def _prefix_is_being_computed(self, req: Req) -> bool:
        """Whether a neighbour in prefix order computes, right now, what this one would.

        Its KV reaches the tree only after its step, so running both at once would compute the
        shared prefix twice; one step later it is a hit.
        """
        num_tokens = req.prefix_len + max(MIN_SHARED_TOKENS, self.page_size)
        most_tokens = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
        if num_tokens > most_tokens or not self.tree_cache.supports_prefix_sharing():
            return False
        return begins_like(req, num_tokens, (*self.inflight[-1:], *self.can_run_list[-1:]))

    def _charge_offline(self, num_tokens: int) -> None:
        if self.offline_tokens_left is not None:
            self.offline_tokens_left -= num_tokens


def _cached_tokens(req: Req) -> int:
    """What a request that is to start finds on the device and in the host tier."""
    return int(req.prefix_len + req.host_hit_length)


def _new_tokens(req: Req) -> int:
    return len(req.full_untruncated_fill_ids) - _cached_tokens(req)


def decode_retraction_order(order: list[int], reqs: list[Req]) -> list[int]:
    """After SGLang ranked who keeps running: online by that rank, then offline by start.

    SGLang retracts from the end, so the offline request that started last goes first.
    """
    online = [index for index in order if not is_offline(reqs[index])]
    return online + [index for index in range(len(reqs)) if is_offline(reqs[index])]
