"""One simulated scheduler: SGLang's steps, and Echo's objects deciding what is in them.

Follows `engine/scheduler.py` and `engine/steps/step_control.py` call by call. It knows of a request
what the engine knows; how long an answer will be is asked by `server.py` only, which passes
the steps that are left to `DecodeGroup` and never to a policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from echo_sgl.batch_shape import BatchRow, BatchShape, SummedShape
from echo_sgl.estimators.kv_demand import create_kv_demand
from echo_sgl.policies.cache.preemption import Holder, preemption_order
from echo_sgl.policies.cache.reserve import BurstReserve
from echo_sgl.policies.cache.working_set import WorkingSet
from echo_sgl.policies.order.offer_size import OfferSize
from echo_sgl.policies.planners import create_step_planner
from echo_sgl.sim.decode_control import SimDecodeControl
from echo_sgl.sim.decode_group import DecodeGroup
from echo_sgl.sim.estimator_feed import EstimatorFeed
from echo_sgl.sim.kv_pool import KvPool, OutOfKvError
from echo_sgl.sim.new_token_ratio import NewTokenRatio
from echo_sgl.sim.online_queue import OnlineQueue
from echo_sgl.sim.parts import live_estimator, offline_pool, promise_of
from echo_sgl.sim.prefix_tree import PrefixTree
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server_config import ServerConfig
from echo_sgl.sim.workload import SimRequest


@dataclass(slots=True)
class StepPlan:
    """A step that is about to run. `prefills`: request, new tokens, cached tokens before them.

    `device_s`: what it takes there, which is what the estimator learns from.
    """

    row: BatchRow
    prefills: list[tuple[SimRequest, int, int]] = field(default_factory=list)
    decodes: bool = False
    device_s: float = 0.0


class SimScheduler(SimDecodeControl):
    """Queues, memory and decisions of one simulated server.

    `steps_left` tells how many decode steps a request has left: the oracle's, used only to let
    a `DecodeGroup` know when to stop.
    """

    def __init__(
        self, config: ServerConfig, results: SimResults, steps_left: Callable[[SimRequest], int]
    ) -> None:
        self.config, self.results, self._steps_left = config, results, steps_left
        self.pool = offline_pool(config)
        self._set_up_memory()
        self._set_up_planning()
        self._set_up_requests()
        self.now_s = 0.0

    def _set_up_memory(self) -> None:
        """The pool, its tree, and the reserve in it."""
        config, cache = self.config, self.config.echo.cache
        capacity = config.capacity_tokens
        working_set = WorkingSet(
            limit_tokens=int(cache.protected_share * capacity), window_s=cache.protected_window_s
        )
        cache_order = "lru" if cache.order == "stock" else cache.order
        self.tree = PrefixTree(cache_order, self.pool, working_set)
        self.pool.on_change = self.tree.prompt_changed
        self.kv = KvPool(capacity, config.page_tokens, self.tree)
        reserve = config.echo.reserve
        self.reserve = BurstReserve(reserve, create_kv_demand(reserve), capacity)
        self.online_tokens = 0

    def _set_up_planning(self) -> None:
        """What a step will take, and what may be in it."""
        config, echo = self.config, self.config.echo
        self.estimator = live_estimator(config)
        self.planner = create_step_planner(
            echo,
            self.estimator,
            max_requests=config.max_running_requests,
            chunk_tokens=config.chunked_prefill_tokens,
            captured_batch_sizes=self.estimator.model.captured_batch_sizes,
        )
        self.feed = EstimatorFeed(self.estimator, is_exact=not config.noise)
        # Where no policy keeps count of steps, one without offline work needs no planning.
        self._forgets_steps = not (
            self.planner.keeps_steps or self.planner.packs or echo.steps.batch_size != "fixed"
        )

    def _set_up_requests(self) -> None:
        """Who decodes, prefills, sits out and waits."""
        page, self.promise = self.config.page_tokens, promise_of(self.config.echo.slo)
        self.online = DecodeGroup(page, ttft_s=self.promise.ttft_s, tpot_s=self.promise.tpot_s)
        self.offline = DecodeGroup(page)
        self.parked: dict[str, SimRequest] = {}
        self.without_turn: list[SimRequest] = []
        self.waiting = OnlineQueue(self.promise, self.planner.places, self.planner.late_last)
        self.chunked: SimRequest | None = None
        self.done: list[SimRequest] = []
        self.launched: list[SimRequest] = []
        self.is_full = self.last_was_prefill = False
        self.new_token_ratio = NewTokenRatio(self.config.schedule_conservativeness)
        self.offer_size = OfferSize()

    # ---- what is there ---------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(
            self.waiting
            or self.chunked
            or self.online
            or self.offline
            or self.parked
            or self.without_turn
            or len(self.pool)
        )

    @property
    def num_running(self) -> int:
        return len(self.online.members) + len(self.offline.members)

    @property
    def num_present(self) -> int:
        """How many hold a place: those that decode or sit out."""
        return self.num_running + len(self.parked) + len(self.without_turn)

    @property
    def offline_tokens(self) -> int:
        """Active KV that is not charged to online requests."""
        return max(0, self.kv.active_tokens - self.online_tokens)

    @property
    def num_offline(self) -> int:
        """How many offline requests hold memory: decoding, parked or between chunks."""
        between_chunks = self.chunked is not None and self.chunked.is_offline
        return len(self.offline) + len(self.parked) + between_chunks

    def offline_limit_tokens(self, num_offline: int) -> int:
        return self.reserve.offline_limit_tokens(self.now_s, is_alone=num_offline == 1)

    @property
    def is_quiet(self) -> bool:
        """Whether only online requests decode and no policy counts that: nothing is decided."""
        return self._forgets_steps and not (
            self.waiting or self.chunked or self.offline.members or self.parked or len(self.pool)
        )

    def online_prefill_waits(self) -> bool:
        return bool(self.waiting) or (self.chunked is not None and not self.chunked.is_offline)

    def growth_of(self, group: DecodeGroup, more_tokens: int = 0) -> float:
        """What SGLang expects its requests, and others like them, to grow by yet."""
        ratio = 1.0 if group.ignores_eos else self.new_token_ratio.current
        return ratio * (group.left_tokens + more_tokens)

    # ---- one step --------------------------------------------------------------------------

    def _offline_running(self) -> list[SimRequest]:
        holding = *self.offline, *self.parked.values(), self.chunked
        return [one for one in holding if one and one.is_offline]

    @property
    def begun_tokens(self) -> int:
        """What the offline requests that hold memory have of their prompts and answers."""
        running = [one for one in self._offline_running() if one not in self.done]
        return sum(one.held_tokens for one in running)

    def begin(self, now_s: float) -> None:
        """Take in what runs and waits, before anything is decided."""
        self.now_s = now_s
        self.tree.now_s = now_s
        self.feed.advance(now_s)
        if self.is_quiet:
            self.pool.pause()
            self._observe_use(now_s, self.online.seq_tokens)
            return
        self.pool.advance(now_s, self._offline_running)
        self.waiting.put_off_late(now_s)
        chunked = self.chunked if self.chunked and not self.chunked.is_offline else None
        online_tokens = self.online.seq_tokens + (chunked.seq_tokens if chunked else 0)
        chunk_due_s = self.waiting.due_s(chunked) if chunked else math.inf
        self.planner.begin(
            now_s,
            self.online.shape(),
            decode_due_s=self.online.due_s,
            first_due_s=min(self.waiting.first_due_s, chunk_due_s),
            num_waiting=len(self.waiting) + (chunked is not None),
            waiting_tokens=self.waiting.new_tokens + (chunked.left_tokens if chunked else 0),
            endings=self.online.endings,
        )
        self._observe_use(now_s, online_tokens)

    def _observe_use(self, now_s: float, online_tokens: int) -> None:
        self.online_tokens = min(online_tokens, self.kv.active_tokens)
        self.reserve.observe(now_s, self.online_tokens)
        self.results.peak_online_tokens = max(self.results.peak_online_tokens, online_tokens)
        self.results.longest_queue = max(self.results.longest_queue, len(self.waiting))

    def defers_prefill(self) -> bool:
        planner, chunked, num_pooled = self.planner, self.chunked, len(self.pool)
        if not (self.waiting or chunked) and num_pooled and self.keeps_pool_waiting(num_pooled):
            return True
        left_tokens = chunked.left_tokens if chunked else planner.gathering.free_tokens(num_pooled)
        return planner.decodes_first(
            online_prefill_waits=self.online_prefill_waits(),
            last_was_prefill=self.last_was_prefill,
            cached_tokens=chunked.computed_tokens if chunked else 0,
            left_tokens=left_tokens,
        )

    def keeps_pool_waiting(self, num_pooled: int) -> bool:
        """Whether those that could start do not yet, though nobody else prefills."""
        if self.planner.gathers(len(self.offline), num_pooled):
            return True
        return not self.num_worth_starting(1)

    def num_worth_starting(self, most: int) -> int:
        """How many of `most` offline requests a pass may start."""
        if not self.planner.gating.is_on or self.pool.is_late:
            return most
        return self.planner.num_worth_starting(self._contexts(), len(self.parked), most)

    def make_decode_room(self) -> None:
        """Retract until the next token of all that decode fits: first from who does not decode.

        Nobody as long as requests that are done are to give theirs up.
        Errors: `OutOfKvError` when those who are left do not fit either.
        """
        while self.lacks_room and not self.done:
            if not self._retract_parked() and not self._set_chunk_aside():
                break
        if not self.lacks_room or self.done:
            return
        self.take_back_left_out()  # who sits out for a step holds memory as well
        while self.lacks_room:
            self._retract_decode()
        self.new_token_ratio.note_retraction([*self.online, *self.offline])

    @property
    def lacks_room(self) -> bool:
        """Whether memory is too short for the next token of all that decode."""
        growth_tokens = self.online.growth_tokens + self.offline.growth_tokens
        return growth_tokens > self.kv.available_tokens

    def _retract_decode(self) -> None:
        """As SGLang does: offline decodes that started last before online ones with little done."""
        if offline := self._sitting_out(self.offline):
            self._retract_offline(max(offline, key=lambda one: one.ticket))
            return
        victim = min(
            self._sitting_out(self.online),
            key=lambda one: (one.num_outputs, -one.prompt_tokens, one.number),
            default=None,
        )
        if victim is None:
            raise OutOfKvError(f"a pool of {self.kv.capacity_tokens} tokens is full of prefills")
        self._retract_running(victim)
        self.waiting.add(victim)

    def plan_decode(self) -> StepPlan | None:
        """A step that decodes all that run; their room is taken."""
        online, offline = self.online, self.offline
        num_decodes = len(online.members) + len(offline.members)
        if not num_decodes or self.lacks_room:
            return None
        self.kv.take(online.growth_tokens + offline.growth_tokens)
        self.new_token_ratio.decay()
        seq_tokens = online.seq_tokens + offline.seq_tokens
        longest_tokens = max(online.longest_tokens, offline.longest_tokens)
        row = BatchRow(0, 0, 0, 0, num_decodes, seq_tokens, longest_tokens)
        return StepPlan(row, decodes=True)

    def decode_shape(self) -> BatchShape:
        online, offline = self.online, self.offline
        return SummedShape(
            len(online) + len(offline),
            online.seq_tokens + offline.seq_tokens,
            max(online.longest_tokens, offline.longest_tokens),
        )

    def launch(self, plan: StepPlan) -> None:
        """A step is about to run: what would its online part take alone?"""
        if plan.decodes and not plan.prefills and len(self.pool):
            self.planner.gathering.note_decode()
        if plan.decodes and not plan.prefills and self.waiting:
            self.planner.online_lots.note_decode()
        if self._forgets_steps:
            return
        online = self.online.shape() if plan.decodes else BatchShape()
        is_alone = not (plan.decodes and self.offline.members)
        for request, new, cached in plan.prefills:
            if request.is_offline:
                is_alone = False
            else:
                online.add_prefill(new, cached)
        self.planner.launch(online, is_alone=is_alone)

    def gives_way(self, waiting: SimRequest) -> bool:
        """Whether an online decode left its place to an online request that waits."""
        queue, online = self.waiting, self.online
        rid = self.planner.gives_way(
            queue.queued(waiting), map(queue.placed, self._sitting_out(online))
        )
        if rid is None:
            return False
        request = online.members[rid]
        online.remove(request)
        self.kv.retract(request)
        request.waiting_since_s = self.now_s
        self.results.num_given_places += 1
        queue.add(request)
        return True

    # ---- memory ----------------------------------------------------------------------------

    def shed(self) -> None:
        """Retract offline requests that outgrew what the reserve leaves."""
        while self.offline_tokens > self.offline_limit_tokens(self.num_offline):
            if not self.retract_first():
                return

    def retract_first(self) -> bool:
        """Take memory from an offline request: parked before running, least lost first."""
        return self._retract_of([*self.parked.values(), *self._sitting_out(self.offline)])

    def _retract_parked(self) -> bool:
        return self._retract_of([*self.parked.values()])

    def _retract_of(self, requests: Sequence[SimRequest]) -> bool:
        order = preemption_order(
            [_holder(one, is_parked=one.rid in self.parked) for one in requests]
        )
        if not order:
            return False
        self._retract_offline(next(one for one in requests if one.rid == order[0]))
        return True

    def _retract_offline(self, request: SimRequest) -> None:
        self.planner.gating.note_lost()
        if self.parked.pop(request.rid, None) is not None:
            self._release(request)
        else:
            self._retract_running(request)
        self.pool.add(request, resumed=True)

    def _set_chunk_aside(self) -> bool:
        """For decodes that need its room; whether there was an unfinished offline prefill."""
        request = self._take_chunk()
        if request is not None:
            self.pool.add(request, resumed=True)
        return request is not None

    def park_chunk(self) -> SimRequest | None:
        """Set an unfinished offline prefill aside when an online request waits."""
        return self._take_chunk() if self.waiting else None

    def _take_chunk(self) -> SimRequest | None:
        request = self.chunked
        if request is None or not request.is_offline:
            return None
        self.chunked = None
        self.kv.release(request)
        self.results.num_prefill_parks += 1
        request.was_set_aside = True
        return request

    # ---- internals -------------------------------------------------------------------------

    def _retract_running(self, request: SimRequest) -> None:
        group = self.offline if request.is_offline else self.online
        group.remove(request)
        self._release(request)

    def _release(self, request: SimRequest) -> None:
        self.kv.retract(request)
        request.waiting_since_s = None
        self.is_full = False
        self.results.num_retractions += 1


def _holder(request: SimRequest, *, is_parked: bool) -> Holder:
    tokens = request.uncached_tokens
    return Holder(
        rid=request.rid,
        is_parked=is_parked,
        uncached_tokens=tokens,
        held_tokens=tokens,
        started_sequence=request.sequence,
    )
