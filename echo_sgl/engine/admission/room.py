"""Memory and places for online requests: who leaves, and whether that is enough."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, PrefillAdder

from echo_sgl.engine.cache.held_tokens import held_tokens
from echo_sgl.engine.decodes.retraction import gives_up_memory
from echo_sgl.engine.requests.places import kept_tokens
from echo_sgl.engine.requests.refusals import Reason
from echo_sgl.engine.requests.tasks import is_offline
from echo_sgl.engine.requests.terms import terms_of

if TYPE_CHECKING:
    from echo_sgl.engine.steps.step_control import StepControl


class RoomAdder(PrefillAdder):
    """SGLang's admission, which knows who could leave.

    `yields_to_priorities` says whether SGLang's own preemption among online requests was asked
    for, `trades_places` whether their places may change hands by due time. `chunk_waits`: whether a
    request between two chunks found no memory in this pass.
    """

    rem_chunk_tokens: int | None
    chunked_req_limit: int | None
    control: StepControl
    yields_to_priorities: bool = False
    trades_places: bool = False
    chunk_waits: bool = False
    _growth: tuple[int, int, float] | None = None

    # ---- a request between two chunks --------------------------------------------------------

    def _add_fitting_chunk(self, req: Req) -> Req | None:
        """SGLang's `add_chunked_req` with a chunk that memory has room for.

        SGLang looks at a prompt's memory once: in its passes nobody else takes it between two
        chunks. Here decodes grow meanwhile, and others start. Without room nobody starts: SGLang
        counts a chunk in each pass that starts somebody.
        """
        unfinished = super().add_chunked_req(req) if self._fits_chunk_to_room(req) else req
        self.chunk_waits = not self._was_added(req)
        if self.chunk_waits:
            self._refuse_for_memory(req)
        elif unfinished is not None and not is_offline(req):
            # Who starts after an online one is to leave it the room for its rest.
            rest_tokens = len(req.full_untruncated_fill_ids) - req.extend_end
            self.memory_budget.total_offset += self.ceil_paged_tokens(rest_tokens)
        return unfinished

    def _fits_chunk_to_room(self, req: Req) -> bool:
        """Cut the next chunk to the memory there is; offline requests make it for an online one."""
        left_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
        limits = left_tokens, self.rem_chunk_tokens, self.chunked_req_limit
        wanted_tokens = min(limit for limit in limits if limit is not None)
        if wanted_tokens <= 0:
            return False  # decodes that came back take all of a mixed step
        while self.ceil_paged_tokens(wanted_tokens) > (room_tokens := self._room_tokens()):
            if is_offline(req) or not self._retract_one():
                break
            self.req_states = None
        self.chunked_req_limit = min(wanted_tokens, room_tokens)
        return room_tokens > 0

    def _room_tokens(self) -> int:
        """What can be allocated in this step, in whole pages but for the one that may be begun."""
        free_tokens = int(self.memory_budget.remaining_current) - self.page_size
        return max(0, free_tokens // self.page_size * self.page_size)

    # ---- places ------------------------------------------------------------------------------

    def _makes_place(self, req: Req) -> bool:
        """Whether somebody left a slot to an online request: offline ones before online ones.

        Beams need several at once, which SGLang does not count again: they wait for free ones.
        """
        return req.beam_group is None and (
            self._retract_one()
            or (self.yields_to_priorities and super().preempt_to_schedule(req))
            or (self.trades_places and self._give_place(req))
        )

    def _give_place(self, req: Req) -> bool:
        """Let an online decode that is ahead of its due time wait instead of this request.

        Not for one that lacks memory, too: who leaves would wait behind it for nothing, and those
        that left before would find nothing of their KV.
        """
        kept_by_others = self.control.kept_tokens - kept_tokens(req, terms_of(req))
        if self._needed_tokens(req) + kept_by_others > self.rem_total_tokens:
            return False
        leaving = self.control.give_place(self.running_batch, req)
        if leaving is None:
            return False
        # It runs no more: what it is yet to generate needs no room.
        self.memory_budget.total_offset -= self._get_running_request_total_token_offset(leaving)
        self.preempt_list.append(leaving)
        return True

    # ---- memory ------------------------------------------------------------------------------

    def expect_growth_of(self, reqs: Iterable[Req]) -> None:
        """What these are yet to generate needs memory too, though they are in no batch now."""
        for req in reqs:
            offset = self._get_running_request_total_token_offset(req)
            self.memory_budget.total_offset += offset

    def _offline_growth(self) -> tuple[int, float]:
        """How many offline requests run on, and how many tokens SGLang expects of them yet.

        Counted once a pass, and again when one left.
        """
        num_left = len(self.preempt_list)
        if self._growth is None or self._growth[0] != num_left:
            running = [self.running_batch.reqs[index] for index in self._offline_running()]
            tokens = sum(map(self._get_running_request_total_token_offset, running))
            self._growth = num_left, len(running), tokens
        return self._growth[1:]

    def _refuse_for_memory(self, req: Req) -> None:
        free_tokens = self.token_to_kv_pool_allocator.available_size()
        evictable_tokens = self.tree_cache.evictable_size()
        self.control.refuse(
            Reason.MEMORY,
            req.rid,
            needed_tokens=self._needed_tokens(req),
            free_tokens=free_tokens,
            evictable_tokens=evictable_tokens,
            promised_tokens=free_tokens + evictable_tokens - self.rem_total_tokens,
        )

    def _forget_state(self, req: Req) -> None:
        """A recurrent state that was to be copied for it may be another one's now; as SGLang does
        for whom it refuses."""
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
        if req.kv.holds_mamba and req.session is None:
            self.tree_cache.req_to_token_pool.mamba_allocator.free(
                req.kv.mamba_pool_idx.unsqueeze(-1)
            )
            req.kv.mamba_pool_idx = None

    def _needed_tokens(self, req: Req) -> int:
        """What SGLang asks for: what is to prefill, and what the request is yet to generate."""
        return int(req.seqlen - req.prefix_len) + self._answer_tokens(req)

    def _answer_tokens(self, req: Req) -> int:
        left_tokens = max(0, req.sampling_params.max_new_tokens - len(req.output_ids))
        return int(min(left_tokens, CLIP_MAX_NEW_TOKENS) + self.page_size)

    def _offline_running(self) -> list[int]:
        """Indices of offline requests in the running batch, in order of their start."""
        return [
            index
            for index, req in enumerate(self.running_batch.reqs)
            if is_offline(req) and not req.finished() and req not in self.preempt_list
        ]

    def _can_make_room(self, req: Req) -> bool:
        """Whether the request could fit if every offline request that may be were retracted.

        Otherwise retraction would throw work away and help nobody.
        """
        reqs = [self.running_batch.reqs[index] for index in self._offline_running()]
        running = list(filter(gives_up_memory, reqs))
        parked = filter(gives_up_memory, self.control.parked)
        freed_tokens = sum(map(self._get_running_request_total_token_offset, running))
        freed_tokens += held_tokens(self.tree_cache.echo_core, [*running, *parked])
        return self._needed_tokens(req) <= self.rem_total_tokens + freed_tokens

    def _retract_one(self) -> bool:
        """Take memory from an offline request: parked before running, least work lost first."""
        running = [self.running_batch.reqs[index] for index in self._offline_running()]
        # Of one without token ids SGLang forgets what it generated when it is retracted.
        growth = {req: self._get_running_request_total_token_offset(req) for req in running}
        victim = self.control.retract_one(self.running_batch, running)
        if victim is None:
            return False
        self.memory_budget.total_offset -= growth.get(victim, 0)
        self.preempt_list.append(victim)
        return True

    def _was_added(self, req: Req) -> bool:
        return bool(self.can_run_list) and self.can_run_list[-1] is req
