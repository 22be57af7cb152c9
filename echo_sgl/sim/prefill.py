"""Which prefills join a simulated step: online first, offline ones in what they leave.

Follows SGLang's `PrefillAdder` and `engine/admission/prefill_adder.py`: the first request that is
refused ends the pass, one prefill at a time may be between chunks.
"""

from __future__ import annotations

import math
from enum import Enum, auto

from echo_sgl.batch_shape import BatchShape
from echo_sgl.policies.order.candidates import Candidate, Victims, length_bucket, mean_bucket, rank
from echo_sgl.policies.prefills.first_tokens import MIN_SHARED_TOKENS, Joining
from echo_sgl.sim.scheduler import SimScheduler, StepPlan
from echo_sgl.sim.shared_prefixes import begins_like, shared_tokens
from echo_sgl.sim.workload import SimRequest

# As in the engine: see `weighing`.
MAX_PASSED_OVER = 8


class Verdict(Enum):
    """What became of a request in this pass."""

    ADDED = auto()
    NO_MEMORY = auto()
    RESERVED = auto()
    REFUSED = auto()


class PrefillPass:
    """One pass over who could be prefilled in this step."""

    def __init__(self, scheduler: SimScheduler) -> None:
        self._scheduler, self._kv = scheduler, scheduler.kv
        config = scheduler.config
        self._planner, self._page = scheduler.planner, config.page_tokens
        # Decodes that ride along take of the step's tokens, and of the memory.
        self._is_mixed = config.enable_mixed_chunk and not scheduler.lacks_room
        num_mixed = scheduler.num_running if self._is_mixed else 0
        self._chunk_left = config.chunked_prefill_tokens - num_mixed
        self._input_left = config.max_prefill_tokens - num_mixed
        self._shape = scheduler.decode_shape() if self._is_mixed else BatchShape()
        self._promised_tokens = num_mixed
        self._planned_offline_tokens = 0
        self._offline_left = self._offline_most()
        self._prefills: list[tuple[SimRequest, int, int]] = []
        self._in_line: SimRequest | None = None
        self._is_full = False
        self._first_due_s = math.inf

    def run(self) -> StepPlan | None:
        """The prefills of this step, with their memory taken; None without any."""
        scheduler = self._scheduler
        was_full = scheduler.is_full and scheduler.num_running > 0
        set_aside, online_waits = scheduler.park_chunk(), len(scheduler.waiting) > 0
        scheduler.shed()
        offered = [] if was_full else self._offer()
        goes_on = scheduler.chunked is None or self._add_chunk_of(scheduler.chunked)
        num_started = self._add_offline_of(offered) if goes_on and self._add_online() else 0
        if offered:
            scheduler.offer_size.note(num_started, len(offered))
            in_line = self._in_line
            if num_started and in_line is not None and in_line not in offered[:num_started]:
                in_line.num_passed_over += 1
            self._note_pass(num_started)
        if online_waits and self._planner.online_lots.is_on:
            self._note_online_pass()
        if set_aside is not None:
            scheduler.pool.add(set_aside, resumed=True)
        if not self._prefills:
            scheduler.is_full = scheduler.is_full or was_full
            return None
        return self._plan()

    def _note_pass(self, num_started: int) -> None:
        started, new = BatchShape(), BatchShape()
        for request, _, cached in self._prefills[len(self._prefills) - num_started :]:
            started.add_prefill(request.seq_tokens - cached, cached)
            if not request.was_set_aside:
                new.add_prefill(request.seq_tokens - cached, cached)
            request.was_set_aside = False
        self._planner.gating.note_started(new)
        scheduler = self._scheduler
        if scheduler.config.enable_mixed_chunk:
            return  # decodes stop for nobody, so nobody waits for others
        is_full = self._is_full and scheduler.chunked is None and len(scheduler.pool) > 0
        self._planner.gathering.note_pass(started, is_full=is_full)

    def _note_online_pass(self) -> None:
        scheduler, started = self._scheduler, BatchShape()
        for request, new, cached in self._prefills:
            if not request.is_offline:
                started.add_prefill(new, cached)
        is_full = self._is_full and bool(scheduler.waiting) and scheduler.chunked is None
        self._planner.online_lots.note_pass(started, is_full=is_full)

    def _plan(self) -> StepPlan:
        scheduler = self._scheduler
        decodes = self._is_mixed and scheduler.num_running > 0
        if decodes:
            self._kv.take(scheduler.online.growth_tokens + scheduler.offline.growth_tokens)
        return StepPlan(self._shape.row(), self._prefills, decodes=decodes)

    # ---- who -------------------------------------------------------------------------------

    def _offer(self) -> list[SimRequest]:
        """The offline candidates of this pass, the best of the first few first."""
        scheduler = self._scheduler
        if not len(scheduler.pool):
            return []
        steps, offline = scheduler.config.echo.steps, scheduler.config.echo.offline
        limit = scheduler.offer_size.limit(self._free_slots(), steps.candidates)
        if offline.max_running_requests:
            limit = min(limit, offline.max_running_requests - scheduler.num_offline)
            if limit <= 0:
                self._planner.gathering.note_pass(BatchShape(), is_full=True)
        limit = scheduler.num_worth_starting(max(0, limit))
        offered = scheduler.pool.upcoming(limit, scheduler.offline_limit_tokens(1))
        if scheduler.config.echo.cache.order == "stock":
            return offered  # SGLang's own tree does not tell what weighing asks
        return self._weighed(offered, steps.candidates)

    def _free_slots(self) -> int:
        scheduler = self._scheduler
        taken = scheduler.num_present + len(self._prefills)
        return scheduler.config.max_running_requests - taken

    def _weighed(self, offered: list[SimRequest], num_candidates: int) -> list[SimRequest]:
        head = offered[:num_candidates]
        if len(head) < 2 or not self._planner.estimator.is_ready:
            return offered
        victims = Victims(self._kv.tree.next_victims())
        candidates = [self._candidate(one, victims) for one in head]
        running = self._scheduler.online, self._scheduler.offline
        bucket = mean_bucket(sum(map(len, running)), sum(one.seq_tokens for one in running))
        ranked = rank(candidates, BatchShape(), self._planner.estimator.upper, bucket=bucket)
        places = {rid: place for place, rid in enumerate(ranked)}
        self._in_line = head[0]
        head.sort(key=lambda one: (one.num_passed_over < MAX_PASSED_OVER, places[one.rid]))
        return [*head, *offered[len(head) :]]

    def _candidate(self, request: SimRequest, victims: Victims) -> Candidate:
        scheduler, tokens = self._scheduler, request.seq_tokens
        cached = min(self._kv.tree.cached_tokens(request.blocks), tokens - 1)
        new_tokens = tokens - cached
        return Candidate(
            rid=request.rid,
            new_tokens=new_tokens,
            cached_tokens=cached,
            evicted_needed_tokens=victims.needed_tokens(new_tokens - self._kv.free_tokens),
            laxity_s=scheduler.pool.laxity_s(request, scheduler.now_s),
            length_bucket=length_bucket(tokens),
        )

    # ---- chunks and online -----------------------------------------------------------------

    def _add_chunk_of(self, request: SimRequest) -> bool:
        """The next chunk of the request that is between chunks; without memory nobody starts."""
        most = min(request.left_tokens, max(self._page, self._budget()))
        if request.is_offline:
            most = min(most, max(self._page, self._offline_left // self._page * self._page))
            room = self._offline_room(request, most)
        else:
            room = self._online_room(request, most)
        if new := self._cut_to_memory(request, room or min(most, self._page)):
            self._join(request, new)
        return new > 0

    def _cut_to_memory(self, request: SimRequest, new: int) -> int:
        """As much of a chunk as there is memory for; offline requests make it for an online one."""
        while (room := self._room_tokens()) < self._kv.whole_pages(new):
            if request.is_offline or not self._scheduler.retract_first():
                return min(new, room)
        return new

    def _room_tokens(self) -> int:
        free_tokens = self._kv.available_tokens - self._promised_tokens - self._page
        return max(0, free_tokens // self._page * self._page)

    def _add_online(self) -> bool:
        """Add those that wait; whether the pass may go on to offline ones."""
        scheduler = self._scheduler
        while scheduler.waiting:
            request = scheduler.waiting[0]
            if self._budget() <= 0:
                return False
            if self._free_slots() <= 0 and not self._makes_place(request):
                scheduler.is_full = self._is_full = True
                return False
            is_new = request.cached_tokens is None
            verdict = self._try_add(request)
            while verdict is Verdict.NO_MEMORY and self._can_make_room(request):
                if not scheduler.retract_first():
                    break
                verdict = self._try_add(request)
            if verdict is not Verdict.ADDED:
                is_full = verdict is Verdict.NO_MEMORY
                scheduler.is_full = scheduler.is_full or is_full
                self._is_full = is_full
                scheduler.results.num_memory_waits += is_full
                return False
            scheduler.waiting.popleft()
            request.waiting_since_s = None
            tokens = request.seq_tokens
            if is_new:
                self._kv.tree.working_set.observe_hits(request.prefix_tokens, tokens)
                self._planner.note_online_start(scheduler.now_s, tokens - request.prefix_tokens)
            if scheduler.chunked is request:
                return False
        return scheduler.chunked is None and self._budget() > 0

    def _makes_place(self, request: SimRequest) -> bool:
        """Whether somebody left a place to an online request: an offline one, or an online decode
        that is ahead of its due time, if there is memory for the request."""
        scheduler = self._scheduler
        if scheduler.retract_first():
            return True
        kept_tokens = scheduler.waiting.kept_tokens(request)
        has_memory = self._needed_tokens(request) + kept_tokens <= self._rem_total_tokens()
        return has_memory and scheduler.gives_way(request)

    def _can_make_room(self, request: SimRequest) -> bool:
        """Whether it could fit if every offline request were retracted."""
        scheduler = self._scheduler
        held_tokens = self._kv.held_tokens([*scheduler.offline, *scheduler.parked.values()])
        freed = held_tokens + scheduler.growth_of(scheduler.offline)
        return self._needed_tokens(request) <= self._rem_total_tokens() + freed

    def _needed_tokens(self, request: SimRequest) -> int:
        cached = min(self._kv.tree.cached_tokens(request.blocks), request.seq_tokens - 1)
        return request.seq_tokens - cached + request.planned_tokens + self._page

    # ---- offline ---------------------------------------------------------------------------

    def _add_offline_of(self, offered: list[SimRequest]) -> int:
        """Start them in their order until one is refused; how many started."""
        scheduler = self._scheduler
        for num_started, request in enumerate(offered):
            if scheduler.chunked is not None or self._budget() <= 0:
                return num_started
            is_full = self._free_slots() <= 0
            verdict = Verdict.REFUSED if is_full else self._try_add(request)
            if verdict is not Verdict.ADDED:
                if verdict is Verdict.NO_MEMORY:
                    is_full = not self._is_passed_over(request)
                scheduler.is_full = scheduler.is_full or is_full
                self._is_full = is_full or verdict is Verdict.RESERVED
                return num_started
            scheduler.pool.take(request)
            request.needed_tokens = 0
        return len(offered)

    def _is_held_back(self, request: SimRequest) -> bool:
        """Whether the reserve keeps an offline request from starting."""
        scheduler = self._scheduler
        growth = 0.0
        if scheduler.offline or self._planned_offline_tokens:
            growth = scheduler.growth_of(scheduler.offline, request.planned_tokens)
        new = request.seq_tokens - self._kv.tree.locked_prefix_tokens(request.blocks)
        planned = self._planned_offline_tokens + int(growth)
        num_offline = scheduler.num_offline + (self._planned_offline_tokens > 0) + 1
        limit_tokens = scheduler.offline_limit_tokens(num_offline)
        is_held_back = scheduler.offline_tokens + planned + new > limit_tokens
        if is_held_back:
            request.needed_tokens = new
        return is_held_back

    def _is_passed_over(self, request: SimRequest) -> bool:
        """Whether nobody need wait for one that lacks memory, since it is the only offline one."""
        scheduler = self._scheduler
        if scheduler.num_offline or self._planned_offline_tokens:
            return False
        new = request.seq_tokens - self._kv.tree.locked_prefix_tokens(request.blocks)
        others_tokens = int(self._kv.available_tokens - self._rem_total_tokens())
        needed_tokens = new + request.planned_tokens + self._page + others_tokens
        request.needed_tokens = min(needed_tokens, scheduler.reserve.most_tokens)
        return request.needed_tokens > scheduler.offline_limit_tokens(num_offline=1)

    def _prefix_is_being_computed(self, request: SimRequest, prefix_tokens: int) -> bool:
        """Whether a neighbour computes now what this one would: one step later it is a hit."""
        wanted = prefix_tokens + max(MIN_SHARED_TOKENS, self._page)
        if wanted > request.seq_tokens - 1:
            return False
        neighbours = [one for one, _, _ in self._prefills[-1:]] + self._scheduler.launched[-1:]
        return begins_like(request, wanted, neighbours)

    # ---- admission -------------------------------------------------------------------------

    def _try_add(self, request: SimRequest) -> Verdict:
        """SGLang's `add_one_req`; a request that is not added stays as it was."""
        if request.is_offline and self._is_held_back(request):
            return Verdict.RESERVED
        prefix_tokens = self._kv.match(request)
        verdict = self._admit(request, prefix_tokens)
        if verdict is not Verdict.ADDED:
            self._kv.unmatch(request)
        return verdict

    def _admit(self, request: SimRequest, prefix_tokens: int) -> Verdict:
        need = request.seq_tokens - prefix_tokens
        if request.is_offline and self._prefix_is_being_computed(request, prefix_tokens):
            return Verdict.REFUSED
        room = self._rem_total_tokens() + self._kv.overlocked_tokens(request)
        if need + request.planned_tokens + self._page >= room:
            return Verdict.NO_MEMORY
        budget = min(self._budget(), self._offline_left) if request.is_offline else self._budget()
        most = min(need, budget)
        if request.is_offline:
            new = self._offline_room(request, most)
        elif self._comes_later(request, need, most, prefix_tokens):
            return Verdict.REFUSED
        else:
            new = self._online_room(request, most)
        if new < need:
            # One request at a time may be between chunks.
            new = new // self._page * self._page if self._scheduler.chunked is None else 0
        if new <= 0:
            return Verdict.REFUSED
        self._join(request, new)
        if request.cached_tokens is None:
            # One that comes back finds what it computed itself.
            request.cached_tokens = prefix_tokens
            self._scheduler.results.note_start(request)
        if request.is_offline:
            self._planned_offline_tokens += need
        return Verdict.ADDED

    def _join(self, request: SimRequest, new: int) -> None:
        cached = request.computed_tokens
        self._kv.compute(request, new)
        self._shape.add_prefill(new, cached)
        self._prefills.append((request, new, cached))
        self._chunk_left -= new
        self._input_left -= new
        self._offline_left -= new if request.is_offline else 0
        scheduler = self._scheduler
        if request.computed_tokens < request.seq_tokens:
            scheduler.chunked = request
            # What is left of it comes with its next chunks.
            self._promised_tokens += request.left_tokens
            return
        if scheduler.chunked is request:
            scheduler.chunked = None
        if not request.is_offline:
            self._first_due_s = min(self._first_due_s, scheduler.waiting.due_s(request))
        self._promised_tokens += request.planned_tokens

    def _budget(self) -> int:
        return min(self._chunk_left, self._input_left)

    def _offline_most(self) -> int:
        scheduler = self._scheduler
        limit = scheduler.config.echo.offline.max_prefill_tokens_per_step
        is_beside = scheduler.online_prefill_waits() or bool(scheduler.online)
        return limit if limit and is_beside else self._chunk_left

    def _rem_total_tokens(self) -> float:
        """What can still be promised, SGLang's estimate of running answers taken off."""
        scheduler = self._scheduler
        left_out_tokens = sum(one.planned_tokens for one in scheduler.without_turn)
        growth = scheduler.growth_of(scheduler.online, left_out_tokens)
        growth += scheduler.growth_of(scheduler.offline)
        return self._kv.available_tokens - growth - self._promised_tokens

    def _comes_later(self, request: SimRequest, need: int, most: int, cached_tokens: int) -> bool:
        """Whether an online request waits for the next step, for others' sake or its own."""
        due_s, planner = self._scheduler.waiting.due_s(request), self._planner
        if math.isfinite(self._first_due_s) and planner.online_starts_later(
            self._shape, Joining(most, cached_tokens, due_s), first_due_s=self._first_due_s
        ):
            return True
        if not planner.shares_online:
            return False
        neighbours = [one for one, _, _ in self._prefills] + self._scheduler.launched
        shared = shared_tokens(request, cached_tokens, neighbours, self._page)
        joining = Joining(need, cached_tokens, due_s)
        return planner.online_waits_for_prefix(self._shape, joining, shared)

    def _online_room(self, request: SimRequest, most: int) -> int:
        return self._planner.online_chunk_tokens(
            self._shape,
            cached_tokens=request.computed_tokens,
            max_tokens=most,
            page_size=self._page,
        )

    def _offline_room(self, request: SimRequest, most: int) -> int:
        return self._planner.offline_chunk_tokens(
            self._shape,
            cached_tokens=request.computed_tokens,
            max_tokens=most,
            page_size=self._page,
        )
