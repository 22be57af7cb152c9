"""The scheduler's steps on /metrics: their limit, who sits out, and what planning them costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from echo_sgl.engine.metrics.counters import CounterTotals
from echo_sgl.engine.metrics.estimator_metrics import EstimatorMetrics
from echo_sgl.engine.settings import active_config
from echo_sgl.types import Task

if TYPE_CHECKING:
    from echo_sgl.config import SloConfig
    from echo_sgl.engine.steps.step_control import StepControl

OVERHEAD_BUCKETS_S = tuple(10e-6 * 2**step for step in range(12))


class StepMetrics:
    """Reported by the leading rank of each replica, from counts that the engine keeps anyway."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def gauge(name: str, text: str, mode: Any = "livesum") -> Any:
            return Gauge(name, text, ["task"], multiprocess_mode=mode)

        parks = Counter(
            "echo_sgl_parks",
            "Times that a decoding request sat out, with its KV kept; online ones for a step each.",
            ["task"],
        )
        self._parks, self._given_turns = parks.labels(Task.OFFLINE), parks.labels(Task.ONLINE)
        self._resumes = Counter(
            "echo_sgl_resumes", "Times that a request which sat out decodes again.", ["task"]
        ).labels(Task.OFFLINE)
        self._parked_prefills = Counter(
            "echo_sgl_parked_prefills",
            "Chunked prefills that were set aside for an online request.",
            ["task"],
        ).labels(Task.OFFLINE)
        self._given_places = Counter(
            "echo_sgl_given_places",
            "Times that a decode ahead of its due time gave its place to a request that waited.",
            ["task"],
        ).labels(Task.ONLINE)
        retractions = Counter(
            "echo_sgl_retractions",
            "Running requests that lost their place and KV cache and will be resumed.",
            ["task"],
        )
        self._retractions = {task: retractions.labels(task) for task in Task}
        self._parked = gauge("echo_sgl_parked_requests", "Requests that sit out now.").labels(
            Task.OFFLINE
        )
        self._limit_s = gauge(
            "echo_sgl_step_limit_seconds",
            "What a step with offline work may take now; +Inf without a limit.",
            "livemax",
        ).labels(Task.OFFLINE)
        self._wait_s = gauge(
            "echo_sgl_online_wait_seconds",
            "Longest time from an online request's arrival to its first prefill, last minutes.",
            "livemax",
        ).labels(Task.ONLINE)
        self._wait_steps = gauge(
            "echo_sgl_online_wait_steps",
            "Most steps with offline work that an online request waited for, last minutes.",
            "livemax",
        ).labels(Task.ONLINE)
        self._overhead_s = Histogram(
            "echo_sgl_planning_seconds",
            "CPU time of Echo's own code in the scheduler, one value per step.",
            ["task"],
            buckets=OVERHEAD_BUCKETS_S,
        ).labels(Task.OFFLINE)
        self._show_promises(active_config().slo)
        self._estimator = EstimatorMetrics()
        self._totals = CounterTotals()

    def observe(self, control: StepControl) -> None:
        """Take in the steps that ended since; often, so that no step pays for many."""
        control.timer.collect()
        control.log.predict()
        notes = control.timer.ended_notes
        while notes:
            note = notes.popleft()
            assert note.time_s is not None
            self._estimator.observe(note.row.kind, note.predicted_s, note.time_s)
        while control.own_time.steps_s:
            self._overhead_s.observe(control.own_time.steps_s.popleft())

    def publish(self, control: StepControl, now_s: float) -> None:
        """Refresh all other series; once a second."""
        self._estimator.publish(control.estimator, now_s)
        counts = control.counts
        self._totals.bring(self._parks, counts.num_parks)
        self._totals.bring(self._given_turns, counts.num_given_turns)
        self._totals.bring(self._resumes, counts.num_resumes)
        self._totals.bring(self._parked_prefills, counts.num_prefill_parks)
        self._totals.bring(self._given_places, counts.num_given_places)
        for task, counter in self._retractions.items():
            self._totals.bring(counter, counts.num_retractions[task])
        self._parked.set(len(control.parked))
        self._limit_s.set(control.planner.limit_s)
        self._wait_s.set(control.online_wait_s.value(now_s))
        self._wait_steps.set(control.online_wait_steps.value(now_s))

    @staticmethod
    def _show_promises(slo: SloConfig) -> None:
        from prometheus_client import Gauge

        for name, promise_s in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s)):
            Gauge(
                f"echo_sgl_promised_{name}_seconds",
                f"The {name.upper()} that online requests are promised; +Inf without a promise.",
                ["task"],
                multiprocess_mode="livemax",
            ).labels(Task.ONLINE).set(promise_s or math.inf)
