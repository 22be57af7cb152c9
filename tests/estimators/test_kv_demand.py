"""What every predictor of KV demand promises, and what only the peak or the mean does."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_sgl.config import ReserveConfig
from echo_sgl.estimators.kv_demand import (
    KvDemandPredictor,
    MeanStdDemand,
    PeakDemand,
    create_kv_demand,
)

WINDOW_S, HORIZON_S, BUCKET_S = 3600.0, 300.0, 15.0
PREDICTORS: dict[str, Callable[[], KvDemandPredictor]] = {
    "mean-std": lambda: MeanStdDemand(window_s=WINDOW_S, k=2.0),
    "peak": lambda: PeakDemand(window_s=WINDOW_S, horizon_s=HORIZON_S, coverage=0.97),
}
Feed = list[tuple[float, int]]

feeds = st.lists(
    st.tuples(st.floats(-20.0, 2000.0), st.integers(0, 10**9)), min_size=1, max_size=150
)
names = st.sampled_from(sorted(PREDICTORS))


@pytest.fixture(params=PREDICTORS)
def predictor(request: pytest.FixtureRequest) -> KvDemandPredictor:
    return PREDICTORS[request.param]()


def at_times(gaps: Feed) -> Feed:
    """From steps of time (some negative) to times."""
    now_s, feed = 0.0, []
    for gap_s, tokens in gaps:
        now_s += gap_s
        feed.append((now_s, tokens))
    return feed


def play(predictor: KvDemandPredictor, feed: Iterable[tuple[float, int]]) -> list[float | None]:
    predicted = []
    for now_s, tokens in feed:
        predictor.observe(now_s, tokens)
        predicted.append(predictor.predict_peak(now_s))
    return predicted


def each_second(series: Iterable[int], start_s: float = 0.0) -> Iterator[tuple[float, int]]:
    return ((start_s + second, int(tokens)) for second, tokens in enumerate(series))


def coverage(series: np.ndarray, predicted: list[float | None], start: int = 60) -> float:
    horizon = int(HORIZON_S)
    peaks = np.lib.stride_tricks.sliding_window_view(series[1:], horizon).max(axis=1)
    made = predicted[start : len(peaks)]
    hits = [p is not None and peak <= p for p, peak in zip(made, peaks[start:], strict=True)]
    return float(np.mean(hits))


def shot_noise(rate: np.ndarray, *, seed: int, cv: float = 1.0, hold_s: int = 8) -> np.ndarray:
    """Use under arrivals of `rate` a second in clumps: each holds ~1000 tokens for a while."""
    rng = np.random.default_rng(seed)
    clumps = rng.gamma(1 / cv**2, cv**2, len(rate)) if cv > 1 else np.ones(len(rate))
    arrived = rng.poisson(rate * clumps)
    tokens = np.array([rng.lognormal(6.5, 0.8, count).sum() for count in arrived])
    return np.convolve(tokens, np.ones(hold_s))[: len(rate)].astype(np.int64)


# The contract


def test_nothing_is_predicted_before_anything_was_seen(predictor):
    assert predictor.predict_peak(0.0) is None
    assert predictor.predict_peak(1e9) is None


def test_a_constant_use_is_predicted_at_least_as_high(predictor):
    predicted = play(predictor, each_second([700] * 900))
    assert predicted[60] is not None
    # Rounding of sums may cost the mean a millionth of a token.
    assert all(tokens >= 700 - 1e-6 for tokens in predicted[60:] if tokens is not None)


@given(names, feeds)
def test_predictions_are_finite_and_never_negative(name, gaps):
    for tokens in play(PREDICTORS[name](), at_times(gaps)):
        assert tokens is None or (math.isfinite(tokens) and tokens >= 0)


@given(names, feeds)
def test_the_same_feed_gives_the_same_output_whoever_looks_in_between(name, gaps):
    feed = at_times(gaps)
    one, other = PREDICTORS[name](), PREDICTORS[name]()
    predicted = play(one, feed)
    for now_s, tokens in feed:
        other.observe(now_s, tokens)
    assert other.predict_peak(feed[-1][0]) == predicted[-1]


@given(names, feeds, st.integers(1, 8))
def test_a_series_times_a_power_of_two_gives_predictions_times_it(name, gaps, power):
    feed = [(now_s, 1000 + tokens) for now_s, tokens in at_times(gaps)]
    larger = [(now_s, tokens * 2**power) for now_s, tokens in feed]
    pairs = zip(play(PREDICTORS[name](), feed), play(PREDICTORS[name](), larger), strict=True)
    for base, scaled in pairs:
        assert (base is None) == (scaled is None)
        assert base is None or scaled == pytest.approx(base * 2**power)


@given(names, st.lists(st.integers(1000, 10**6), min_size=120, max_size=600), st.floats(1.05, 20.0))
@settings(max_examples=30)
def test_more_of_the_same_use_is_never_predicted_as_less(name, series, factor):
    base = play(PREDICTORS[name](), each_second(series))
    more = play(PREDICTORS[name](), each_second(math.ceil(factor * one) for one in series))
    assert all(a <= b for a, b in zip(base, more, strict=True) if a is not None and b is not None)


def test_memory_is_bounded_whatever_the_rate_and_the_time_that_passed(predictor):
    rng = np.random.default_rng(5)
    series = rng.integers(0, 10**6, 40_000).tolist()
    play(predictor, ((step * 0.5, one) for step, one in enumerate(series[:20_000])))
    before = len(pickle.dumps(predictor))
    play(predictor, ((1e4 + step * 40.0, one) for step, one in enumerate(series[20_000:])))
    assert len(pickle.dumps(predictor)) < 1.1 * before
    play(predictor, ((1e6 + step * 1e-4, one) for step, one in enumerate(series)))
    assert len(pickle.dumps(predictor)) < 1.1 * before


def test_time_that_stands_still_or_goes_back_does_not_move_the_predictor(predictor):
    play(predictor, each_second([500] * 200))
    before = predictor.predict_peak(199.0)
    for now_s in (199.0, 100.0, -1e9, math.nan):
        for _ in range(1000):
            predictor.observe(now_s, 400)
        assert predictor.predict_peak(now_s) == before


def test_after_a_jump_back_the_predictor_goes_on_when_time_catches_up(predictor):
    play(predictor, each_second([500] * 200))
    play(predictor, each_second([500] * 150))
    assert play(predictor, each_second([5000] * 400, start_s=200.0))[-1] > 2500


def test_a_gap_is_neither_use_nor_idleness(predictor):
    feed = list(each_second([1000] * 600))
    steady = play(predictor, feed)[-1]
    later = play(predictor, each_second([1000] * 300, start_s=2000.0))
    assert later[-1] == pytest.approx(steady, rel=0.3)


def test_nothing_is_predicted_while_the_last_observation_is_a_window_old(predictor):
    play(predictor, each_second([1000] * 600))
    assert predictor.predict_peak(599.0 + WINDOW_S) is not None
    assert predictor.predict_peak(601.0 + WINDOW_S) is None


def test_huge_steps_of_time_are_taken_in_one_go(predictor):
    play(predictor, [(0.0, 5), (1e12, 7), (1e12 + 20, 7), (1e17, 3), (1e17 + 64, 9)])
    assert predictor.predict_peak(1e17 + 64) is None or predictor.predict_peak(1e17 + 64) >= 0


@pytest.mark.parametrize("rate_hz", [2, 300])
def test_the_rate_of_observations_does_not_matter(predictor, rate_hz):
    series = shot_noise(np.full(900, 5.0), seed=11)
    reference = play(predictor, each_second(series))
    dense = PREDICTORS["peak" if isinstance(predictor, PeakDemand) else "mean-std"]()
    for now_s, tokens in each_second(series):
        for part in range(rate_hz):
            dense.observe(now_s + part / rate_hz, tokens)
    assert dense.predict_peak(900.0) == pytest.approx(reference[-1], rel=1e-6)


# Mean and standard deviation


def test_mean_std_weights_by_time_and_not_by_the_number_of_observations():
    predictor = MeanStdDemand(window_s=WINDOW_S, k=2.0)
    for start_s in range(0, 600, 15):
        for part in range(50):
            predictor.observe(start_s + part * 0.1, 900)  # 5 s, often seen
        predictor.observe(start_s + 5.0, 300)  # 10 s, seen once
    predictor.observe(600.0, 300)
    mean, std = 500.0, math.sqrt((900**2 + 2 * 300**2) / 3 - 500.0**2)
    assert predictor.predict_peak(600.0) == pytest.approx(mean + 2 * std)


def test_mean_std_forgets_what_is_older_than_the_window():
    predictor = MeanStdDemand(window_s=240.0, k=2.0)
    play(predictor, each_second([10_000] * 300))
    assert play(predictor, each_second([100] * 250, start_s=300.0))[-1] == pytest.approx(100)


def test_mean_std_counts_no_use_while_nothing_was_observed():
    """300 s of 1,000 tokens, half an hour of which nobody knows, and 300 s of 100."""
    predictor = MeanStdDemand(window_s=3600.0, k=0.0)
    play(predictor, each_second([1000] * 301))
    predicted = play(predictor, each_second([100] * 301, start_s=2100.0))[-1]
    assert predicted == pytest.approx(550, rel=0.05)


def test_mean_std_says_nothing_until_somebody_was_there_and_goes_on_when_all_have_left():
    """Else a server that nobody has found yet keeps no reserve for those who will."""
    predictor = MeanStdDemand(window_s=WINDOW_S, k=2.0)
    assert set(play(predictor, each_second([0] * 900))) == {None}
    assert play(predictor, each_second([100] * 60, start_s=900.0))[-1] is not None
    predicted = play(predictor, each_second([0] * 5000, start_s=960.0))
    assert None not in predicted and predicted[-1] == 0.0


# Peaks


def test_peak_waits_for_a_minute_of_use_and_not_longer():
    predicted = play(PREDICTORS["peak"](), each_second([1000] * 120))
    assert predicted[59] is None
    assert predicted[60] is not None


def test_peak_counts_its_first_minute_from_the_first_use():
    predicted = play(PREDICTORS["peak"](), each_second([0] * 1800 + [1000] * 120))
    assert all(tokens is None for tokens in predicted[:1800])
    assert predicted[-1] >= 1000


def test_use_that_has_already_come_is_never_above_the_prediction():
    predictor = PREDICTORS["peak"]()
    play(predictor, each_second([1000] * 300))
    predictor.observe(300.5, 10**6)
    assert predictor.predict_peak(300.5) >= 10**6


def test_the_margin_shrinks_where_nothing_happens():
    predicted = play(PREDICTORS["peak"](), each_second([1000] * 14_400))
    assert predicted[61] > 1500
    assert predicted[-1] < 1300


def test_a_prediction_falls_after_traffic_stops_and_does_not_forget_that_it_may_return():
    series = [2000, 1000] * 1800 + [0] * 7200
    predicted = play(PREDICTORS["peak"](), each_second(series))
    assert 0 < predicted[-1] < 0.5 * predicted[3599]


def test_four_times_the_rate_is_followed_within_a_horizon():
    rate = np.concatenate([np.full(3600, 3.0), np.full(3600, 12.0)])
    series = shot_noise(rate, seed=3)
    predicted = play(PREDICTORS["peak"](), each_second(series))
    assert coverage(series[3900:], predicted[3900:], start=0) >= 0.95
    assert predicted[7199] < 3 * series[3900:].max()


PROCESSES = {
    "poisson, day and night": shot_noise(
        4 + 3 * np.sin(np.arange(28_800) * 2 * np.pi / 14_400), seed=1
    ),
    "clumps of CV 3": shot_noise(np.full(14_400, 3.0), seed=2, cv=3.0),
    "seventeen minutes": shot_noise(np.full(1020, 4.0), seed=4, cv=1.5),
}


@pytest.mark.parametrize("process", PROCESSES)
def test_the_next_peak_is_covered_from_the_first_minute_on(process):
    series = PROCESSES[process]
    predicted = play(PREDICTORS["peak"](), each_second(series))
    assert coverage(series, predicted) >= 0.95


def test_steps_of_four_cost_no_more_than_the_horizons_that_no_past_could_foresee():
    seconds = np.arange(14_400)
    series = shot_noise(np.where(seconds // 3600 % 2, 8.0, 2.0), seed=3)
    predicted = play(PREDICTORS["peak"](), each_second(series))
    num_judged = len(series) - HORIZON_S - 60
    unforeseeable = 2 * HORIZON_S / num_judged  # two steps up
    assert coverage(series, predicted) >= 0.97 - unforeseeable


def test_a_higher_coverage_is_never_predicted_lower_at_the_start():
    series = shot_noise(np.full(300, 4.0), seed=6)
    careless, careful = (
        play(PeakDemand(window_s=WINDOW_S, horizon_s=HORIZON_S, coverage=one), each_second(series))
        for one in (0.5, 0.99)
    )
    assert careful[100] > careless[100]


@pytest.mark.parametrize("window_s", [1.0, 86_400.0])
@pytest.mark.parametrize("horizon_s", [1.0, 3600.0])
@pytest.mark.parametrize("wanted", [0.5, 0.999])
def test_every_allowed_setting_gives_a_prediction_in_the_end(window_s, horizon_s, wanted):
    predictor = PeakDemand(window_s=window_s, horizon_s=horizon_s, coverage=wanted)
    predicted = play(predictor, ((step * 0.7, 1000 + step % 7) for step in range(5000)))
    assert predicted[-1] >= 1000


# The factory


def test_the_config_names_the_predictor():
    assert isinstance(create_kv_demand(ReserveConfig()), PeakDemand)
    assert isinstance(create_kv_demand(ReserveConfig(predictor="mean-std")), MeanStdDemand)
    assert create_kv_demand(ReserveConfig(predictor="off")) is None


def test_an_unknown_predictor_is_refused_by_name():
    with pytest.raises(ValueError, match="'crystal'; known are peak, mean-std, off"):
        create_kv_demand(ReserveConfig(predictor="crystal"))


@pytest.mark.parametrize("first_tokens", [0, 40, 300])
def test_a_first_request_and_a_pause_do_not_make_the_margin_that_of_a_burst(first_tokens):
    """What follows is a hundred times as much, and was no burst: the server had just started."""
    rng = np.random.default_rng(0)
    traffic = rng.integers(1500, 4000, 900)
    predictor = PREDICTORS["peak"]()
    play(predictor, each_second([first_tokens, first_tokens, *[0] * 200, *traffic]))
    predicted = predictor.predict_peak(1100.0)
    assert predicted is not None
    assert 4000 <= predicted <= 3 * 4000
