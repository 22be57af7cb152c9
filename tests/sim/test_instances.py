"""How requests and lines are dealt to the instances of a plan."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.estimators.budget import parse_slo
from echo_sgl.sim.instances import instance_shares, line_share
from echo_sgl.sim.planner import Plan, Resource, make_plan
from echo_sgl.sim.workload import Trace, empty_trace
from echo_sgl.types import Task
from tests.sim.workloads import offline_trace, online_trace, server

TARGETS = parse_slo("ttft_p99=1s,tpot_p99=50ms")
SHORT, LONG = 100, 12_000


def trace_of(prompts: list[int], *, every_s: float) -> Trace:
    times = array("d", (every_s * number for number in range(len(prompts))))
    answers = array("q", (20,)) * len(prompts)
    return Trace(Task.ONLINE, times, array("q", prompts), answers, max_new_tokens=64)


def plan_of(online: Trace, num_instances: int, kv_tokens: int = 100_000) -> Plan:
    devices = {"H1": server(kv_tokens=kv_tokens)}
    resources = [Resource(kv_tokens, num_instances, "H1")]
    return make_plan(devices, online, empty_trace(Task.OFFLINE), TARGETS, resources)


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 3))
def test_every_request_goes_to_one_instance_and_all_get_as_many(
    num_requests: int, num_instances: int, seed: int
) -> None:
    online = online_trace(num_requests, rate_rps=1.0)
    shares = instance_shares(online, num_instances, seed=seed)
    assert sorted(at_s for one in shares for at_s in one.at_s) == list(online.at_s)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(list(one.at_s) == sorted(one.at_s) for one in shares)
    assert shares == instance_shares(online, num_instances, seed=seed)


@pytest.mark.parametrize("num_instances", [2, 4])
def test_where_long_and_short_take_turns_every_instance_gets_both(num_instances: int) -> None:
    online = trace_of([SHORT, LONG] * 200, every_s=0.5)
    for share in instance_shares(online, num_instances):
        num_long = sum(tokens == LONG for tokens in share.prompt_tokens)
        assert 0.3 < num_long / len(share) < 0.7


@pytest.mark.parametrize("first", [0, 1])
def test_hardware_that_cannot_serve_the_long_ones_is_not_promised(first: int) -> None:
    """Either is half of the trace, and the long ones are too many for two instances."""
    online = trace_of(([SHORT, LONG] * 200)[first:], every_s=0.1)
    assert plan_of(trace_of([SHORT] * 200, every_s=0.2), 1).is_kept_beside
    assert plan_of(online, 2).chosen is None


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("is_in_peak", [True, False])
def test_a_prompt_that_does_not_fit_breaks_the_plan_on_whichever_instance_it_comes(
    place: int, is_in_peak: bool
) -> None:
    prompts = [SHORT] * 80
    prompts[40 + place] = 50_000
    online = trace_of(prompts, every_s=0.5)
    if not is_in_peak:
        online.at_s[40:] = array("d", (1000.0 + number for number in range(40)))
        online.prompt_tokens[:40] = array("q", (4000,)) * 40
    plan = plan_of(online, 4, kv_tokens=20_000)
    assert not plan.is_kept_beside
    assert (plan.chosen is None) is is_in_peak
    assert plan.num_too_long == (not is_in_peak)
    if is_in_peak:
        assert "1 prompts do not fit" in plan.binds


def test_the_instance_that_does_worst_at_the_peak_is_told_and_simulated_further() -> None:
    prompts = [SHORT] * 40
    prompts[17] = 8000
    online = trace_of(prompts, every_s=0.5)
    plan = plan_of(online, 4)
    shares = instance_shares(online, 4)
    [where] = [number for number, one in enumerate(shares) if 8000 in one.prompt_tokens]
    assert plan.trials[0].instance == where and plan.whole is not None
    assert plan.whole.online_prompt_tokens == sum(shares[where].prompt_tokens)


def test_fewer_requests_than_instances_make_a_plan() -> None:
    plan = plan_of(trace_of([SHORT], every_s=1.0), 4)
    assert plan.is_kept_beside and plan.num_peak_requests == 1


@pytest.mark.parametrize("knows_blocks", [True, False])
def test_one_instance_gets_the_first_stretch_of_a_job(knows_blocks: bool) -> None:
    job = offline_trace(11, num_prefixes=3)
    if not knows_blocks:
        job = Trace(Task.OFFLINE, job.at_s, job.prompt_tokens, job.output_tokens)
    share = line_share(job, 4)
    assert len(share) == 3 and line_share(job, 1) is job
    if job.blocks is not None and share.blocks is not None:
        assert list(share.blocks) == sorted(job.blocks)[:3]
    else:
        assert share.prompt_tokens == job.prompt_tokens[:3]
