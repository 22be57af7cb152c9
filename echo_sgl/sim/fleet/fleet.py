"""The simulated fleet: arrivals, steps and transfers in order of time.

    online  --> relaxed: prefill --push--> strict: decode
    offline --> relaxed: prefill --push--> strict: decode            (base P/D, online priority)
                relaxed: prefill, decode --pull--> strict: decode    (OOCO)

Prefixes are not shared: neither the traces that this is for nor OOCO's fleet have any.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from echo_sgl.batch_shape import BatchRow
from echo_sgl.sim.events import EventQueue, Priority
from echo_sgl.sim.fleet.config import FleetConfig
from echo_sgl.sim.fleet.instance import Instance, RunningStep
from echo_sgl.sim.fleet.moves import Moves
from echo_sgl.sim.fleet.relaxed import RelaxedSteps
from echo_sgl.sim.fleet.results import FleetResults
from echo_sgl.sim.fleet.strict import StrictSteps
from echo_sgl.sim.workload import Oracle, SimRequest, Trace, empty_trace
from echo_sgl.types import Task


def simulate_fleet(
    config: FleetConfig, online: Trace, offline: Trace | None = None, *, until_s: float = math.inf
) -> FleetResults:
    """Serve both traces on one fleet; the same arguments give the same result to the last bit.

    Ends when all is done, or with the first event at `until_s` or later. Units: seconds on the
    traces' clock.
    """
    fleet = Fleet(config, online, offline or empty_trace(Task.OFFLINE))
    fleet.run(until_s=until_s)
    return fleet.results


class Fleet:
    """Instances with one clock. Only this class asks the oracle how long an answer is."""

    def __init__(self, config: FleetConfig, online: Trace, offline: Trace) -> None:
        self.config, self.results = config, FleetResults()
        self._traces = {Task.ONLINE: online, Task.OFFLINE: offline}
        self._oracle = Oracle(online, offline)
        self._events = EventQueue()
        kv = config.kv_tokens
        self.relaxed = [Instance(n, kv, is_strict=False) for n in range(config.num_relaxed)]
        self.strict = [
            Instance(config.num_relaxed + n, kv, is_strict=True) for n in range(config.num_strict)
        ]
        self.moves = Moves(config, self.results, self.relaxed, self.strict)
        self.moves.on_transfer = self._send
        self.moves.on_wake = self._wake_later
        self._relaxed_steps = RelaxedSteps(config, self.results, self.moves)
        self._strict_steps = StrictSteps(config, self.results, self.moves, self._join)

    @property
    def instances(self) -> list[Instance]:
        return [*self.relaxed, *self.strict]

    def run(self, *, until_s: float = math.inf) -> None:
        for task, trace in self._traces.items():
            if len(trace):
                self._events.push(trace.at_s[0], Priority.ARRIVAL, partial(self._arrive, task, 0))
        while len(self._events) and self._events.next_s < until_s:
            now_s, _, event = self._events.pop()
            event(now_s)

    # ---- arrivals --------------------------------------------------------------------------

    def _arrive(self, task: Task, number: int, now_s: float) -> None:
        trace = self._traces[task]
        if number + 1 < len(trace):
            following = partial(self._arrive, task, number + 1)
            self._events.push(trace.at_s[number + 1], Priority.ARRIVAL, following)
        request = trace.request(number)
        self.results.online_came += not request.is_offline
        self.results.offline_came += request.is_offline
        if request.prompt_tokens + self._oracle.output_tokens(request) + 1 > self.config.kv_tokens:
            self.results.refused += 1
            return
        place = self.moves.enqueue(request)
        step = place.step
        if step is None:
            self._start(place, now_s)
        elif step.is_offline and self.config.rules.interrupts and not request.is_offline:
            self._interrupt(place, step, now_s)

    def _interrupt(self, place: Instance, step: RunningStep, now_s: float) -> None:
        """Stop an offline step after the layer that it computes; its work is lost, or kept.

        Source: OOCO 3.4.1.
        """
        layer_s = step.layer_s
        end_s = step.start_s + math.ceil((now_s - step.start_s) / layer_s) * layer_s
        left_s = step.start_s + step.time_s - end_s
        if left_s <= 0:
            return
        self.results.num_interrupts += 1
        self._note_busy(place, -left_s)
        if step.prefills and self.config.rules.keeps_interrupted:
            place.suspended = replace(step, time_s=left_s)
            step = replace(step, prefills=[])
        for request in reversed(step.prefills):
            place.unfix(request)
            self.moves.note_lost(request)
            place.enqueue(request, is_urgent=False, in_front=True)
        self._run(place, RunningStep(now_s, max(end_s, now_s) - now_s))

    # ---- steps -----------------------------------------------------------------------------

    def _start(self, place: Instance, now_s: float) -> None:
        """Let an idle instance run what its rules choose; it stays idle when that is nothing."""
        choose = self._strict_steps if place.is_strict else self._relaxed_steps
        if (chosen := choose.form(place, now_s)) is None:
            return
        step, row = chosen
        self._note(place, row, step)
        self._run(place, step)

    def _run(self, place: Instance, step: RunningStep) -> None:
        place.step = step
        end = partial(self._end, place, step)
        self._events.push(step.start_s + step.time_s, Priority.STEP, end)

    def _note(self, place: Instance, row: BatchRow, step: RunningStep) -> None:
        self.results.note_step(place.place, row, step.start_s, step.time_s)
        self._note_busy(place, step.time_s)

    def _note_busy(self, place: Instance, time_s: float) -> None:
        self.results.strict_busy_s += time_s if place.is_strict else 0.0
        self.results.relaxed_busy_s += 0.0 if place.is_strict else time_s

    def _end(self, place: Instance, step: RunningStep, now_s: float) -> None:
        """Tokens of a step come out; one that was interrupted gives none."""
        if place.step is not step:
            return
        place.step = None
        if step.decodes:
            for group in (place.online, place.offline):
                group.advance()
                for request in group.take_ended():
                    place.take_out(request)
                    self._note_ended(request, now_s)
        for request in step.prefills:
            self._first_token(place, request, now_s)
        self.moves.push_all()
        if not place.is_strict:
            self.moves.serve_pulls()
        self._start(place, now_s)

    def _first_token(self, place: Instance, request: SimRequest, now_s: float) -> None:
        """A prefill is complete: its request has one token more, and decodes somewhere."""
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.outputs_at_join += 1
        if self._steps_left(request) <= 0:
            place.unfix(request)
            self._note_ended(request, now_s)
        elif request.is_offline and self.config.rules.splits_by_latency:
            place.unfix(request)
            self._join(place, request)
        else:
            self.moves.push(request, place)

    def _join(self, place: Instance, request: SimRequest) -> None:
        place.group_of(request).add(request, tokens_left=self._steps_left(request))

    def _note_ended(self, request: SimRequest, now_s: float) -> None:
        num_tokens = self._oracle.output_tokens(request)
        ttft_s, tpot_s = self.results.note_end(request, num_tokens, now_s)
        self.moves.note_answer(request, num_tokens)
        if not request.is_offline:
            is_kept = ttft_s <= self.config.ttft_s and tpot_s <= self.config.tpot_s
            self.results.online_kept += is_kept

    def _steps_left(self, request: SimRequest) -> int:
        return self._oracle.output_tokens(request) - request.num_outputs

    # ---- transfers -------------------------------------------------------------------------

    def _send(self, request: SimRequest, source: Instance, target: Instance) -> None:
        at_s = self._events.now_s + self.config.transfer_s(request.seq_tokens)
        landed = partial(self._landed, request, source, target)
        self._events.push(at_s, Priority.ARRIVAL, landed)

    def _landed(
        self, request: SimRequest, source: Instance, target: Instance, now_s: float
    ) -> None:
        """KV has arrived: the source forgets it, the request joins the target's next step."""
        source.unfix(request)
        del target.inbound[request.rid]
        target.inbox.append(request)
        # What was held back on a prefill instance may have waited for this one to leave.
        for place in (target, *self.relaxed):
            self._wake(place, now_s)

    def _wake_later(self, place: Instance) -> None:
        self._events.push(self._events.now_s, Priority.STEP, partial(self._wake, place))

    def _wake(self, place: Instance, now_s: float) -> None:
        if place.step is None:
            self._start(place, now_s)
