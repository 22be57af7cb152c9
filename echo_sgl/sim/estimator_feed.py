"""Shows simulated steps to the estimator, as many as it can learn from."""

from __future__ import annotations

from echo_sgl.batch_shape import BatchRow, StepKind
from echo_sgl.estimators.live import LiveBatchTime

SETTLED_STEPS = 256
EVERY_S = 1.0


class EstimatorFeed:
    """Passes on every step, unless times are exact: then one per kind and second will do.

    Without noise a step takes what the model says, up to a constant: `SETTLED_STEPS` of a kind
    say all there is to say about it, later ones only that it was seen lately.
    """

    def __init__(self, estimator: LiveBatchTime, *, is_exact: bool) -> None:
        self._estimator, self._is_exact = estimator, is_exact
        self._num_seen = dict.fromkeys(StepKind, 0)
        self._last_s = dict.fromkeys(StepKind, 0.0)

    def observe(self, row: BatchRow, time_s: float, now_s: float) -> None:
        kind = row.kind
        is_settled = self._is_exact and self._num_seen[kind] >= SETTLED_STEPS
        if is_settled and 0 <= now_s - self._last_s[kind] < EVERY_S:
            return
        self._num_seen[kind] += 1
        self._last_s[kind] = now_s
        self._estimator.observe(row, time_s, now_s)

    def advance(self, now_s: float) -> None:
        self._estimator.advance(now_s)
