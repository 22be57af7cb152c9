"""How much of the KV pool stays free of offline requests so that online ones can grow."""

from __future__ import annotations

import math

from echo_sgl.config import ReserveConfig
from echo_sgl.estimators.kv_demand import KvDemandPredictor

# Of the pool: what a server's own warm-up request holds is no use.
SEEN_SHARE = 0.01


class BurstReserve:
    """Turn the predicted peak of online use into a limit for active offline requests.

    Of a pool of `capacity_tokens` the online requests hold some now, the reserve is kept free
    for their growth, and active offline requests may hold the rest: a burst then finds room
    without evicting what offline work needs. The reserve is the predicted peak less the
    present use, at least `min_tokens` and at most `max_share` of the pool. While there is no
    forecast it starts at `cold_start_share` of the pool, within the same bounds, and shrinks
    to nothing over `window_s` without online requests that hold a hundredth of the pool; without
    a predictor it is `min_tokens`.
    One offline request that is alone may have all but `min_tokens`: a burst can take its memory
    at once, and a job whose requests are larger than the limit goes on, one at a time.

    Source: Echo 4.2 (threshold on active KV) and 5.3 (prediction of online use).
    Units:  seconds and tokens.
    Errors: `ValueError` when the bounds leave no reserve that could satisfy both.
    """

    def __init__(
        self, config: ReserveConfig, predictor: KvDemandPredictor | None, capacity_tokens: int
    ) -> None:
        check_bounds(config, capacity_tokens)
        highest = math.floor(config.max_share * capacity_tokens)
        self._capacity_tokens = capacity_tokens
        self._lowest_tokens, self._highest_tokens = config.min_tokens, highest
        self._cold_start_tokens = math.ceil(config.cold_start_share * capacity_tokens)
        self._predictor = predictor
        self._window_s = config.window_s
        self._first_seen_s: float | None = None
        self._online_tokens, self._was_used = 0, False

    def observe(self, now_s: float, online_tokens: int) -> None:
        """Note what online requests hold from `now_s` on."""
        self._online_tokens = online_tokens
        if self._first_seen_s is None:
            self._first_seen_s = now_s
        self._was_used = self._was_used or online_tokens >= SEEN_SHARE * self._capacity_tokens
        if self._predictor is not None:
            self._predictor.observe(now_s, online_tokens if self._was_used else 0)

    @property
    def most_tokens(self) -> int:
        """What offline requests may hold at most, when no online one is there."""
        return self._capacity_tokens - self._lowest_tokens

    def reserve_tokens(self, now_s: float) -> int:
        """What must stay free for online growth beyond the present online use."""
        return min(max(self._growth_tokens(now_s), self._lowest_tokens), self._highest_tokens)

    def offline_limit_tokens(self, now_s: float, *, is_alone: bool = False) -> int:
        """What active offline requests may hold together, or one of them alone; not negative."""
        free_tokens = self._capacity_tokens - self._online_tokens
        kept_tokens = self._lowest_tokens if is_alone else self.reserve_tokens(now_s)
        return max(0, free_tokens - kept_tokens)

    def _growth_tokens(self, now_s: float) -> int:
        if self._predictor is None:
            return 0
        peak_tokens = self._predictor.predict_peak(now_s)
        if peak_tokens is None:
            idle_s = now_s - self._first_seen_s if self._first_seen_s is not None else 0.0
            return math.ceil(self._cold_start_tokens * max(0.0, 1.0 - idle_s / self._window_s))
        return math.ceil(max(0.0, peak_tokens - self._online_tokens))


def check_bounds(config: ReserveConfig, capacity_tokens: int) -> None:
    """Errors: `ValueError` when a pool of that size has no room for the least reserve."""
    if capacity_tokens <= 0:
        raise ValueError(
            f"capacity_tokens is {capacity_tokens}; it must be above 0: "
            "a pool without tokens has nothing to share"
        )
    highest_tokens = math.floor(config.max_share * capacity_tokens)
    if config.min_tokens > capacity_tokens:
        raise ValueError(
            f"reserve.min_tokens is {config.min_tokens}; allowed is 0 to {capacity_tokens}, "
            "the size of the KV pool"
        )
    if config.min_tokens > highest_tokens:
        raise ValueError(
            f"reserve.min_tokens is {config.min_tokens}; allowed is 0 to {highest_tokens}, which "
            f"is reserve.max_share ({config.max_share:g}) of a KV pool of {capacity_tokens} tokens"
        )
