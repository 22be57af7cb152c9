"""How much KV cache online requests will need at most in the next minutes.

`KvDemandPredictor` owns the accounting: it sums observations into buckets, and a subclass
forecasts at the end of each bucket. Between two ends `observe` is a few additions and
`predict_peak` a comparison. Nothing here reads a clock: time is what the caller says.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import numpy as np

from echo_sgl.config import ReserveConfig

BUCKETS_PER_WINDOW = 240
BUCKETS_PER_HORIZON = 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Use in one stretch of time: token-seconds, token^2-seconds, observed seconds, highest."""

    area: float
    square_area: float
    covered_s: float
    peak_tokens: int


class KvDemandPredictor(ABC):
    """Sums the observed use into buckets and keeps the forecast of the last bucket's end.

    A value holds until the next observation, or the end of its bucket when nothing was
    observed in the whole next one. Such a gap counts neither as use nor as idleness: windows
    and horizons are observed time. Time that stands still or goes back does not move the
    predictor. Memory is bounded by `BUCKETS_PER_WINDOW`, and looking changes nothing.
    """

    def __init__(self, *, window_s: float, bucket_s: float) -> None:
        self._window_s, self._bucket_s = window_s, bucket_s
        self._origin_s: float | None = None
        self._now_s = self._end_s = 0.0
        self._index = self._used_tokens = self._peak_tokens = 0
        self._area = self._square_area = self._covered_s = 0.0
        self._forecast_tokens: float | None = None

    def observe(self, now_s: float, used_tokens: int) -> None:
        """Note that online requests hold `used_tokens` from `now_s` on; O(1) amortised."""
        if self._origin_s is None:
            self._origin_s, self._now_s, self._end_s = now_s, now_s, now_s + self._bucket_s
        if now_s > self._now_s:
            if now_s >= self._end_s:
                self._turn(self._origin_s, now_s)
            self._hold(now_s)
        self._used_tokens = used_tokens
        self._peak_tokens = max(self._peak_tokens, used_tokens)

    def predict_peak(self, now_s: float) -> float | None:
        """Upper estimate (tokens) of the highest use from `now_s` until the horizon's end.

        None until enough was seen, and while the last observation is a whole window old.
        """
        return None if now_s - self._now_s > self._window_s else self._forecast_tokens

    @abstractmethod
    def _forecast(self, bucket: Bucket) -> float | None:
        """Take in a bucket that ended; the result holds until the next one ends."""

    def _turn(self, origin_s: float, now_s: float) -> None:
        """Close the bucket in progress and open the one that `now_s` falls into."""
        self._hold(self._end_s)
        # One more than before even where rounding says otherwise: an index never comes twice.
        index = max(self._index + 1, math.floor((now_s - origin_s) / self._bucket_s))
        if self._covered_s > 0:
            sums = self._area, self._square_area, self._covered_s
            self._forecast_tokens = self._forecast(Bucket(*sums, self._peak_tokens))
        is_gap = index > self._index + 1
        self._now_s = now_s if is_gap else self._end_s
        self._peak_tokens = 0 if is_gap else self._used_tokens
        self._area = self._square_area = self._covered_s = 0.0
        self._index, self._end_s = index, origin_s + (index + 1) * self._bucket_s

    def _hold(self, until_s: float) -> None:
        """The last value held until then."""
        held_s = max(0.0, until_s - self._now_s)
        self._area += self._used_tokens * held_s
        self._square_area += self._used_tokens * self._used_tokens * held_s
        self._covered_s += held_s
        self._now_s = until_s


class MeanStdDemand(KvDemandPredictor):
    """Mean plus `k` standard deviations of the use over the last `window_s`.

    It says nothing about how long a time it holds for: it covers single instants of a
    normally distributed use (k = 2: 97.7 %), and the peak of several minutes less often.

    Source: Echo 5.3 (mu + k * sigma over the past hour), weighted by time.
    Units:  tokens.
    """

    def __init__(self, *, window_s: float, k: float) -> None:
        super().__init__(window_s=window_s, bucket_s=window_s / BUCKETS_PER_WINDOW)
        self._k = k
        self._buckets: deque[Bucket] = deque(maxlen=BUCKETS_PER_WINDOW)
        self._was_used = False

    def _forecast(self, bucket: Bucket) -> float | None:
        self._buckets.append(bucket)
        self._was_used = self._was_used or bucket.area > 0
        if not self._was_used:
            return None
        covered_s = sum(one.covered_s for one in self._buckets)
        mean = sum(one.area for one in self._buckets) / covered_s
        mean_square = sum(one.square_area for one in self._buckets) / covered_s
        return mean + self._k * math.sqrt(max(0.0, mean_square - mean * mean))


@dataclass(slots=True)
class _Forecast:
    """A forecast whose horizon is still running; `peak_tokens` is what came so far."""

    level_tokens: float
    tokens: float
    weight: float
    peak_tokens: int = 0
    missed: bool = False


class PeakDemand(KvDemandPredictor):
    """A level of use times a margin that covered the wanted share of the peaks seen so far.

    The level is halfway between the peak of the last horizon and the mean of such peaks
    over the window, as bursts fall back to the usual. The margin is a quantile of the ratios
    "peak that came / level", kept in a fading histogram that starts as a guess: with one
    chance in 32 a peak is more than twice the level. How far up the quantile lies moves with
    every horizon that was covered or missed (a miss counts at once, not at the horizon's
    end), so that the promised share is met when the guess or the past misleads.

    A level that nothing supports would be worse than none: there is no forecast before
    `WARM_UP_HORIZONS` of use, and forecasts made in the first horizon count partly. That
    traffic is many times what came before it says nothing when that was next to nothing (a
    first request, then a pause): a forecast counts by its level beside the highest use.

    Source: adaptive conformal inference (Gibbs and Candes, 2021); the base, prior and early
            count of misses are ours.
    Units:  seconds and tokens; ratios are natural logarithms.
    """

    WARM_UP_HORIZONS = 0.2
    PRIOR_HORIZONS = 2.0
    STEP_PER_HORIZON = 0.02
    HALF_LIFE_WINDOWS = 12
    # What remains of the highest use ever seen (fading too), for traffic that comes back.
    MIN_LEVEL_SHARE = 0.1

    def __init__(self, *, window_s: float, horizon_s: float, coverage: float) -> None:
        bucket_s = max(window_s / BUCKETS_PER_WINDOW, horizon_s / BUCKETS_PER_HORIZON)
        super().__init__(window_s=window_s, bucket_s=bucket_s)
        self._num_horizon_buckets = math.ceil(horizon_s / bucket_s)
        self._target = self._miss_share = 1.0 - coverage
        self._step = self.STEP_PER_HORIZON / self._num_horizon_buckets
        self._fading = 0.5 ** (bucket_s / (self.HALF_LIFE_WINDOWS * window_s))
        self._ratios = _RatioHistogram(prior_weight=self.PRIOR_HORIZONS * self._num_horizon_buckets)
        self._recent: deque[int] = deque(maxlen=self._num_horizon_buckets)
        self._horizon_peaks: deque[int] = deque(maxlen=math.ceil(window_s / bucket_s))
        self._running: deque[_Forecast] = deque()
        self._num_used_buckets, self._highest_tokens = 0, 0.0

    def predict_peak(self, now_s: float) -> float | None:
        forecast = super().predict_peak(now_s)
        return None if forecast is None else max(forecast, float(self._peak_tokens))

    def _forecast(self, bucket: Bucket) -> float | None:
        self._highest_tokens = max(self._highest_tokens * self._fading, bucket.peak_tokens)
        if self._highest_tokens < 1:
            return None
        self._num_used_buckets += 1
        self._learn(bucket)
        level_tokens = self._level(bucket)
        age = self._num_used_buckets / self._num_horizon_buckets
        if age < self.WARM_UP_HORIZONS:
            return None
        tokens = level_tokens * self._ratios.quantile(1.0 - self._miss_share)
        self._running.append(_Forecast(level_tokens, tokens, min(1.0, age)))
        return tokens

    def _level(self, bucket: Bucket) -> float:
        self._recent.append(bucket.peak_tokens)
        recent_peak = max(self._recent)
        self._horizon_peaks.append(recent_peak)
        usual_peak = sum(self._horizon_peaks) / len(self._horizon_peaks)
        usual_peak = max(usual_peak, self.MIN_LEVEL_SHARE * self._highest_tokens)
        return 0.5 * recent_peak + 0.5 * usual_peak

    def _learn(self, bucket: Bucket) -> None:
        """Compare the running forecasts with a bucket's peak; the one that ended is counted."""
        for forecast in self._running:
            forecast.peak_tokens = max(forecast.peak_tokens, bucket.peak_tokens)
            if forecast.peak_tokens > forecast.tokens and not forecast.missed:
                forecast.missed = True
                self._miss_share -= self._step * (1.0 - self._target)
        self._ratios.fade(self._fading)
        if len(self._running) == self._num_horizon_buckets:
            ended = self._running.popleft()
            weight = ended.weight * self._worth(ended)
            self._ratios.add(ended.peak_tokens / ended.level_tokens, weight)
            self._miss_share += 0.0 if ended.missed else self._step * self._target
        self._miss_share = min(max(self._miss_share, self._target / 5), 5 * self._target, 1.0)

    def _worth(self, forecast: _Forecast) -> float:
        """How much a forecast teaches: what it was made of, beside the highest use by now."""
        return min(1.0, forecast.level_tokens / self._highest_tokens)


class _RatioHistogram:
    """Fading counts of ratios; a quantile is its bin's upper edge, so it errs upwards.

    A ratio above the last edge (8) counts as 8: no reserve can hold what follows such a jump.
    """

    BIN = 0.02
    LOWEST, HIGHEST = -3.0, math.log(8.0)
    PRIOR_SCALE = 0.2

    def __init__(self, *, prior_weight: float) -> None:
        self._edges = np.arange(self.LOWEST, self.HIGHEST + self.BIN, self.BIN)
        prior = np.where(self._edges >= 0, np.exp(-self._edges / self.PRIOR_SCALE), 0.0)
        self._weights = prior * (prior_weight / prior.sum())

    def add(self, ratio: float, weight: float) -> None:
        log_ratio = math.log(max(ratio, math.exp(self.LOWEST)))
        bin_number = math.ceil((log_ratio - self.LOWEST) / self.BIN)
        self._weights[min(bin_number, len(self._weights) - 1)] += weight

    def fade(self, factor: float) -> None:
        self._weights *= factor

    def quantile(self, share: float) -> float:
        cumulated = np.cumsum(self._weights)
        bin_number = int(np.searchsorted(cumulated, share * cumulated[-1]))
        return math.exp(float(self._edges[min(bin_number, len(self._edges) - 1)]))


def create_kv_demand(config: ReserveConfig) -> KvDemandPredictor | None:
    """Build a predictor by its config; None when it is off. Errors: `ValueError` names all."""
    window_s, horizon_s = config.window_s, config.horizon_s
    if config.predictor == "peak":
        return PeakDemand(window_s=window_s, horizon_s=horizon_s, coverage=config.coverage)
    if config.predictor == "mean-std":
        return MeanStdDemand(window_s=window_s, k=config.k)
    if config.predictor == "off":
        return None
    raise ValueError(f"reserve.predictor is {config.predictor!r}; known are peak, mean-std, off")
