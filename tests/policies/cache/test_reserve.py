"""The reserve's bounds, and what is left to offline requests."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.config import ReserveConfig
from echo_sgl.estimators.kv_demand import KvDemandPredictor, create_kv_demand
from echo_sgl.policies.cache.reserve import BurstReserve

CAPACITY = 10_000


class Foreseen(KvDemandPredictor):
    """Predicts what the test says."""

    def __init__(self, peak_tokens: float | None) -> None:
        super().__init__(window_s=1.0, bucket_s=1.0)
        self.peak_tokens = peak_tokens

    def predict_peak(self, now_s: float) -> float | None:
        return self.peak_tokens

    def _forecast(self, bucket: object) -> float | None:
        return self.peak_tokens


def reserve(peak_tokens: float | None, *, online: int = 0, **config: float) -> BurstReserve:
    made = BurstReserve(ReserveConfig(**config), Foreseen(peak_tokens), CAPACITY)
    made.observe(0.0, online)
    return made


def test_the_reserve_is_the_predicted_growth_rounded_up():
    assert reserve(5000.2, online=3000).reserve_tokens(0.0) == 2001


def test_offline_gets_what_online_neither_holds_nor_may_need():
    assert reserve(5000, online=3000).offline_limit_tokens(0.0) == 10_000 - 3000 - 2000


def test_a_peak_below_the_present_use_needs_no_reserve():
    assert reserve(1000, online=3000).reserve_tokens(0.0) == 0
    assert reserve(1000, online=3000).offline_limit_tokens(0.0) == 7000


def test_the_reserve_is_at_least_min_tokens():
    assert reserve(0, min_tokens=300).reserve_tokens(0.0) == 300


def test_the_reserve_is_at_most_the_max_share():
    assert reserve(1e30, max_share=0.5).reserve_tokens(0.0) == 5000
    assert reserve(1e30, max_share=0.0).reserve_tokens(0.0) == 0


def test_before_anything_was_seen_the_cold_start_share_is_kept_free():
    assert reserve(None).reserve_tokens(0.0) == 2500
    assert reserve(None, online=1000).offline_limit_tokens(0.0) == 6500


@pytest.mark.parametrize("predictor", ["peak", "mean-std"])
@pytest.mark.parametrize(("used_tokens", "is_use"), [(0, False), (14, False), (500, True)])
def test_a_servers_own_warm_up_is_no_use_and_leaves_the_cold_start(predictor, used_tokens, is_use):
    """A quarter is kept at first, within the hour less; a forecast needs traffic."""
    config = ReserveConfig(predictor=predictor)
    one = BurstReserve(config, create_kv_demand(config), CAPACITY)
    one.observe(0.0, 0)
    one.observe(2.0, used_tokens)
    one.observe(3.0, 0)
    for second in range(4, 200):
        one.observe(float(second), 0)
    cold_tokens = 0.25 * CAPACITY * (1 - 200 / config.window_s)
    assert (one.reserve_tokens(200.0) < 0.9 * cold_tokens) == is_use
    assert is_use or one.reserve_tokens(200.0) == pytest.approx(cold_tokens, abs=2)


def test_the_bounds_hold_for_the_cold_start_too():
    assert reserve(None, cold_start_share=1.0, max_share=0.6).reserve_tokens(0.0) == 6000
    assert reserve(None, cold_start_share=0.0, min_tokens=70).reserve_tokens(0.0) == 70


def test_without_a_predictor_only_min_tokens_are_kept_free():
    config = ReserveConfig(predictor="off", min_tokens=400)
    made = BurstReserve(config, create_kv_demand(config), CAPACITY)
    assert made.offline_limit_tokens(0.0) == 9600
    made.observe(0.0, 2000)
    assert made.reserve_tokens(0.0) == 400
    assert made.offline_limit_tokens(0.0) == 7600


def test_a_full_pool_leaves_offline_nothing_rather_than_less():
    assert reserve(20_000, online=10_000).offline_limit_tokens(0.0) == 0


def test_one_offline_request_alone_may_have_all_but_min_tokens():
    made = reserve(1e30, online=3000, min_tokens=500, max_share=0.9)
    assert made.offline_limit_tokens(0.0) == 0
    assert made.offline_limit_tokens(0.0, is_alone=True) == 10_000 - 3000 - 500


@pytest.mark.parametrize("name", ["peak", "mean-std"])
def test_the_reserve_follows_the_use_that_it_observed(name):
    config = ReserveConfig(predictor=name)
    made = BurstReserve(config, create_kv_demand(config), CAPACITY)
    assert made.reserve_tokens(0.0) == 2500
    for second in range(600):
        made.observe(float(second), 1500 + 500 * (second // 20 % 2))
    made.observe(600.0, 1000)
    assert 500 < made.reserve_tokens(600.0) < 4000


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_pool_without_tokens_is_refused(capacity):
    with pytest.raises(ValueError, match=rf"capacity_tokens is {capacity}; it must be above 0"):
        BurstReserve(ReserveConfig(), None, capacity)


def test_min_tokens_above_the_pool_are_refused():
    with pytest.raises(ValueError, match=r"reserve\.min_tokens is 10001; allowed is 0 to 10000"):
        BurstReserve(ReserveConfig(min_tokens=10_001), None, CAPACITY)


def test_min_tokens_above_the_max_share_are_refused():
    said = (
        r"reserve\.min_tokens is 6001; allowed is 0 to 6000, which is reserve\.max_share \(0\.6\)"
    )
    with pytest.raises(ValueError, match=said):
        BurstReserve(ReserveConfig(min_tokens=6001, max_share=0.6), None, CAPACITY)


@given(
    peak=st.none() | st.floats(0, 1e12),
    online=st.integers(0, 2 * CAPACITY),
    share=st.floats(0, 1),
    cold=st.floats(0, 1),
    data=st.data(),
)
def test_the_bounds_hold_and_offline_never_takes_from_the_reserve(peak, online, share, cold, data):
    min_tokens = data.draw(st.integers(0, math.floor(share * CAPACITY)))
    made = reserve(
        peak, online=online, max_share=share, cold_start_share=cold, min_tokens=min_tokens
    )
    kept, limit = made.reserve_tokens(0.0), made.offline_limit_tokens(0.0)
    assert min_tokens <= kept <= share * CAPACITY
    assert limit >= 0
    assert limit == 0 or online + kept + limit == CAPACITY


@given(st.floats(0, 1e5), st.floats(0, 1e5), st.integers(0, CAPACITY))
def test_a_higher_peak_never_gives_offline_more(one, other, online):
    low, high = sorted((one, other))
    lower, higher = reserve(low, online=online), reserve(high, online=online)
    assert higher.offline_limit_tokens(0.0) <= lower.offline_limit_tokens(0.0)


def test_a_cold_start_is_as_long_as_since_the_server_began_whatever_its_clock_says():
    made = BurstReserve(ReserveConfig(cold_start_share=0.2), Foreseen(None), CAPACITY)
    start_s, window_s = 1e6, ReserveConfig().window_s
    made.observe(start_s, 0)
    for part, tokens in ((0.0, 2000), (0.5, 1000), (1.0, 0), (3.0, 0)):
        assert made.reserve_tokens(start_s + part * window_s) == tokens


def test_once_online_requests_were_there_less_than_a_hundredth_is_use_as_well():
    """Before, it is what a server's own warm-up holds."""
    seen: list[int] = []

    class Noting(Foreseen):
        def observe(self, now_s: float, used_tokens: int) -> None:
            seen.append(used_tokens)

    made = BurstReserve(ReserveConfig(), Noting(None), CAPACITY)
    for now_s, tokens in enumerate((99, 0, 100, 99, 5)):
        made.observe(float(now_s), tokens)
    assert seen == [0, 0, 100, 99, 5]


def test_a_request_larger_than_all_but_the_least_reserve_never_fits():
    assert reserve(5000, online=3000, min_tokens=300).most_tokens == CAPACITY - 300
