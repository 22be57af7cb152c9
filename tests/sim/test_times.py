"""How long things take in a simulation: the device and the host around it."""

from __future__ import annotations

from array import array

import pytest

from echo_sgl.batch_shape import BatchShape, StepKind
from echo_sgl.errors import ConfigError
from echo_sgl.estimators.host_time import HostTime
from echo_sgl.sim.server import SimServer, simulate
from echo_sgl.sim.server_config import SpeedChange
from echo_sgl.sim.workload import Trace, empty_trace
from echo_sgl.types import Task
from tests.sim.workloads import device, online_trace, server


def test_a_lone_request_waits_for_the_host_and_the_device() -> None:
    host = HostTime(step_s=0.003, request_s=0.0005, intake_s=0.02)
    online = Trace(Task.ONLINE, array("d", (0.0,)), array("q", (100,)), array("q", (5,)))
    config = server(host=host)
    slow, quick = simulate(config, online), simulate(server(), online)
    assert slow.ttft_s[0] - quick.ttft_s[0] == pytest.approx(0.02 + 0.0035)
    assert slow.tpot_s[0] - quick.tpot_s[0] == pytest.approx(0.0035)


def test_a_request_that_comes_while_steps_run_is_taken_in_later() -> None:
    """The second comes while the first decodes, the third when nobody is there."""
    assert later_s(HostTime(0.01, 0.0, 0.02, 0.07), 0.0, 0.5, 90.0) == pytest.approx(
        [0.0, 0.0, 0.05], abs=0.02
    )


def test_the_more_decode_the_later_a_request_is_taken_in() -> None:
    """The second comes while one decodes, the third while two do."""
    host = HostTime(0.01, 0.0, 0.02, busy_intake_s=0.07, stream_s=0.4)
    assert later_s(host, 0.0, 0.5, 1.0) == pytest.approx([0.0, 0.05, 0.45], abs=0.02)


def later_s(host: HostTime, *at_s: float) -> list[float]:
    """First tokens, the soonest first, against a host that takes no longer while steps run.

    Give or take the step that a request waits for.
    """
    lengths = array("q", (100,) * len(at_s)), array("q", (200,) * len(at_s))
    online = Trace(Task.ONLINE, array("d", at_s), *lengths)
    idle = simulate(server(host=HostTime(host.step_s, host.request_s, host.intake_s)), online)
    busy = simulate(server(host=host), online)
    return [b - a for a, b in zip(sorted(idle.ttft_s), sorted(busy.ttft_s), strict=True)]


def test_steps_with_scatter_take_as_long_on_average_as_those_without() -> None:
    online = Trace(Task.ONLINE, array("d", (0.0,)), array("q", (100,)), array("q", (4000,)))
    [even] = simulate(server(kv_tokens=10_000), online).tpot_s
    [uneven] = simulate(server(kv_tokens=10_000, noise=0.5), online).tpot_s
    assert uneven != even
    assert uneven == pytest.approx(even, rel=0.04)


def test_a_device_that_is_slower_than_its_profile_is_found_out() -> None:
    slow = server(step_factors=[SpeedChange(0.0, {StepKind.DECODE: 2.0})])
    twin = SimServer(slow, online_trace(60, rate_rps=20), empty_trace(Task.OFFLINE))
    twin.run()
    shape = BatchShape()
    shape.add_decode(200)
    assert twin.scheduler.estimator.predict_s(shape) == pytest.approx(2 * device().predict_s(shape))
    with pytest.raises(ConfigError, match=r"step_factors are .*-1"):
        server(step_factors=[SpeedChange(0.0, {StepKind.PREFILL: -1.0})])


def test_a_device_changes_its_speed_when_it_is_said() -> None:
    at_s, twice = array("d", (0.0, 50.0)), array("q", (100, 100))
    online = Trace(Task.ONLINE, at_s, twice, array("q", (9, 9)))
    changes = [SpeedChange(0.0, {StepKind.DECODE: 2.0}), SpeedChange(40.0, {})]
    slow_s, usual_s = simulate(server(step_factors=changes), online).tpot_s
    assert slow_s == pytest.approx(2 * usual_s, rel=0.01)


def test_the_estimator_learns_what_the_device_takes_alone() -> None:
    host = HostTime(step_s=0.5, request_s=0.0, intake_s=0.0)
    twin = SimServer(server(host=host), online_trace(30, rate_rps=20), empty_trace(Task.OFFLINE))
    twin.run()
    shape = BatchShape()
    shape.add_decode(200)
    assert twin.scheduler.estimator.predict_s(shape) == pytest.approx(device().predict_s(shape))


@pytest.mark.parametrize(("margin", "is_in_time"), [(0.5, True), (0.0, False)])
def test_a_short_answer_ends_before_prefills_that_would_make_it_late(
    margin: float, is_in_time: bool
) -> None:
    """Four tokens, and after the first come three prompts, each of which takes three TPOTs."""
    at_s = array("d", (0.0, 0.01, 0.01, 0.01))
    prompts, answers = array("q", (100, 6000, 6000, 6000)), array("q", (4, 10, 10, 10))
    online = Trace(Task.ONLINE, at_s, prompts, answers, allowed_tokens=answers)
    sections = {"slo": {"ttft_s": 2.0, "tpot_s": 0.05}, "steps": {"ttft_margin": margin}}
    results = simulate(server(sections, chunked_prefill_tokens=6000), online)
    _, short_tpot_s = min(zip(results.ttft_s, results.tpot_s, strict=True))
    assert (short_tpot_s <= 0.05) is is_in_time
    assert max(results.ttft_s) < 2.0
