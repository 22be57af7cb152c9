"""Each scheduler step held against its limit: who decodes, what prefills, who sits out.

Everything decided here follows from the requests received, the memory held, the clock and
the measured times that rank 0 broadcasts, so all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch

from echo_sgl.batch_shape import BatchRow, BatchShape
from echo_sgl.config import EchoConfig
from echo_sgl.engine.cache.kv_limits import KvLimits
from echo_sgl.engine.decodes.adapters import AdapterRoom
from echo_sgl.engine.decodes.decode_control import UNSTEADY_STEPS, DecodeControl, StepCounts
from echo_sgl.engine.decodes.parking import ParkedDecodes, retract
from echo_sgl.engine.decodes.retraction import first_out
from echo_sgl.engine.decodes.running import Running
from echo_sgl.engine.pool.deadlines import DeadlineWatch
from echo_sgl.engine.requests.places import finds_its_kv, kept_tokens, new_tokens, placed, queued
from echo_sgl.engine.requests.refusals import (
    GATED,
    GATHERING,
    GATHERING_ONLINE,
    UNFINISHED,
    Reason,
    Refusal,
    limit_facts,
)
from echo_sgl.engine.requests.terms import RequestTerms, terms_of
from echo_sgl.engine.steps.decision_log import DecisionLog
from echo_sgl.engine.steps.estimation import FloorWatch, RefusalWatch
from echo_sgl.engine.steps.own_time import OwnTime
from echo_sgl.engine.steps.rolling_max import RollingMax
from echo_sgl.engine.steps.step_log import StepLog, StepNote
from echo_sgl.engine.steps.step_timing import StepTimer, row_of_batch
from echo_sgl.estimators.lessons import Lessons
from echo_sgl.estimators.live import LiveBatchTime
from echo_sgl.policies.planners import create_step_planner

WAIT_WINDOW_S = 60.0


class StepControl(DecodeControl):
    """Plans the steps of one scheduler; it calls in this order, once per step:

    `begin`, then `defers_prefill`, then `select_decodes` if the step decodes, then `launch`.
    """

    def __init__(
        self,
        config: EchoConfig,
        estimator: LiveBatchTime,
        timer: StepTimer,
        *,
        max_requests: int,
        chunk_tokens: int,
        watch: DeadlineWatch,
        rank: int = 0,
        can_park: bool = True,
    ) -> None:
        self.estimator, self.timer = estimator, timer
        self.floor_watch: FloorWatch | None = None
        self._refusal_watch = RefusalWatch()
        self._watch = watch
        self.parked, self.without_turn = ParkedDecodes(), ParkedDecodes()
        self.log = StepLog(estimator.predict_both_s)
        self.decision_log = DecisionLog.from_environment(rank)
        self.can_park = config.steps.park and can_park
        self.adapters: AdapterRoom | None = None
        self.planner = create_step_planner(
            config,
            estimator,
            max_requests=max_requests,
            chunk_tokens=chunk_tokens,
            captured_batch_sizes=estimator.model.captured_batch_sizes,
        )
        self.counts = StepCounts()
        self.refusal: Refusal | None = None
        # Online KV that is to stay in the tree for those that gave their places away.
        self.online_tokens = self.kept_tokens = 0
        self.online_wait_s = RollingMax(WAIT_WINDOW_S)
        self.online_wait_steps = RollingMax(WAIT_WINDOW_S)
        self.own_time = OwnTime()
        # Requests of a prefill step whose result SGLang has yet to process.
        self.launched: Callable[[], Collection[Req]] = tuple
        self._now_s = 0.0
        self._lessons = Lessons(estimator)
        self._running = Running((), 0.0)
        self._is_settled = self._is_planned = True
        self._num_unsteady = 0
        self._ended: list[tuple[RequestTerms, int]] = []

    # ---- one step --------------------------------------------------------------------------

    def observe(self, measured: Sequence[tuple[BatchRow, float]], now_s: float) -> None:
        """Take in steps that have ended since, and learn from them in time; alike on every rank.

        Errors: `ConfigError` when those of a server's start show that its promises are none.
        """
        if self.floor_watch is not None:
            self.floor_watch.note(measured)
        # Not when they ended: the step of their last token was over only now.
        for terms, num_tokens in self._ended:
            self.planner.limit.note_request(terms.is_met(num_tokens, now_s))
        self._ended.clear()
        if self._lessons.take(measured, now_s):
            self.log.predict()
            self._lessons.learn(now_s)

    def tell_log(self, now_s: float) -> None:
        """Of what goes wrong with the estimate; on the rank that leads. Once a second."""
        if self.floor_watch is not None:
            self.floor_watch.look(now_s, self.estimator)
            self._refusal_watch.look(self.estimator)

    def begin(
        self,
        now_s: float,
        running: ScheduleBatch,
        waiting: Sequence[Req],
        chunked: Req | None,
        *,
        num_pooled: int,
    ) -> None:
        """Take in what runs and waits, before anything is decided for this step.

        `num_pooled`: how many offline requests could start.
        """
        self._now_s = now_s
        self.parked.drop_finished()
        if self._num_unsteady:
            self._num_unsteady -= 1
            self._running = Running(running.reqs, now_s)
        self._running.advance(running.reqs, now_s)
        self.online_tokens = self._running.online.decode_tokens
        self._is_planned = bool(waiting) or chunked is not None or not self._goes_on(num_pooled)
        if self._is_planned:
            self._plan(waiting, chunked)

    def _goes_on(self, num_pooled: int) -> bool:
        """Whether nobody starts or sits out and all decode, as was found for an earlier step."""
        running, planner = self._running, self.planner
        if self.parked:
            return False
        if num_pooled and not planner.gathering.waits(running.num_offline, num_pooled):
            return False
        return planner.holds(
            self._now_s,
            running.online,
            decode_due_s=running.decode_due_s,
            num_offline=running.num_offline,
        )

    def _plan(self, waiting: Sequence[Req], chunked: Req | None) -> None:
        now_s, decodes = self._now_s, self._running.online
        if chunked is not None and not terms_of(chunked, now_s).is_offline:
            self.online_tokens += chunked.seqlen
        queue, waiting_tokens, self.kept_tokens = [], 0, 0
        for req in (*waiting, chunked) if chunked is not None else waiting:
            terms = terms_of(req, now_s)
            if not terms.is_offline:
                queue.append(queued(req))
                waiting_tokens += new_tokens(req, terms)
                self.kept_tokens += kept_tokens(req, terms)
        self.planner.begin(
            now_s,
            decodes,
            decode_due_s=self._running.decode_due_s,
            first_due_s=self.planner.late_last.first_due_s(queue, now_s),
            num_waiting=len(queue),
            waiting_tokens=waiting_tokens,
            endings=self._running.endings,
        )
        # Asked while all of this is in the CPU's caches; `select_decodes` comes much later.
        self._is_settled = self._stays(self._running.offline)

    def defers_prefill(
        self,
        *,
        online_prefill_waits: bool,
        last_was_prefill: bool,
        chunked: Req | None,
        num_pooled: int,
        limits: KvLimits,
    ) -> bool:
        """Whether a step that decodes goes first, see `gathers` and `decodes_first` there."""
        planner, is_idle = self.planner, chunked is None and not online_prefill_waits
        if is_idle and not num_pooled:  # a pass would find nobody
            return limits.is_within and len(self._running.online) > 0
        if is_idle and limits.is_within and self._keeps_pool_waiting(num_pooled):
            return True
        if not self._is_planned:
            self._plan((), None)
        left_tokens = planner.gathering.free_tokens(num_pooled)
        if chunked is not None:
            left_tokens = chunked.seqlen - chunked.extend_end
        is_deferred = planner.decodes_first(
            online_prefill_waits=online_prefill_waits,
            last_was_prefill=last_was_prefill,
            cached_tokens=chunked.extend_end if chunked is not None else 0,
            left_tokens=left_tokens if limits.is_within else 0.0,
        )
        if planner.online_gathers:
            self.refusal = GATHERING_ONLINE
        elif is_deferred and planner.is_limited and self.estimator.is_ready:
            self.refuse_for_time(None, BatchShape())
        return is_deferred

    def _keeps_pool_waiting(self, num_pooled: int) -> bool:
        """Whether those that could start do not yet, though nobody else prefills."""
        if self.planner.gathers(self._running.num_offline, num_pooled):
            self.refusal = GATHERING
            return True
        return not self.num_worth_starting(1)

    def num_worth_starting(self, most: int) -> int:
        """How many of `most` offline requests a pass may start, see `num_worth_starting` there.

        All while a job is late.
        """
        if self._watch.urgent_deadline_s is not None:
            return most
        offline, num_parked = self._running.offline, len(self.parked)
        num = self.planner.num_worth_starting(offline, num_parked, most)
        if most and not num:
            is_unfinished = self.planner.finishes_first(offline.num, num_parked)
            self.refusal = UNFINISHED if is_unfinished else GATED
        return num

    def keeps_chunk_waiting(self, chunked: Req, decodes: BatchShape, page_size: int) -> bool:
        """Whether an offline request has no room for its next chunk in a step with `decodes`."""
        cached, left = chunked.extend_end, chunked.seqlen - chunked.extend_end
        if not self.planner.keeps_chunk_waiting(decodes, cached, left, page_size):
            return False
        self.refuse_for_time(None, decodes, max_tokens=left, cached=cached)
        return True

    def refuse(self, reason: Reason, rid: str | None, **facts: float) -> None:
        """Note why a request waits; the next refusal takes this one's place."""
        self.refusal = Refusal(reason, rid, facts)

    def refuse_for_time(
        self, rid: str | None, shape: BatchShape, *, max_tokens: float = math.inf, cached: int = 0
    ) -> None:
        """Note that not even its smallest chunk fits into the step, or not one that is worth it."""
        chunk_s = self.planner.smallest_chunk_s(shape, max_tokens=max_tokens, cached_tokens=cached)
        facts = {"room_s": self.planner.room_s(shape), "smallest_chunk_s": chunk_s}
        most_s = self.planner.limit.most_s(self.planner.view, decodes=shape.num_decodes > 0)
        # Behind another prefill it tells nothing: without that one it may fit.
        if most_s < chunk_s < math.inf and not shape.num_prefills:
            facts["most_s"] = most_s
        chunk_wait = self.planner.chunk_wait.facts
        self.refuse(Reason.LIMIT, rid, **limit_facts(self.planner), **facts, **chunk_wait)

    def launch(
        self,
        batch: ScheduleBatch,
        waiting: Sequence[Req],
        *,
        num_pooled: int,
        num_evicted_tokens: int,
    ) -> StepNote | None:
        """A batch is about to run: announce it to the timer, note what was planned.

        None when it is not a step of ours. `waiting` are the requests that it leaves behind.
        """
        known = self._running.row_of(batch.reqs) if batch.forward_mode.is_decode() else None
        if (row := known or row_of_batch(batch)) is None:
            self.timer.expect(None)
            return None
        online, num_offline = self._running.online_part(batch, row)
        self.planner.launch(online, is_alone=not num_offline)
        if row.num_prefills:
            self.planner.held.end()
        if num_pooled and not row.num_prefills:
            self.planner.gathering.note_decode()
        if waiting and not row.num_prefills:
            self.planner.online_lots.note_decode()
        only_prefills = row.num_prefills > 0 and not row.num_decodes
        limit_s = self.planner.prefill_room_s if only_prefills else self.planner.limit_s
        note = StepNote(
            start_s=self._now_s,
            row=row,
            limit_s=limit_s if num_offline else math.inf,
            slack_s=self.planner.slack_s,
            num_offline=num_offline,
            num_parked=len(self.parked),
            num_pooled=num_pooled,
            num_evicted_tokens=num_evicted_tokens,
            num_parks=self.counts.num_parks,
            num_resumes=self.counts.num_resumes,
            num_retractions=sum(self.counts.num_retractions.values()),
            num_prefill_parks=self.counts.num_prefill_parks,
            num_given_places=self.counts.num_given_places,
        )
        self.log.add(note)
        if self.decision_log is not None:
            limit_s = self.planner.limit_s
            sitting_out = *self.parked, *self.without_turn
            self.decision_log.write(batch, sitting_out, now_s=self._now_s, limit_s=limit_s)
        self.timer.expect(row, note)
        for req in waiting if num_offline else ():
            terms_of(req).num_offline_steps_waited += 1
        return note

    def note_start(self, req: Req) -> None:
        """A request is prefilled, perhaps for the first time."""
        terms = terms_of(req, self._now_s)
        terms.waiting_since_s = None
        if req.output_ids:  # it joins those that decode before the next one is seen
            self._num_unsteady = UNSTEADY_STEPS
        if terms.started_s is None:
            terms.started_s = self._now_s
            if req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
                return  # of one token: nobody's prompt, and nobody who waits
            self.counts.num_started += 1
            if not terms.is_offline:
                self.planner.note_online_start(self._now_s, req.seqlen - req.prefix_len)
                self.online_wait_s.observe(self._now_s - terms.arrival_s, self._now_s)
                self.online_wait_steps.observe(terms.num_offline_steps_waited, self._now_s)

    def note_end(self, req: Req) -> None:
        """A request ended: `observe` will tell whether its promise was kept."""
        self._running.note_end(req)
        self.planner.gathering.note_end()
        self.planner.online_lots.note_end()
        terms = terms_of(req, self._now_s)
        if terms.is_offline:
            if not isinstance(req.finished_reason, FINISH_ABORT):
                self.planner.gating.note_answer(len(req.output_ids))
            return
        self.planner.held.end()  # the stall is counted from what online decodes take
        if isinstance(req.finished_reason, FINISH_ABORT):
            self.note_abandoned(req)
        if req.output_ids and terms.promise.is_any:
            self._ended.append((terms, len(req.output_ids)))

    def note_abandoned(self, req: Req) -> None:
        """Who ends without a token after the first one was due was promised it in vain."""
        terms = terms_of(req, self._now_s)
        if not (terms.is_offline or req.output_ids) and terms.due_s(0) < self._now_s:
            self.planner.limit.note_request(False)

    @property
    def length_bucket(self) -> int | None:
        """Of what decodes, see `Candidate`."""
        return self._running.length_bucket

    # ---- places ------------------------------------------------------------------------------

    def give_place(self, batch: ScheduleBatch, waiting: Req) -> Req | None:
        """Let an online decode that is ahead leave its place to an online request that waits.

        Who left is to wait in the queue again. None when nobody leaves.
        """
        able = placed(req for req in batch.reqs if finds_its_kv(req))
        rid = self.planner.gives_way(queued(waiting), able)
        if rid is None:
            return None
        leaving = next(req for req in batch.reqs if req.rid == rid)
        retract(batch, leaving, num_decoding=len(batch.reqs) - 1)
        terms_of(leaving).waiting_since_s = self._now_s
        self.kept_tokens += leaving.seqlen
        self.counts.num_given_places += 1
        return leaving

    # ---- memory ------------------------------------------------------------------------------

    def retract_one(self, batch: ScheduleBatch, running: Sequence[Req]) -> Req | None:
        """Take the memory of one offline request: parked before running, least work lost first.

        `running` are those of `batch` that may be taken. The request is to wait in the pool
        again. None when nobody has memory to give.
        """
        if (rid := first_out(self.parked, running, self.launched())) is None:
            return None
        self.planner.gating.note_lost()
        victim = next((req for req in running if req.rid == rid), None)
        if victim is None:
            return self.parked.retract(rid)
        retract(batch, victim, num_decoding=len(batch.reqs) - 1)
        return victim
