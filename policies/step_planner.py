"""What offline work may join the next step, held against the limit of its time.

Two phases (HyGen algorithm 2): what online requests need is there first, offline work fills
the rest of the limit. One planner serves one scheduler; `begin` starts each step, and `launch`
ends its planning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from echo_sgl.batch_shape import BatchShape, StepKind
from echo_sgl.config import EchoConfig
from echo_sgl.estimators.batch_time import StepEstimator, longest_prefill, prefill_alone_s
from echo_sgl.estimators.conformal import FLOOR_S
from echo_sgl.policies.decodes.batch_size import BatchSize
from echo_sgl.policies.decodes.contexts import Contexts
from echo_sgl.policies.decodes.decode_planner import DecodePlanner
from echo_sgl.policies.decodes.decode_selection import DecodeSelection
from echo_sgl.policies.decodes.held_plan import HeldPlan
from echo_sgl.policies.limits.arrival_wait import ArrivalWait
from echo_sgl.policies.limits.step_limit import (
    NOTHING_ONLINE,
    Ending,
    NoLimit,
    OnlinePart,
    OnlineView,
    StepLimit,
)
from echo_sgl.policies.prefills.chunk_wait import ChunkWait
from echo_sgl.policies.prefills.gathering import Gathering
from echo_sgl.policies.prefills.gating import Gating
from echo_sgl.policies.prefills.late_last import LateLast
from echo_sgl.policies.prefills.online_planner import OnlinePlanner, page_aligned
from echo_sgl.policies.prefills.place_trend import PlaceTrend
from echo_sgl.policies.prefills.places import Placed, Places, Queued


class StepPlanner(DecodePlanner, OnlinePlanner):
    """Holds the work of one step against a limit.

    While the estimator knows nothing, offline work beside online requests is kept to one
    small chunk and to as many decodes as there are online ones; without online requests it
    runs free, and the estimator learns from it.

    Online progress does not depend on the limit, and without online work at least one
    offline decode or chunk fits.
    """

    def __init__(
        self,
        config: EchoConfig,
        limit: StepLimit,
        estimator: StepEstimator,
        *,
        selection: DecodeSelection,
        batch_size: BatchSize,
        chunk_wait: ChunkWait,
        max_requests: int,
        chunk_tokens: int,
    ) -> None:
        self.limit, self.estimator = limit, estimator
        self._config = steps = config.steps
        self.is_limited, self.replaces = not isinstance(limit, NoLimit), steps.replace
        self.packs = self.sorts_queue = steps.pack and self.is_limited
        # Most limits hold nothing between steps.
        self.keeps_steps = type(limit).note_step is not StepLimit.note_step
        self.view = NOTHING_ONLINE
        self.limit_s = self.prefill_room_s = math.inf
        self._selection, self._batch_size = selection, batch_size
        self.places = Places(steps.place_gain)
        self.late_last = LateLast(steps.late_wait_s if limit.keeps_room else 0.0)
        self._trend = PlaceTrend(steps.place_trend_s if steps.place_share else 0.0)
        self.gathering = Gathering(is_on=steps.gather)
        self.online_lots = Gathering(is_on=steps.gather and steps.gather_online)
        self.online_gathers = False
        """Whether `decodes_first` found that online requests wait for others to start with."""
        self.gating = Gating(is_on=steps.gate)
        self.chunk_wait = chunk_wait
        self.arrival_wait = ArrivalWait(
            ttft_s=config.slo.ttft_s,
            share=steps.stall_share,
            most_s=steps.max_stall_s,
            chunk_tokens=chunk_tokens,
        )
        self._online_decodes, self._num_waiting = BatchShape(), 0
        self._decode_limit = math.inf
        self.held = HeldPlan(is_on=not (self.keeps_steps or batch_size.learns or self.packs))
        self._max_requests, self._chunk_tokens = max_requests, chunk_tokens
        # When the step that runs was planned, and what online work it holds.
        self._launched: tuple[float, OnlinePart | None] | None = None

    def begin(
        self,
        now_s: float,
        decodes: BatchShape,
        *,
        decode_due_s: float,
        first_due_s: float,
        num_waiting: int,
        waiting_tokens: int = 0,
        endings: tuple[Ending, ...] = (),
    ) -> None:
        """Take in the online work at hand.

        `decodes` are the online requests that decode, `num_waiting` those that wait or are being
        prefilled, with so many tokens to prefill at most; the due times are the least of each.
        `endings`: see `OnlineView`.
        """
        if self._launched is not None:
            launched_s, online = self._launched
            self.limit.note_step(online, now_s - launched_s)
            self._launched = None
        self.held.end()
        is_present = len(decodes) > 0 or num_waiting > 0
        alone_s = chunk_s = prefill_s = 0.0
        if self._is_known:
            alone_s = self.estimator.upper.predict_s(decodes) if len(decodes) else 0.0
            if waiting_tokens > 0:
                chunk_s = prefill_alone_s(
                    self.estimator.upper, min(waiting_tokens, self._chunk_tokens)
                )
                prefill_s = chunk_s * max(1.0, waiting_tokens / self._chunk_tokens)
        self._online_decodes, self._num_waiting = decodes, num_waiting
        if num_waiting:
            self.limit.note_waiting()
        taken = (len(decodes) + num_waiting) / self._max_requests
        self.view = OnlineView(
            now_s,
            decode_due_s,
            first_due_s,
            alone_s,
            is_present,
            chunk_s,
            prefill_s,
            endings,
            places_taken=taken,
            places_ahead=self._trend.ahead(now_s, taken),
        )
        self._bound_stalls(now_s, alone_s)
        self.limit_s = self.limit.limit_s(self.view)
        self.prefill_room_s = self.limit.prefill_room_s(self.view, self.limit_s)
        self._decode_limit = self.limit.decode_limit_s(self.view, self.limit_s)
        if is_present:
            self._batch_size.observe(exceeded=alone_s > self.limit_s)

    def _bound_stalls(self, now_s: float, alone_s: float) -> None:
        """What who arrives may wait, an expected time, as what such a step takes at most.

        Bounds held against it would stop offline work after a slow moment, whose steps leave them
        far above what is expected, for as long as those count.
        """
        if not self.arrival_wait.is_promised:
            return  # they stay at `max_stall_s`
        spread, most_s = self.estimator.spread, self._config.max_stall_s
        decode = spread(StepKind.DECODE)
        at_hand = now_s, alone_s / decode, self.estimator if self._is_known else None
        wait_s = self.arrival_wait.longest_s(*at_hand)
        self.limit.stall_s = min(most_s, wait_s * max(decode, spread(StepKind.MIXED)))
        self.limit.prefill_stall_s = min(most_s, wait_s * spread(StepKind.PREFILL))
        if self._is_known:
            self._let_prefills_tell(wait_s, lambda: self.arrival_wait.left_s(*at_hand))

    def _let_prefills_tell(self, wait_s: float, left_s: Callable[[], float]) -> None:
        """Where the bound even of the smallest chunk is above the longest stall, hold only what it
        is expected to take against that, if it may take up to its bound and who arrives is in time.

        After steps that took far too long, no others would show what prefills take now.
        """
        tokens = self._config.min_chunk_tokens
        smallest_s = prefill_alone_s(self.estimator.upper, tokens)
        if smallest_s > self._config.max_stall_s:
            spread = smallest_s / max(FLOOR_S, prefill_alone_s(self.estimator, tokens))
            in_time_s = min(wait_s * spread, left_s())
            if smallest_s <= in_time_s:
                self.limit.prefill_stall_s = in_time_s

    def holds(
        self, now_s: float, decodes: BatchShape, *, decode_due_s: float, num_offline: int
    ) -> bool:
        """Whether all decode as in the step before, so that `begin` need not be called.

        For steps that start nobody and in which nobody waits or sits out. `limit_s` and `view`
        stay what they were but for the time and the slack.
        """
        is_held = self.held.holds(now_s, decode_due_s - now_s, len(decodes) + num_offline)
        if is_held:
            self._online_decodes = decodes
            self.view = self.view._replace(now_s=now_s, decode_due_s=decode_due_s)
        return is_held

    def launch(self, online: BatchShape, *, is_alone: bool) -> None:
        """The step runs, with this online work in it and, unless `is_alone`, offline work."""
        if not self.keeps_steps:
            return
        part = None
        if self.view.is_present and self._is_known:
            kind = online.kind if len(online) else None
            part = OnlinePart(self.estimator.predict_s(online), kind, is_alone)
        self._launched = self.view.now_s, part

    def forget_traffic(self) -> None:
        """The online requests until now were no traffic: what they taught does not count."""
        self.limit.forget_requests()
        self.arrival_wait.forget()

    # ---- prefill ---------------------------------------------------------------------------

    def note_online_start(self, now_s: float, new_tokens: int) -> None:
        """An online request starts that never has before, with so many tokens to prefill."""
        self.gathering.note_start()
        self.arrival_wait.note_start(now_s, new_tokens)

    def gathers(self, num_offline: int, num_pooled: int) -> bool:
        """Whether offline requests wait for others to start with, while so many decode.

        Not when one more would not fit into their prefill step, by time or by the chunk.
        """
        if not (self._is_known and self.gathering.waits(num_offline, num_pooled)):
            return False
        lot_s = self.gathering.lot_s(self.estimator.upper, self._chunk_tokens)
        return math.isfinite(lot_s) and lot_s <= self.prefill_room_s

    def finishes_first(self, num_offline: int, num_parked: int) -> bool:
        """Whether offline requests that have started, so many of which sit out, go before others.

        One that starts would sit out as well, and hold memory meanwhile that an online request
        comes to need: what had been computed of it would be lost.
        """
        return num_parked > self._config.parked_share * (num_offline + num_parked)

    def num_worth_starting(self, offline: Contexts, num_parked: int, most: int) -> int:
        """How many of `most` offline requests may start: what they could lose is worth it, and not
        too many of those that have started sit out.

        `offline`: those that decode; where none does or sits out, that is all of them.
        """
        if self.finishes_first(offline.num, num_parked):
            return 0
        if not (self.gating.is_on and self._is_known and offline.num + num_parked):
            return most
        return self.gating.num_open(self.estimator, self._joined(offline), most)

    def decodes_first(
        self,
        *,
        online_prefill_waits: bool,
        last_was_prefill: bool,
        cached_tokens: int = 0,
        left_tokens: float = 0.0,
    ) -> bool:
        """Whether a decode step goes before a step that only prefills.

        For SGLang's default, where a step prefills or decodes: online decodes wait for a
        prefill step, so it must fit between two of their tokens. `cached_tokens`: what the
        request between two chunks has behind it, which the next chunk attends to. `left_tokens`:
        what offline requests have to prefill that could; 0 where nobody may wait for more room.
        """
        self.chunk_wait.awaited_s, self.online_gathers = 0.0, False
        if not len(self._online_decodes):
            return False
        if not self.is_limited or not self._is_known:
            return last_was_prefill and not online_prefill_waits
        if online_prefill_waits:
            self.chunk_wait.interrupt()
            is_due = last_was_prefill and self._decodes_are_due(cached_tokens)
            if is_due or self.limit.lets_end(self.view):
                return True
            self.online_gathers = not cached_tokens and self._online_gathers()
            return self.online_gathers
        room_s = self.prefill_room_s
        # One chunk between two tokens: a second one would pay a step's fixed cost again.
        if last_was_prefill or not self._smallest_chunk_fits(room_s, cached_tokens):
            return True
        return self.limit.keeps_room and self.chunk_wait.waits(
            room_s,
            self.estimator.upper,
            stall_s=self.limit.prefill_stall_s,
            cached_tokens=cached_tokens,
            left_tokens=left_tokens,
        )

    def offline_chunk_tokens(
        self, shape: BatchShape, *, cached_tokens: int, max_tokens: int, page_size: int
    ) -> int:
        """New tokens of an offline prefill that may join `shape`, the step so far; 0: none."""
        smallest = min(max_tokens, self._config.min_chunk_tokens)
        if not self.is_limited:
            return max_tokens
        if not self._is_known:
            if not self.view.is_present:
                return max_tokens
            return 0 if shape.num_prefills else page_aligned(smallest, max_tokens, page_size)
        tokens = longest_prefill(
            self.estimator.upper,
            shape,
            self.room_s(shape),
            max_tokens=max_tokens,
            page_size=page_size,
            cached_tokens=cached_tokens,
        )
        if tokens < smallest and not self.view.is_present and not shape.num_prefills:
            return page_aligned(smallest, max_tokens, page_size)
        return tokens if tokens >= smallest else 0

    def keeps_chunk_waiting(
        self, decodes: BatchShape, cached_tokens: int, left_tokens: int, page_size: int
    ) -> bool:
        """Whether an offline request between two chunks waits where steps do both.

        SGLang would have it make progress by a page in each step, at the fixed cost of a
        prefill, where a decode step may take its time.
        """
        chunk_tokens = self.offline_chunk_tokens(
            decodes, cached_tokens=cached_tokens, max_tokens=left_tokens, page_size=page_size
        )
        return not chunk_tokens

    def room_s(self, shape: BatchShape) -> float:
        """What `shape` may take: online decodes that are not in it have to be made up for."""
        return self.limit_s if shape.num_decodes else self.prefill_room_s

    def smallest_chunk_s(
        self, shape: BatchShape, *, max_tokens: float = math.inf, cached_tokens: int = 0
    ) -> float:
        """What `shape` would take with the smallest offline chunk in it, in seconds."""
        shape.add_prefill(int(min(max_tokens, self._config.min_chunk_tokens)), cached_tokens)
        time_s = self.estimator.upper.predict_s(shape)
        shape.undo()
        return time_s

    def gives_way(self, waiting: Queued, decodes: Iterable[Placed]) -> str | None:
        """Which online decode leaves its place to a request that waits.

        None: it can wait for longer, or lets others go first, or nobody is far enough ahead. One
        that is late gets a place as well: in a queue of such all would stay late.
        """
        due_s, now_s = waiting.due_s, self.view.now_s
        is_pressed = self._is_known and self.limit.is_pressed(self.view, due_s)
        if not is_pressed or self.goes_last(waiting):
            return None
        return self.places.gives_way(
            decodes, from_s=max(now_s, due_s), return_place_s=self._return_place_s()
        )

    def _return_place_s(self) -> float:
        """Place-seconds that go by when a decode comes back: its prefill step stops all others."""
        num_decodes = len(self._online_decodes)
        mean_tokens = self._online_decodes.decode_tokens // max(1, num_decodes)
        return num_decodes * prefill_alone_s(self.estimator, 1, mean_tokens)

    def keep_turns(self) -> None:
        """Let nobody go before others: priorities of the server's own say who is more urgent."""
        self.late_last, self.sorts_queue = LateLast(0.0), False

    def goes_last(self, waiting: Queued) -> bool:
        """Whether an online request lets others that wait go first, see `LateLast`."""
        return self.late_last.is_put_off(waiting, self.view.now_s)

    @property
    def online_waits(self) -> bool:
        """Whether an online request waits or is being prefilled."""
        return self._num_waiting > 0
