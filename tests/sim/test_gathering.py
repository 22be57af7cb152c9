"""Simulated servers whose offline requests start in lots."""

from __future__ import annotations

import pytest

from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import simulate
from tests.sim.workloads import (
    COEFFICIENTS,
    SLO,
    device,
    offline_trace,
    online_trace,
    server,
)

NUM_OFFLINE, NUM_ONLINE = 400, 30


def served(gather: bool, *, kv_tokens: int, num_online: int = 0) -> SimResults:
    sections = {**SLO, "steps": {"gather": gather}, "reserve": {"predictor": "off"}}
    config = server(sections, max_running_requests=32, kv_tokens=kv_tokens)
    online = online_trace(num_online, rate_rps=3.0, most_tokens=300)
    return simulate(config, online, offline_trace(NUM_OFFLINE, num_prefixes=2))


@pytest.mark.parametrize(("kv_tokens", "most_time"), [(60_000, 0.97), (6_000, 0.995)])
def test_a_job_ends_sooner_whether_it_fills_the_places_or_the_memory(
    kv_tokens: int, most_time: float
) -> None:
    gathered, at_once = (served(gather, kv_tokens=kv_tokens) for gather in (True, False))
    assert gathered.offline_done == at_once.offline_done == NUM_OFFLINE
    assert gathered.duration_s < most_time * at_once.duration_s


def test_online_requests_are_stopped_less_often() -> None:
    gathered, at_once = (
        served(gather, kv_tokens=60_000, num_online=NUM_ONLINE) for gather in (True, False)
    )
    assert gathered.online_done == at_once.online_done == NUM_ONLINE
    assert gathered.statistic_s("tpot", "mean") < at_once.statistic_s("tpot", "mean")
    assert gathered.online_kept >= at_once.online_kept
    assert gathered.offline_end_s < at_once.offline_end_s


def test_a_queue_of_online_requests_gets_shorter_by_starting_in_lots() -> None:
    """More come than sixteen places can serve; a prefill step has a fixed cost as a decode has."""
    costs = device().with_coefficients({**COEFFICIENTS, "prefill_step": 0.012})
    sections = {"slo": {"ttft_s": 0.5, "tpot_s": 0.1}}

    def served_online(gather: bool) -> SimResults:
        steps = {"steps": {"gather_online": gather}}
        config = server({**sections, **steps}, max_running_requests=16, device=costs)
        return simulate(config, online_trace(300, rate_rps=22.0, most_tokens=60))

    gathered, at_once = (served_online(gather) for gather in (True, False))
    assert gathered.online_done == at_once.online_done == 300
    assert gathered.statistic_s("ttft", "mean") < 0.95 * at_once.statistic_s("ttft", "mean")
    assert gathered.statistic_s("tpot", "mean") < at_once.statistic_s("tpot", "mean")
    assert gathered.online_kept > at_once.online_kept
