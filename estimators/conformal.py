"""How long a step takes at most: a band around a batch-time model, kept true by live steps.

    ratio = measured / predicted; expected: the ratio that recent steps make likely
    excess = ratio / expected, as it was before steps were learned from
    upper = predicted * expected * (the excess that `level` of the recent steps did not exceed)
    a step above the bound of then raises `level`, one below lowers it a little

so that the share of steps below their bound comes out as asked even while the ratios drift.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, islice
from operator import attrgetter
from typing import NamedTuple

from echo_sgl.batch_shape import BatchRow, BatchShape, Step, StepKind
from echo_sgl.estimators.batch_time import StepPredictor
from echo_sgl.estimators.drift import DriftDetector

FLOOR_S = 1e-9
# Far beyond what any clock measures: bounds stay finite whatever came before.
MOST_LOG_RATIO, MOST_LOG_BOUND = 200.0, 300.0
# A step that took twice as long, beside its prediction, as the next longest stands alone.
LONE_LOG_RATIO = math.log(2.0)

# Steps learned from together: row, time, and logarithm of measured / predicted.
_Lot = Sequence[tuple[BatchRow, float, float]]


class Evidence(StrEnum):
    """What a band rests on. `MISSING`: too few steps of this kind; `STALE`: none lately."""

    FRESH = "fresh"
    STALE = "stale"
    MISSING = "missing"


class ConformalBand:
    """Upper bounds of execution times, at the quantiles named, per kind of step.

    The caller reports each step that ran, some of them together if it likes. They are judged by
    the bound that stood before them, and their excess is what they were beyond what was expected
    then: so the bound covers what it says even if the caller learns late. (The step in flight while
    others are learned from was planned by the bound before that.) Until `MIN_STEPS` of a kind were
    seen, the bound is `cold_ratio` times the prediction, or what is expected if that is more, or
    what all steps but one stayed below, and the evidence is missing; after `stale_s` without a
    step it is stale. The caller falls back to its conservative side on either.

    Source: adaptive conformal inference (Gibbs and Candes, 2021) on relative residuals.
    Units:  seconds. Memory: `NUM_RATIOS` steps and `coverage_window` bits per kind.
    """

    MIN_STEPS = 30
    NUM_RATIOS = 200
    NUM_CENTRAL = 5
    NUM_AFTER_DRIFT = 30

    def __init__(
        self,
        model: StepPredictor,
        *,
        quantiles: Sequence[float] = (0.5, 0.9, 0.95, 0.99),
        coverage_window: int = 1000,
        stale_s: float = 60.0,
        cold_ratio: float = 1.5,
    ) -> None:
        for quantile in quantiles:
            if not 0 < quantile < 1:
                raise ValueError(f"quantiles holds {quantile}; each must lie between 0 and 1")
        self._model, self._stale_s, self._cold_ratio = model, stale_s, cold_ratio
        self._bands = {
            kind: _Band(quantiles, coverage_window, self.NUM_CENTRAL) for kind in StepKind
        }

    def predict_upper(self, step: Step, quantile: float) -> float:
        """Seconds that a share `quantile` of such steps stays below; 0 without requests.

        Grows with every length and request as long as the kind of step stays the same; kinds
        differ in how far beyond the model they go. Reads, changes nothing.

        Errors: `ValueError` when the band was not built for that quantile.
        """
        if not (step.num_prefills or step.num_decodes):
            return 0.0
        return self._predict_s(step) * self.upper_ratio(step.kind, quantile)

    def at(self, quantile: float) -> StepPredictor:
        """The upper bound as a predictor, for `longest_prefill`."""
        return _UpperBound(self, quantile)

    def observe(self, step: Step, time_s: float, now_s: float) -> None:
        """Learn from a step that took `time_s` and ended at `now_s`, see `learn`."""
        row = step.row() if isinstance(step, BatchShape) else step
        self.learn([(row, time_s)], now_s)

    def learn(self, steps: Iterable[tuple[BatchRow, float]], now_s: float) -> None:
        """Learn from steps that ended since the last call, oldest first, with their times.

        Errors: `ValueError` when a time is not a positive number; nothing is learned.
        """
        lots: dict[StepKind, list[tuple[BatchRow, float, float]]] = {}
        for row, time_s in steps:
            if not (math.isfinite(time_s) and time_s > 0):
                raise ValueError(f"time_s is {time_s}; a step takes a finite time above 0")
            lots.setdefault(row.kind, []).append((row, time_s, self._log_ratio(row, time_s)))
        for kind, lot in lots.items():
            self._learn(self._bands[kind], lot, now_s)

    def _learn(self, band: _Band, lot: _Lot, now_s: float) -> None:
        band.learn(lot, is_judged=len(band.recent) >= self.MIN_STEPS)
        band.shrink(self.NUM_RATIOS)
        band.last_s = now_s if band.last_s is None else max(band.last_s, now_s)
        num_drifts = sum(band.drift.observe(log_ratio) for _, _, log_ratio in lot)
        if num_drifts:
            band.shrink(self.NUM_AFTER_DRIFT)

    def replace_model(self, model: StepPredictor) -> None:
        """Go on with another model: recent steps are compared with what it would have said."""
        self._model = model
        for band in self._bands.values():
            before = math.fsum(one.log_ratio for one in band.recent)
            band.replace(
                [(one.row, one.time_s, self._log_ratio(one.row, one.time_s)) for one in lot]
                for lot in band.lots()
            )
            if band.recent:
                after = math.fsum(one.log_ratio for one in band.recent)
                band.drift.shift((after - before) / len(band.recent))

    def recent(self, kind: StepKind) -> list[tuple[BatchRow, float]]:
        """The steps of this kind that bounds rest on, with their times, oldest first."""
        return [(one.row, one.time_s) for one in self._bands[kind].recent]

    def central_ratio(self, kind: StepKind) -> float:
        """What a step of this kind takes beside the prediction, as likely more as less; 1 before.

        The median of the recent ones puts a model right that is off by a factor. What slows a
        machine slows it for some steps: the median of the last `NUM_CENTRAL`, the fewest of
        which two that are off by chance move nothing, counts as far as such differences have
        lasted: by 0.6 to 1 for steps of 8 ms or more on a shared CPU, hardly for a GPU's prefills,
        which differ by their shapes (`python -m eval.step_times`).
        """
        return self._bands[kind].centre()

    def slowest_ratio(self, now_s: float) -> float:
        """The central ratio of the kind that takes the most beside its predictions.

        Of those that were observed lately: a machine that became slower shows by them. 0 without.
        """
        fresh = (kind for kind in StepKind if self.evidence(kind, now_s) is Evidence.FRESH)
        return max((self.central_ratio(kind) for kind in fresh), default=0.0)

    def upper_ratio(self, kind: StepKind, quantile: float) -> float:
        """What a share `quantile` of the steps of this kind stays below, beside the prediction.

        Errors: `ValueError` when the band was not built for that quantile.
        """
        band = self._bands[kind]
        ratio = band.bounds.get(quantile)
        return self._bound(band, quantile) if ratio is None else ratio

    def evidence(self, kind: StepKind, now_s: float) -> Evidence:
        """Whether bounds of this kind rest on enough steps, and on recent ones."""
        band = self._bands[kind]
        if band.last_s is None or len(band.recent) < self.MIN_STEPS:
            return Evidence.MISSING
        return Evidence.FRESH if now_s - band.last_s <= self._stale_s else Evidence.STALE

    def coverage(self, kind: StepKind, quantile: float) -> float | None:
        """Share of the last `coverage_window` judged steps below their bound; None without any."""
        tracker = self._bands[kind].tracker(quantile)
        return tracker.num_hits / len(tracker.hits) if tracker.hits else None

    def num_drifts(self, kind: StepKind) -> int:
        return self._bands[kind].drift.num_drifts

    def _bound(self, band: _Band, quantile: float) -> float:
        tracker = band.tracker(quantile)
        if len(band.recent) < self.MIN_STEPS:
            cold_ratio = self._cold_ratio * max(1.0, band.centre())
            if len(band.recent) < self.NUM_CENTRAL:
                return cold_ratio
            # One alone may have been measured wrong.
            return max(cold_ratio, band.centre() * math.exp(min(MOST_LOG_BOUND, band.excesses[-2])))
        excess = min(MOST_LOG_BOUND, tracker.bound(band.excesses))
        ratio = band.bounds[quantile] = band.centre() * math.exp(excess)
        return ratio

    def _predict_s(self, step: Step) -> float:
        return max(FLOOR_S, self._model.predict_s(step))

    def _log_ratio(self, row: BatchRow, time_s: float) -> float:
        log_ratio = math.log(time_s / self._predict_s(row))
        return max(-MOST_LOG_RATIO, min(MOST_LOG_RATIO, log_ratio))


@dataclass(frozen=True, slots=True)
class _UpperBound:
    band: ConformalBand
    quantile: float

    def predict_s(self, step: Step) -> float:
        return self.band.predict_upper(step, self.quantile)


class _Tracker:
    """One quantile's level, which every judged step moves by `gain` times what it was off.

    Over any stretch of n steps the coverage is off by the change of `level` / (n * gain). A
    gain in proportion to the misses allowed keeps both small: at 95 % a miss moves the level
    by 0.7 points, and a thousand steps that move it by 5 points are off by as little. With more
    it swings into the tail and back, and bounds are looser than such coverage takes: those of a
    GPU's prefills by 12 % with four times as much.
    """

    def __init__(self, quantile: float, coverage_window: int) -> None:
        self._quantile = self._level = quantile
        self._gain = min(0.05, 0.15 * (1.0 - quantile))
        self.hits: deque[bool] = deque(maxlen=coverage_window)
        self.num_hits = 0

    def bound(self, ordered: Sequence[float]) -> float:
        """The value at `level` of the ordered ones, with the conformal correction for n + 1.

        Beyond the largest, where a streak of misses leads, a quarter of its distance from the
        median is added per miss, as far as a level of 1: steps that are learned from together miss
        together, and bounds of several times what a step takes would follow.
        """
        rank = self._level * (len(ordered) + 1)
        is_lone = ordered[-1] - ordered[-2] > LONE_LOG_RATIO
        if is_lone and len(ordered) * (1 - self._quantile) < 2 and self._level <= self._quantile:
            # Of so few this one would be the bound for long, and may have been measured wrong.
            return ordered[min(math.ceil(rank), len(ordered) - 1) - 1]
        if rank <= len(ordered):
            return ordered[max(0, math.ceil(rank) - 1)]
        excess = self._level - len(ordered) / (len(ordered) + 1)
        spread = ordered[-1] - ordered[len(ordered) // 2]
        return ordered[-1] + 0.25 * spread * excess / self._gain

    def judge(self, is_covered: bool) -> None:
        self.num_hits += is_covered
        if len(self.hits) == self.hits.maxlen:
            self.num_hits -= self.hits[0]
        self.hits.append(is_covered)
        self._level += self._gain * (self._quantile - is_covered)
        self._level = min(1.0, max(0.0, self._level))


class _Lasting:
    """How much of what the last steps differ from the usual by the next one differs by, too.

    A regression through 0 whose samples fade, between 0 and 1; logarithms of ratios, cut to
    `MOST`. At first all of it, as if a difference of 1 % had lasted.
    """

    FADING = 0.99
    MOST = 0.3

    def __init__(self) -> None:
        self._product = self._square = 1e-4

    @property
    def share(self) -> float:
        return min(1.0, max(0.0, self._product / self._square))

    def learn(self, last: float, following: float) -> None:
        last = max(-self.MOST, min(self.MOST, last))
        following = max(-self.MOST, min(self.MOST, following))
        self._product = self.FADING * self._product + last * following
        self._square = self.FADING * self._square + last * last


class _Band:
    """One kind's recent steps, and the logarithms of their ratios and excesses in order of size.

    `bounds` keeps what a quantile's bound is until the next step, as `centre` does: they are
    asked for often.
    """

    def __init__(self, quantiles: Sequence[float], coverage_window: int, num_last: int) -> None:
        self.recent: deque[_Noted] = deque()
        # Arrays, not lists of floats all over the memory: a step of the model clears the caches.
        self._ratios, self.excesses = array("d"), array("d")
        self.drift = DriftDetector()
        self.last_s: float | None = None
        self.bounds: dict[float, float] = {}
        self._num_last, self._lasting = num_last, _Lasting()
        self._centre: float | None = None
        self._found: tuple[float, float] | None = None
        self._trackers = {one: _Tracker(one, coverage_window) for one in quantiles}
        self._num_lots = 0

    def tracker(self, quantile: float) -> _Tracker:
        if quantile not in self._trackers:
            known = ", ".join(map(str, self._trackers))
            raise ValueError(f"quantile is {quantile}; this band was built for {known}")
        return self._trackers[quantile]

    def learn(self, lot: _Lot, *, is_judged: bool) -> None:
        """Add steps that ended since the last lot, and judge the bounds that stood until then.

        `lot`: row, time, and logarithm of the ratio of each.
        """
        usual, last = self._levels()
        expected, excesses = self._expect(), self.excesses
        for tracker in self._trackers.values() if is_judged else ():
            bound = tracker.bound(excesses)
            for _, _, log_ratio in lot:
                tracker.judge(log_ratio - expected <= bound)
        self._keep(lot, expected)
        for _, _, log_ratio in lot:
            self._lasting.learn(last - usual, log_ratio - usual)

    def lots(self) -> list[list[_Noted]]:
        """The steps that are here, as they were learned from together."""
        return [list(lot) for _, lot in groupby(self.recent, key=attrgetter("lot"))]

    def replace(self, lots: Iterable[_Lot]) -> None:
        """Other steps, oldest first, instead of those that are here."""
        replacing = list(lots)
        self.recent.clear()
        del self._ratios[:], self.excesses[:]
        self._changed()
        for lot in replacing:
            self._keep(lot, self._expect())

    def centre(self) -> float:
        """The ratio to expect; 1 before there were `num_last` steps."""
        if self._centre is None:
            self._centre = math.exp(self._expect())
        return self._centre

    def shrink(self, num_left: int) -> None:
        self._changed()
        while len(self.recent) > num_left:
            first = self.recent.popleft()
            del self._ratios[bisect_left(self._ratios, first.log_ratio)]
            del self.excesses[bisect_left(self.excesses, first.excess)]

    def _keep(self, lot: _Lot, expected: float) -> None:
        self._changed()
        self._num_lots += 1
        is_first = len(self.recent) < self._num_last
        for row, time_s, log_ratio in lot:
            excess = log_ratio - expected
            self.recent.append(_Noted(row, time_s, log_ratio, excess, self._num_lots))
            insort(self._ratios, log_ratio)
            insort(self.excesses, excess)
        if is_first and len(self.recent) >= self._num_last:
            self._restate()

    def _restate(self) -> None:
        """Of the first steps nothing was expected: a factor that all share is no excess."""
        self._changed()
        expected = self._expect()
        first = [one._replace(excess=one.log_ratio - expected) for one in self.recent]
        self.recent = deque(first)
        self.excesses = array("d", sorted(one.excess for one in first))

    def _changed(self) -> None:
        self.bounds.clear()
        self._centre = self._found = None

    def _expect(self) -> float:
        usual, last = self._levels()
        return usual + self._lasting.share * (last - usual)

    def _levels(self) -> tuple[float, float]:
        """The median of all that are here and of the last; 0 before there were `num_last`."""
        if len(self.recent) < self._num_last:
            return 0.0, 0.0
        if self._found is None:
            latest = sorted(one.log_ratio for one in islice(reversed(self.recent), self._num_last))
            self._found = self._ratios[len(self._ratios) // 2], latest[self._num_last // 2]
        return self._found


class _Noted(NamedTuple):
    row: BatchRow
    time_s: float
    log_ratio: float
    excess: float
    # Which others it was learned from with.
    lot: int
