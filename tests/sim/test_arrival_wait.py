"""Simulated servers whose steps differ from each other, or did for a while."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

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
# A fifth of that time, in moments.
MOMENT_S, MOMENTS_APART_S = 0.02, 0.1


def served(
    *, noise: float = 0.05, speeds: Sequence[SpeedChange] = (), ttft_s: float = 0.05
) -> SimResults:
    """Answers of 300 tokens, one begun every other second, beside a job."""
    at_s = array("d", (1.0 + EVERY_S * number for number in range(NUM_ONLINE)))
    prompts, answers = array("q", (100,) * NUM_ONLINE), array("q", (300,) * NUM_ONLINE)
    online = Trace(Task.ONLINE, at_s, prompts, answers, max_new_tokens=300)
    config = server(
        {"slo": {"ttft_s": ttft_s, "tpot_s": ttft_s}, "reserve": {"predictor": "off"}},
        noise=noise,
        step_factors=list(speeds),
        max_running_requests=16,
    )
    return simulate(config, online, offline_trace(NUM_OFFLINE, num_prefixes=2))


def slow(from_s: float, until_s: float, slowness: float) -> list[SpeedChange]:
    return [SpeedChange(from_s, dict.fromkeys(StepKind, slowness)), SpeedChange(until_s, {})]


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
    recovered = served(noise=0.2, speeds=slow(0.0, SLOW_UNTIL_S, 4.0))
    assert recovered.offline_done == NUM_OFFLINE
    assert recovered.offline_end_s < even.offline_end_s + 2.5 * SLOW_UNTIL_S


def test_nor_after_some_steps_that_took_far_longer_than_any_may(even: SimResults) -> None:
    """One in five takes 30 times as long, and so, by its bound, would every prefill after them."""
    starts_s = [MOMENTS_APART_S * number for number in range(int(SLOW_UNTIL_S / MOMENTS_APART_S))]
    moments = [change for at_s in starts_s for change in slow(at_s, at_s + MOMENT_S, 30.0)]
    recovered = served(speeds=moments, ttft_s=1.0)
    assert recovered.offline_done == NUM_OFFLINE
    assert recovered.offline_end_s < even.offline_end_s + 1.5 * SLOW_UNTIL_S
    assert recovered.online_kept >= NUM_ONLINE - 1
