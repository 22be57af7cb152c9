"""What the next step will take, on the server that runs: the one object a scheduler asks.

learn -> RefitBuffer ---every refit_steps---> a new fit of the model
      -> ConformalBand: recent measured / predicted, per kind of step

predict_s = model * ratio to expect                      * (1 + error)
upper_s   = model * ratio that `quantile` stays below    * (1 + error) [* STALE_FACTOR]
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from echo_sgl.batch_shape import BatchRow, BatchShape, FloatArray, Step, StepKind
from echo_sgl.estimators.anchors import COLUMNS as ANCHOR_COLUMNS
from echo_sgl.estimators.anchors import Anchors
from echo_sgl.estimators.batch_time import StepPredictor
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.conformal import FLOOR_S, ConformalBand, Evidence
from echo_sgl.estimators.held_out import Samples
from echo_sgl.estimators.refit import RefitBuffer, refitted

STALE_CHECK_EVERY_S = 1.0


class LiveBatchTime:
    """A batch-time model that its own server's steps keep true.

    `model` comes from a profile, or has no coefficients yet and is fitted to the first steps:
    tried every `FIRST_FIT_STEPS`, until the steps seen can tell what each term costs. A few steps
    tell some terms badly: it is fitted again after as many as it was fitted to. A fit that is
    refused keeps the old model, is counted, and leaves its reason. `refit_steps` 0: a model that
    is there is never fitted again. `error` makes every prediction wrong by that share, for
    experiments; coverage is that of the bound without it. `calibrated`: the highest value of each
    column that the model was calibrated with, if all are known: fits stay near it where live
    steps tell nothing.

    As long as nothing is known, predictions are infinite: a step of unknown cost fits no
    limit, and the caller needs a rule of its own for that time. `upper` is `upper_s` as a
    predictor, for `longest_prefill`.

    Deterministic: the same calls in the same order give the same bits. A refit takes a few
    milliseconds, all else microseconds. Memory: `CAPACITY_PER_KIND` steps per kind.

    Units: tokens in, seconds out; `now_s` of any clock that does not go back.
    """

    FIRST_FIT_STEPS = 25
    CAPACITY_PER_KIND = 1500
    # A machine that became slower by up to a quarter while nobody looked keeps its bounds.
    STALE_FACTOR = 1.25

    def __init__(
        self,
        model: BatchTimeModel,
        *,
        quantile: float = 0.95,
        refit_steps: int = 500,
        stale_s: float = 60.0,
        error: float = 0.0,
        rng_seed: int = 0,
        calibrated: Mapping[str, int] | None = None,
    ) -> None:
        if not (math.isfinite(error) and error > -1):
            raise ValueError(f"error is {error}; it must be above -1, or no step takes time")
        self.quantile, self._refit_steps, self._factor = quantile, refit_steps, 1.0 + error
        self._buffer = RefitBuffer(
            capacity_per_kind=self.CAPACITY_PER_KIND, rng=random.Random(rng_seed)
        )
        self._model = model
        self._band = ConformalBand(model, quantiles=(quantile,), stale_s=stale_s)
        is_told = calibrated is not None and set(calibrated) >= ANCHOR_COLUMNS
        self._anchors = Anchors(model, calibrated) if calibrated and is_told else None
        self._steps_since_fit = 0
        self._next_fit_steps = self.FIRST_FIT_STEPS if model.coefficients_ is None else refit_steps
        # They go into the buffer some at a time: to fetch it takes longer than to put one in.
        self._ahead: list[tuple[BatchRow, float]] = []
        self._advanced_s = -math.inf
        self._asked: tuple[BatchRow | None, float] = (None, 0.0)
        self._margins = dict.fromkeys(StepKind, self._factor)
        self.upper: StepPredictor = _Upper(self.upper_s)
        self.num_refits = 0
        self.num_refusals = 0
        self.last_refusal: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a model; predictions are infinite without."""
        return self._model.coefficients_ is not None

    @property
    def model(self) -> BatchTimeModel:
        """The model as it was fitted last."""
        return self._model

    @property
    def num_drifts(self) -> int:
        """Lasting shifts of the error that were noticed, over all kinds of steps."""
        return sum(map(self._band.num_drifts, StepKind))

    def predict_s(self, step: Step) -> float:
        """Seconds that a step takes, as likely too much as too little; 0 without requests."""
        if not self.is_ready:
            return math.inf
        if not (step.num_prefills or step.num_decodes):
            return 0.0
        return self._usual_s(self._model_s(step), step.kind)

    def upper_s(self, step: Step) -> float:
        """Seconds that a share `quantile` of such steps stays below; 0 without requests.

        Kinds of steps without evidence get the band's cold ratio, those whose evidence was
        stale when `advance` looked last `STALE_FACTOR` on top. What slowed the other kinds down
        since slows these.
        """
        if not self.is_ready:
            return math.inf
        if not (step.num_prefills or step.num_decodes):
            return 0.0
        return self._most_s(self._model_s(step), step.kind)

    def predict_both_s(self, step: Step) -> tuple[float, float]:
        """`predict_s` and `upper_s` of a step at once, for less than one after the other."""
        if not self.is_ready:
            return math.inf, math.inf
        if not (step.num_prefills or step.num_decodes):
            return 0.0, 0.0
        model_s, kind = self._model_s(step), step.kind
        return self._usual_s(model_s, kind), self._most_s(model_s, kind)

    def spread(self, kind: StepKind) -> float:
        """How many times as long as expected a step of this kind takes at most.

        1 while too few of them were seen: their bound is no evidence.
        """
        if self._band.evidence(kind, self._advanced_s) is Evidence.MISSING:
            return 1.0
        return self._most_s(1.0, kind) / self._usual_s(1.0, kind)

    def observe(self, step: Step, time_s: float, now_s: float) -> None:
        """Learn from a step that took `time_s` and ended at `now_s`, see `learn`."""
        row = step.row() if isinstance(step, BatchShape) else step
        self.learn([(row, time_s)], now_s)

    def learn(self, steps: Sequence[tuple[BatchRow, float]], now_s: float) -> None:
        """Learn from steps that ended since the last call, oldest first, with their times.

        Errors: `ValueError` when a time is not a positive number; nothing is learned.
        """
        for _, time_s in steps:
            if not (math.isfinite(time_s) and time_s > 0):
                raise ValueError(f"time_s is {time_s}; a step takes a finite time above 0")
        self._ahead.extend(steps)
        self._steps_since_fit += len(steps)
        if self.is_ready:
            self._band.learn(steps, now_s)
            for kind in {row.kind for row, _ in steps}:
                self._margins[kind] = self._margin(kind, now_s)
        if len(self._ahead) >= self.FIRST_FIT_STEPS:
            self._buffer_ahead()
        if 0 < self._next_fit_steps <= self._steps_since_fit:
            self._fit()

    def advance(self, now_s: float) -> None:
        """Notice which kinds of steps were not observed lately; looked into every second."""
        if 0 <= now_s - self._advanced_s < STALE_CHECK_EVERY_S:
            return
        self._advanced_s = now_s
        for kind in StepKind:
            self._margins[kind] = self._margin(kind, now_s)

    def _margin(self, kind: StepKind, now_s: float) -> float:
        """What bounds of this kind are multiplied with: more if they rest on no steps of now."""
        evidence = self._band.evidence(kind, now_s)
        if evidence is Evidence.FRESH:
            return self._factor
        known_ratio = self._band.central_ratio(kind)
        if evidence is Evidence.MISSING:
            known_ratio = max(1.0, known_ratio)  # as in the band's cold bound
        slower = max(1.0, self._band.slowest_ratio(now_s) / known_ratio)
        return self._factor * slower * (self.STALE_FACTOR if evidence is Evidence.STALE else 1.0)

    def evidence(self, kind: StepKind, now_s: float) -> Evidence:
        """What bounds of this kind rest on; missing as long as there is no model."""
        return self._band.evidence(kind, now_s)

    def coverage(self, kind: StepKind) -> float | None:
        """Share of the recent steps at or below their upper bound; None without any."""
        return self._band.coverage(kind, self.quantile)

    def num_drifts_of(self, kind: StepKind) -> int:
        """Lasting shifts of the error that were noticed for one kind of step."""
        return self._band.num_drifts(kind)

    def _model_s(self, step: Step) -> float:
        """What the model says; a scheduler asks for a step's limit, and again when it runs."""
        if step != self._asked[0]:
            self._asked = step if isinstance(step, BatchRow) else None, self._model.predict_s(step)
        return self._asked[1]

    def _usual_s(self, model_s: float, kind: StepKind) -> float:
        return model_s * self._band.central_ratio(kind) * self._factor

    def _most_s(self, model_s: float, kind: StepKind) -> float:
        ratio = self._band.upper_ratio(kind, self.quantile)
        return max(FLOOR_S, model_s) * ratio * self._margins[kind]

    def _buffer_ahead(self) -> None:
        for row, time_s in self._ahead:
            self._buffer.add(row, time_s)
        self._ahead.clear()

    def _fit(self) -> None:
        self._buffer_ahead()
        self._steps_since_fit = 0
        try:
            self._model = refitted(self._model, self._buffer, self._anchored)
        except ValueError as error:
            self.last_refusal = str(error)
            self.num_refusals += 1
            return
        self._next_fit_steps = min(self._refit_steps, len(self._buffer))
        self.num_refits += 1
        self._asked = None, 0.0
        self._band.replace_model(self._model)

    def _anchored(self, rows: FloatArray) -> Samples:
        """What calibration knew beyond these rows; nothing where there was none."""
        if self._anchors is None:
            return rows[:0], rows[:0, 0]
        return self._anchors.samples(rows, {kind: self._band.recent(kind) for kind in StepKind})


@dataclass(frozen=True, slots=True)
class _Upper:
    predict_s: Callable[[Step], float]
