"""How far the estimator is off, on /metrics: its errors, coverage, drifts and evidence."""

from __future__ import annotations

import math

from echo_sgl.batch_shape import StepKind
from echo_sgl.engine.metrics.counters import CounterTotals
from echo_sgl.estimators.conformal import Evidence
from echo_sgl.estimators.live import LiveBatchTime

_HALF = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
# From 0 on: OpenMetrics knows no histogram with a sum and negative buckets, and SGLang's router
# drops the whole page of a server that shows one.
RATIO_BUCKETS = (*(1.0 - bound for bound in reversed(_HALF)), 1.0, *(1.0 + x for x in _HALF))
EVIDENCE_VALUES = {Evidence.MISSING: 0, Evidence.STALE: 1, Evidence.FRESH: 2}


class EstimatorMetrics:
    """Reported by the leading rank of each replica; of several replicas the worst one shows."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        by_kind = ["kind"]
        ratio = Histogram(
            "echo_sgl_step_time_predicted_ratio",
            "Predicted / measured time of a step, by what the step ran.",
            by_kind,
            buckets=RATIO_BUCKETS,
        )
        self._coverage = Gauge(
            "echo_sgl_step_time_coverage_ratio",
            "Share of recent steps that took no longer than their upper bound.",
            by_kind,
            multiprocess_mode="livemin",
        )
        evidence = Gauge(
            "echo_sgl_step_time_evidence",
            "What bounds rest on: 0 too few steps, 1 none lately, 2 recent ones.",
            by_kind,
            multiprocess_mode="livemin",
        )
        drifts = Counter(
            "echo_sgl_step_time_drifts", "Lasting shifts of the prediction's error.", by_kind
        )
        self._refits = Counter("echo_sgl_step_time_refits", "Fits of the model to live steps.")
        self._refusals = Counter(
            "echo_sgl_step_time_refit_refusals",
            "Fits that the steps seen did not allow; the model before stayed.",
        )
        self._totals = CounterTotals()
        self._ratio = {kind: ratio.labels(kind) for kind in StepKind}
        self._evidence = {kind: evidence.labels(kind) for kind in StepKind}
        self._drifts = {kind: drifts.labels(kind) for kind in StepKind}

    def observe(self, kind: StepKind, predicted_s: float, time_s: float) -> None:
        """A step ended; what was not predicted, or predicted as infinite, has no ratio."""
        if math.isfinite(predicted_s):
            self._ratio[kind].observe(predicted_s / time_s)

    def publish(self, live: LiveBatchTime, now_s: float) -> None:
        """Refresh all other series; once a second."""
        for kind in StepKind:
            if (coverage := live.coverage(kind)) is not None:
                self._coverage.labels(kind).set(coverage)
            self._evidence[kind].set(EVIDENCE_VALUES[live.evidence(kind, now_s)])
            self._totals.bring(self._drifts[kind], live.num_drifts_of(kind))
        self._totals.bring(self._refits, live.num_refits)
        self._totals.bring(self._refusals, live.num_refusals)
