"""Simulated servers whose online requests are prefilled in two steps where one takes too long."""

from __future__ import annotations

from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import simulate
from tests.sim.workloads import offline_trace, online_trace, server

NUM_ONLINE, NUM_OFFLINE = 400, 3000
SEEDS = range(4)


def served(split: bool, seed: int) -> SimResults:
    """Prompts of up to 65 ms of prefill, which come while offline chunks run."""
    sections = {"slo": {"ttft_s": 0.15, "tpot_s": 0.05}, "steps": {"split_online": split}}
    config = server(sections, kv_tokens=60_000)
    online = online_trace(NUM_ONLINE, rate_rps=8.0, seed=seed, most_tokens=2500)
    return simulate(config, online, offline_trace(NUM_OFFLINE, num_prefixes=200))


def test_more_first_tokens_are_in_time_and_the_job_gets_as_much() -> None:
    apart, together = ([served(split, seed) for seed in SEEDS] for split in (True, False))
    for one in (*apart, *together):
        assert (one.online_done, one.offline_done) == (NUM_ONLINE, NUM_OFFLINE)
    num_late, num_late_together = (
        sum(NUM_ONLINE - one.online_kept for one in results) for results in (apart, together)
    )
    assert num_late < 0.75 * num_late_together
    assert sum(one.offline_end_s for one in apart) < 1.05 * sum(
        one.offline_end_s for one in together
    )
