"""Simulated servers whose steps differ from each other, or did for a while, under short TTFTs."""

from __future__ import annotations

from array import array

import pytest

from echo_sgl.batch_shape import StepKind
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import simulate
from echo_sgl.sim.server_config import SpeedChange
from echo_sgl.sim.workload import Trace
from echo_sgl.types import Task
from tests.sim.workloads import offline_trace, server

NUM_OFFLINE, NUM_ONLINE, EVERY_S = 2000, 20, 2.0
SLOW_UNTIL_S = 10.0


def served(*, noise: float = 0.05, slowness: float = 1.0) -> SimResults:
    """Answers of 300 tokens, one begun every other second, beside a job."""
    at_s = array("d", (1.0 + EVERY_S * number for number in range(NUM_ONLINE)))
    prompts, answers = array("q", (100,) * NUM_ONLINE), array("q", (300,) * NUM_ONLINE)
    online = Trace(Task.ONLINE, at_s, prompts, answers, max_new_tokens=300)
    config = server(
        {"slo": {"ttft_s": 0.05, "tpot_s": 0.05}, "reserve": {"predictor": "off"}},
        noise=noise,
        step_factors=[
            SpeedChange(0.0, dict.fromkeys(StepKind, slowness)),
            SpeedChange(SLOW_UNTIL_S, {}),
        ],
        max_running_requests=16,
    )
    return simulate(config, online, offline_trace(NUM_OFFLINE, num_prefixes=2))


@pytest.fixture(scope="module")
def even() -> SimResults:
    return served()


def test_a_job_is_done_as_soon_where_steps_differ_much_from_each_other(even: SimResults) -> None:
    """What who arrives may wait is an expected time, not one that one step in twenty exceeds."""
    uneven = served(noise=0.4)
    assert uneven.offline_done == even.offline_done == NUM_OFFLINE
    assert uneven.offline_end_s < 1.1 * even.offline_end_s
    assert uneven.online_kept >= NUM_ONLINE - 1


def test_a_job_does_not_stand_still_after_a_slow_moment(even: SimResults) -> None:
    """The moment costs about twice what it lasts: most of the job is done after it."""
    recovered = served(noise=0.2, slowness=4.0)
    assert recovered.offline_done == NUM_OFFLINE
    assert recovered.offline_end_s < even.offline_end_s + 2.5 * SLOW_UNTIL_S
