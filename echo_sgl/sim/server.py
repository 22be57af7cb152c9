"""The simulated server: arrivals and steps in order of time, until all that came is done."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Protocol

from echo_sgl.batch_shape import StepKind
from echo_sgl.sim.events import EventQueue, Priority
from echo_sgl.sim.prefill import PrefillPass
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.scheduler import SimScheduler, StepPlan
from echo_sgl.sim.server_config import ServerConfig
from echo_sgl.sim.workload import Oracle, SimRequest, Trace, empty_trace
from echo_sgl.types import Task

PROGRESS_STEPS = 2000
LOOK_AGAIN_S = 0.1
Progress = Callable[[float], None]


class Observer(Protocol):
    """Sees single requests, as their clients would."""

    def came(self, request: SimRequest) -> None: ...

    def ended(self, request: SimRequest, num_tokens: int, now_s: float) -> None: ...


def simulate(
    config: ServerConfig,
    online: Trace,
    offline: Trace | None = None,
    *,
    until_s: float = math.inf,
    on_progress: Progress | None = None,
    observer: Observer | None = None,
) -> SimResults:
    """Serve both traces on one server.

    Ends when all is done, or with the first step that ends at `until_s` or later. The same
    arguments give the same result to the last bit. `on_progress` is told the simulated time.

    Units: seconds on the traces' clock.
    """
    server = SimServer(config, online, offline or empty_trace(Task.OFFLINE), observer)
    server.run(until_s=until_s, on_progress=on_progress)
    return server.results


class SimServer:
    """One server with its clock. `scheduler` decides; only this class asks the oracle."""

    def __init__(
        self,
        config: ServerConfig,
        online: Trace,
        offline: Trace,
        observer: Observer | None = None,
    ) -> None:
        self.config, self.results, self._observer = config, SimResults(), observer
        self._traces = {Task.ONLINE: online, Task.OFFLINE: offline}
        self._oracle = Oracle(online, offline)
        self.scheduler = SimScheduler(config, self.results, self._steps_left)
        self.scheduler.online.ignores_eos = online.ignores_eos
        self.scheduler.offline.ignores_eos = offline.ignores_eos
        self._events = EventQueue()
        self._rng = random.Random(config.seed)
        self._is_stepping = False
        self._plan: StepPlan | None = None
        self._unseen: list[SimRequest] = []
        self._factors: Mapping[StepKind, float] = {}
        self._next_change = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that came and are not done."""
        scheduler = self.scheduler
        waiting = len(scheduler.waiting) + len(scheduler.pool)
        running = scheduler.num_present - len(scheduler.done)
        starting = self._plan.prefills if self._plan is not None else []
        between = scheduler.chunked
        prefilling = len(starting) + (
            between is not None and all(one is not between for one, _, _ in starting)
        )
        return waiting + running + prefilling + len(self._unseen)

    @property
    def num_online_unfinished(self) -> int:
        """Online requests that are not done, or did not come yet."""
        num_ended = self.results.online_done + self.results.refused
        return len(self._traces[Task.ONLINE]) - num_ended

    def run(
        self,
        *,
        until_s: float = math.inf,
        finishes_online: bool = False,
        on_progress: Progress | None = None,
    ) -> None:
        """See `simulate`. `finishes_online`: go on for as long as online requests are not done."""
        starts = [trace.at_s[0] for trace in self._traces.values() if len(trace)]
        self.results.start_s = self.results.end_s = min(starts, default=0.0)
        for task, trace in self._traces.items():
            if len(trace):
                self._expect(task, 0)
        while len(self._events) and (
            self.results.end_s < until_s or (finishes_online and self.num_online_unfinished)
        ):
            now_s, priority, event = self._events.pop()
            if priority is Priority.ARRIVAL:
                self._reach(now_s, *event)
            else:
                self._end_step(now_s)
                self._start_step(now_s)
                if on_progress is not None and not self.results.num_steps % PROGRESS_STEPS:
                    on_progress(now_s)
        self.results.unfinished = self.num_unfinished
        self.results.online_unfinished = self.num_online_unfinished
        self.results.offline_begun_tokens = self.scheduler.begun_tokens
        counts = self.scheduler.tree.counts
        self.results.evicted_tokens = counts.evicted_tokens
        self.results.evicted_needed_tokens = counts.evicted_needed_tokens

    # ---- arrivals --------------------------------------------------------------------------

    def _expect(self, task: Task, number: int) -> None:
        """The scheduler has a request when HTTP and the tokenizer have done their part.

        What comes after it, the detokenizer and the way back, is counted there too: only its
        client could tell the one from the other.
        """
        at_s = self._traces[task].at_s[number] + self.config.host.intake_s
        self._events.push(at_s, Priority.ARRIVAL, (task, number, False))

    def _reach(self, now_s: float, task: Task, number: int, has_waited: bool) -> None:
        """A request is at the scheduler, or was held up on the way because steps run."""
        if not has_waited:
            if number + 1 < len(self._traces[task]):
                self._expect(task, number + 1)
            host = self.config.host
            late_s = host.around_s(self.scheduler.num_running) - host.intake_s
            if self._plan is not None and late_s > 0:
                self._events.push(now_s + late_s, Priority.ARRIVAL, (task, number, True))
                return
        self._arrive(now_s, self._traces[task], number)

    def _arrive(self, now_s: float, trace: Trace, number: int) -> None:
        request = trace.request(number)
        if self._observer is not None:
            self._observer.came(request)
        scheduler = self.scheduler
        scheduler.kv.prepare(request)
        if not self._takes(request):
            self.results.refused += not request.is_offline
            self.results.offline_refused += request.is_offline
            return
        # An answer that is allowed more than fits is refused by nobody: SGLang cuts the limit.
        most = self.config.most_output_tokens(request.prompt_tokens)
        request.max_new_tokens = min(request.max_new_tokens, most)
        if self.config.overlap and self._plan is not None:
            self._unseen.append(request)
        else:
            self._see(request)
        if not self._is_stepping:
            self._is_stepping = True
            self._events.push(now_s, Priority.STEP, None)

    def _takes(self, request: SimRequest) -> bool:
        """Whether its prompt fits, an offline one's beside what the reserve always keeps free."""
        is_kept_out = request.prompt_tokens > self.scheduler.reserve.most_tokens
        fits = self.config.takes_prompt(request.prompt_tokens)
        return fits and not (request.is_offline and is_kept_out)

    def _see(self, request: SimRequest) -> None:
        """The scheduler takes a request in."""
        if request.is_offline:
            self.scheduler.pool.add(request, resumed=False)
        else:
            self.scheduler.waiting.add(request)

    def _see_all(self) -> None:
        """Under overlap a step is formed when the one before begins: who comes later is in none."""
        for request in self._unseen:
            self._see(request)
        self._unseen.clear()

    # ---- steps -----------------------------------------------------------------------------

    def _start_step(self, now_s: float) -> None:
        scheduler = self.scheduler
        ended = scheduler.done
        if not self.config.overlap:
            self._leave(ended, num_more=0)
        plan = self._form(now_s)
        if plan is None and self._unseen:
            self._see_all()
            plan = self._form(now_s)
        if self.config.overlap:
            # The result of a step is seen when the next one is on its way: they ride along.
            self._leave(ended, num_more=int(plan is not None and plan.decodes))
        self._plan = plan
        if plan is None:
            # What was held back by work that has just left may go now.
            self._is_stepping = bool(ended) and scheduler.has_work
            if self._is_stepping:
                self._events.push(now_s, Priority.STEP, None)
            elif scheduler.has_work:
                self._wait(now_s)
            else:
                scheduler.new_token_ratio.forget()
            return
        self._see_all()
        scheduler.launch(plan)
        scheduler.last_was_prefill = plan.row.num_prefills > 0
        scheduler.launched = [one for one, _, _ in plan.prefills] if self.config.overlap else []
        plan.device_s = self._device_s(plan)
        num_requests = plan.row.num_prefills + plan.row.num_decodes
        time_s = plan.device_s + self.config.host.between_s(num_requests)
        self.results.note_step(plan.row, now_s, time_s)
        self._events.push(now_s + time_s, Priority.STEP, None)

    def _wait(self, now_s: float) -> None:
        """Nothing may start until a reserve loosens with time: look again later.

        After a whole window without any step and without anybody to come, it never will.
        """
        patience_s = 2 * self.config.echo.reserve.window_s
        is_stuck = not len(self._events) and now_s - self.results.end_s > patience_s
        self._is_stepping = not is_stuck
        if not is_stuck:
            self._events.push(now_s + LOOK_AGAIN_S, Priority.STEP, None)

    def _form(self, now_s: float) -> StepPlan | None:
        """Decide what the next step runs."""
        scheduler = self.scheduler
        scheduler.take_back_left_out()
        if scheduler.parked and not scheduler.num_running:
            scheduler.resume_all()
        scheduler.begin(now_s)
        if scheduler.is_quiet:
            scheduler.make_decode_room()
            return scheduler.plan_decode()
        if self.config.enable_mixed_chunk:
            scheduler.select_decodes()
            scheduler.make_decode_room()
        can_prefill = scheduler.waiting or scheduler.chunked or len(scheduler.pool)
        plan: StepPlan | None = None
        if can_prefill and not self._defers_prefill():
            plan = PrefillPass(scheduler).run()
        else:
            scheduler.shed()
        if plan is not None:
            return plan
        if not self.config.enable_mixed_chunk:
            scheduler.select_decodes()
        scheduler.make_decode_room()
        return scheduler.plan_decode()

    def _defers_prefill(self) -> bool:
        scheduler = self.scheduler
        if not self.config.enable_mixed_chunk:
            return scheduler.defers_prefill()
        chunked, num_pooled = scheduler.chunked, len(scheduler.pool)
        if scheduler.waiting or (chunked is not None and not chunked.is_offline):
            return False
        if chunked is None:
            return num_pooled > 0 and not scheduler.num_worth_starting(1)
        return scheduler.planner.keeps_chunk_waiting(
            scheduler.decode_shape(),
            chunked.computed_tokens,
            chunked.left_tokens,
            self.config.page_tokens,
        )

    def _device_s(self, plan: StepPlan) -> float:
        time_s = self.config.device.predict_s(plan.row)
        while self._next_change < len(self.config.step_factors):
            change = self.config.step_factors[self._next_change]
            if change.at_s > self.scheduler.now_s:
                break
            self._factors, self._next_change = change.factors, self._next_change + 1
        if self._factors:
            time_s *= self._factors.get(plan.row.kind, 1.0)
        if self.config.noise:
            noise = self.config.noise
            time_s *= math.exp(self._rng.gauss(-noise * noise / 2, noise))  # its mean is 1
        return max(1e-6, time_s)

    def _end_step(self, now_s: float) -> None:
        """Tokens of the step that ends now come out."""
        plan, scheduler = self._plan, self.scheduler
        self._plan = None
        if plan is None:
            return
        scheduler.feed.observe(plan.row, plan.device_s, now_s)
        if plan.decodes:
            for group in (scheduler.online, scheduler.offline):
                group.advance()
                if group.members and (ended := group.take_ended()):
                    self._note_ended(ended, now_s)
        for request, _, _ in plan.prefills:
            scheduler.kv.cache(request)
            if scheduler.chunked is not request:
                self._first_token(request, now_s)

    def _first_token(self, request: SimRequest, now_s: float) -> None:
        """A prefill is complete: its request has one token more, and decodes."""
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.outputs_at_join += 1
        self.scheduler.join(request)
        if self._steps_left(request) <= 0:
            group = self.scheduler.offline if request.is_offline else self.scheduler.online
            self._note_ended(group.take_ended(), now_s)

    def _note_ended(self, ended: list[SimRequest], now_s: float) -> None:
        scheduler = self.scheduler
        for request in ended:
            num_tokens = self._oracle.output_tokens(request)
            self.results.note_end(request, num_tokens, now_s)
            if self._observer is not None:
                self._observer.ended(request, num_tokens, now_s)
            scheduler.done.append(request)
            if not request.is_offline and request.first_token_s is not None:
                is_kept = scheduler.promise.is_kept(
                    num_tokens,
                    arrival_s=request.arrival_s,
                    first_token_s=request.first_token_s,
                    end_s=now_s,
                )
                self.results.online_kept += is_kept
                if scheduler.promise.is_any:
                    scheduler.planner.limit.note_request(is_kept)

    def _leave(self, ended: list[SimRequest], *, num_more: int) -> None:
        """Requests whose end the scheduler has seen give their memory back.

        `num_more`: tokens of each that the step on its way took room for.
        """
        scheduler = self.scheduler
        if not ended:
            return
        for request in ended:
            group = scheduler.offline if request.is_offline else scheduler.online
            group.remove(request)
            request.computed_tokens += num_more
            scheduler.kv.release(request)
            scheduler.planner.gathering.note_end()
            scheduler.planner.online_lots.note_end()
            if request.is_offline:
                scheduler.planner.gating.note_answer(request.num_outputs)
                scheduler.pool.end(request)
        scheduler.done = []
        scheduler.is_full = False

    def _steps_left(self, request: SimRequest) -> int:
        return self._oracle.output_tokens(request) - request.num_outputs
