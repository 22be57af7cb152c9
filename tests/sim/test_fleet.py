"""Fleets: what holds whatever comes, and small scripted cases of how requests move."""

from __future__ import annotations

import dataclasses
import math
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_sgl
from echo_sgl.errors import ConfigError
from echo_sgl.sim.fleet.config import RULES, FleetConfig
from echo_sgl.sim.fleet.fleet import Fleet, simulate_fleet
from echo_sgl.sim.fleet.instance import Instance, RunningStep
from echo_sgl.sim.workload import SimRequest, Trace
from echo_sgl.types import Task
from tests.sim.fleets import Row, fleet, offline, online


@st.composite
def traces(draw: st.DrawFn, *, most_requests: int) -> list[Row]:
    at_s, rows = 0.0, []
    for _ in range(draw(st.integers(1, most_requests))):
        at_s += draw(st.sampled_from([0.0, 0.01, 0.3]))
        rows.append((at_s, draw(st.integers(1, 900)), draw(st.integers(1, 60))))
    return rows


@st.composite
def cases(draw: st.DrawFn) -> tuple[FleetConfig, Trace, Trace]:
    config = fleet(
        draw(st.sampled_from(sorted(RULES))),
        kv_tokens=draw(st.integers(1200, 4000)),
        num_relaxed=draw(st.sampled_from([1, 2])),
        num_strict=draw(st.sampled_from([1, 2])),
        tpot_s=draw(st.sampled_from([0.008, 0.012, 0.05])),
    )
    return (
        config,
        online(*draw(traces(most_requests=20))),
        offline(*draw(traces(most_requests=25))),
    )


class CheckedFleet(Fleet):
    """Holds the whole fleet against the invariants before each step is decided."""

    num_checked = 0
    last_s = -math.inf

    def _start(self, place: Instance, now_s: float) -> None:
        assert now_s >= self.last_s
        self.last_s = now_s
        self.num_checked += 1
        self._check_memory()
        super()._start(place, now_s)

    def _check_memory(self) -> None:
        for place in self.instances:
            groups = (place.online, place.offline)
            decoding = sum(one.seq_tokens for group in groups for one in group)
            parked = sum(one.seq_tokens for one in place.parked.values())
            fixed = sum(place.fixed[rid] for rid in place.fixed)
            assert place.used_tokens == decoding + parked + fixed
            assert place.free_tokens >= 0
            queued = (*place.urgent, *place.rest)
            assert place.queued_tokens == sum(one.seq_tokens for one in queued)

    def _run(self, place: Instance, step: RunningStep) -> None:
        assert place.step is None or not step.decodes
        super()._run(place, step)


@settings(max_examples=120)
@given(cases())
def test_every_request_ends_once_with_all_its_tokens_and_leaves_no_memory(
    case: tuple[FleetConfig, Trace, Trace],
) -> None:
    config, ons, offs = case
    checked = CheckedFleet(config, ons, offs)
    checked.run()
    results = checked.results
    assert results.online_done + results.offline_done + results.refused == len(ons) + len(offs)
    assert results.refused == 0
    assert results.offline_tokens == sum(offs.prompt_tokens) + sum(offs.output_tokens)
    assert results.offline_output_tokens == sum(offs.output_tokens)
    for place in checked.instances:
        assert place.used_tokens == place.queued_tokens == 0
        assert not (place.inbox or place.inbound or place.parked or place.suspended)


@settings(max_examples=30)
@given(cases())
def test_the_same_fleet_does_the_same_to_the_last_bit(
    case: tuple[FleetConfig, Trace, Trace],
) -> None:
    assert simulate_fleet(*case) == simulate_fleet(*case)


@settings(max_examples=30)
@given(cases())
def test_no_token_comes_before_its_request_its_step_or_its_transfer(
    case: tuple[FleetConfig, Trace, Trace],
) -> None:
    config, ons, offs = case
    results = simulate_fleet(config, ons, offs)
    shortest_step_s = config.device.transformer.num_layers * 1e-4
    assert all(ttft_s >= shortest_step_s for ttft_s in results.ttft_s)
    assert all(tpot_s >= shortest_step_s for tpot_s in results.tpot_s)
    num_places = config.num_relaxed + config.num_strict
    busy_s = results.relaxed_busy_s + results.strict_busy_s
    assert busy_s <= num_places * results.end_s * (1 + 1e-9)


class Recorder(Fleet):
    """Keeps when each step began, and the first time that an answer was complete."""

    def __init__(self, config: FleetConfig, ons: Trace, offs: Trace) -> None:
        super().__init__(config, ons, offs)
        self.log: list[tuple[float, int, object]] = []
        self.first_end_s = math.inf

    def _note(self, place: Instance, row: object, step: RunningStep) -> None:
        self.log.append((step.start_s, place.place, row))
        super()._note(place, row, step)  # type: ignore[arg-type]

    def _note_ended(self, request: SimRequest, now_s: float) -> None:
        self.first_end_s = min(self.first_end_s, now_s)
        super()._note_ended(request, now_s)


@settings(max_examples=30)
@given(cases(), st.integers(1, 200))
def test_no_rule_knows_how_long_an_answer_will_be(
    case: tuple[FleetConfig, Trace, Trace], longer: int
) -> None:
    config, ons, offs = case
    config = dataclasses.replace(config, kv_tokens=4000)
    runs = []
    for extra in (0, longer):
        run = Recorder(config, _answers(ons, 40 + extra), _answers(offs, 30 + extra))
        run.run()
        runs.append(run)
    until_s = min(run.first_end_s for run in runs)
    before = [[step for step in run.log if step[0] < until_s] for run in runs]
    assert before[0] == before[1]


def _answers(trace: Trace, num_tokens: int) -> Trace:
    answers = array("q", (num_tokens,)) * len(trace)
    return dataclasses.replace(trace, output_tokens=answers)


# ---- scripted cases ------------------------------------------------------------------------


def test_a_request_prefills_travels_and_decodes() -> None:
    config = fleet("base-pd", transfer_latency_s=0.5)
    results = simulate_fleet(config, online((1.0, 100, 11)))
    prefill_s = results.ttft_s[0]
    assert 0.03 < prefill_s < 0.04
    decodes_s = results.end_s - 1.0 - prefill_s - config.transfer_s(101)
    assert decodes_s == pytest.approx(10 * 0.0066, rel=0.1)
    assert results.tpot_s[0] == pytest.approx((decodes_s + config.transfer_s(101)) / 10)
    assert (results.num_pushes, results.num_pulls) == (1, 0)


def test_base_pd_serves_in_order_of_arrival_and_online_priority_does_not() -> None:
    backlog = offline(*[(0.0, 900, 2)] * 12)
    waits = {}
    for rules in ("base-pd", "online-priority"):
        config = fleet(rules, kv_tokens=20_000, max_prefill_tokens=900)
        waits[rules] = simulate_fleet(config, online((0.1, 100, 2)), backlog).ttft_s[0]
    assert waits["base-pd"] > 12 * 0.28 - 0.1
    assert waits["online-priority"] < 2 * 0.3


def test_ooco_stops_an_offline_prefill_after_the_layer_that_it_computes() -> None:
    config = fleet("ooco")
    lines = offline((0.0, 1000, 2))
    alone = simulate_fleet(config, online((0.1, 100, 2)))
    beside = simulate_fleet(config, online((0.1, 100, 2)), lines)
    layer_s = 0.33 / 10
    assert alone.ttft_s[0] < beside.ttft_s[0] <= alone.ttft_s[0] + layer_s
    assert (beside.num_interrupts, beside.recomputed_tokens) == (1, 1000)
    assert beside.offline_done == 1


def test_ooco_resume_computes_nothing_of_it_again() -> None:
    lines = offline((0.0, 1000, 2))
    ends = {}
    for rules in ("ooco", "ooco-resume"):
        results = simulate_fleet(fleet(rules), online((0.2, 100, 2)), lines)
        assert results.num_interrupts == 1
        ends[rules] = (results.relaxed_busy_s, results.recomputed_tokens)
    assert ends["ooco-resume"][1] == 0
    lost_s = ends["ooco"][0] - ends["ooco-resume"][0]
    assert 0.19 < lost_s < 0.25


def test_an_online_prefill_is_never_interrupted() -> None:
    results = simulate_fleet(fleet("ooco"), online((0.0, 1000, 2), (0.1, 100, 2)))
    assert results.num_interrupts == 0
    assert results.ttft_s[1] > 0.25


def test_ooco_decodes_offline_where_it_was_prefilled_until_it_is_pulled() -> None:
    """No strict step may hold an offline decode here: none is ever pulled, and all end."""
    slow = fleet("ooco", tpot_s=0.007)
    lines = offline(*[(0.0, 200, 30)] * 6)
    results = simulate_fleet(slow, online(), lines)
    assert (results.num_pulls, results.strict_busy_s, results.offline_done) == (0, 0.0, 6)
    pulled = simulate_fleet(fleet("ooco"), online(), lines)
    assert pulled.num_pulls == 6
    assert pulled.strict_busy_s > 0


def test_online_decodes_stay_within_the_limit_beside_pulled_ones() -> None:
    config = fleet("ooco", kv_tokens=20_000, tpot_s=0.012)
    results = simulate_fleet(
        config, online(*[(0.5 + n, 50, 60) for n in range(5)]), offline(*[(0.0, 400, 500)] * 30)
    )
    assert results.num_pulls > 0
    assert results.percentile_s("tpot", 100) <= config.tpot_s
    assert results.online_kept == 5


def test_base_pd_breaks_the_same_promise() -> None:
    config = fleet("base-pd", kv_tokens=20_000, tpot_s=0.012)
    results = simulate_fleet(
        config, online(*[(5.5 + n, 50, 60) for n in range(5)]), offline(*[(0.0, 400, 500)] * 30)
    )
    assert results.online_kept == 0


def test_online_requests_take_the_memory_of_offline_ones_in_a_strict_instance() -> None:
    config = fleet("ooco", kv_tokens=1500)
    results = simulate_fleet(
        config, online((1.0, 900, 20)), offline((0.0, 500, 300), (0.0, 500, 300))
    )
    assert results.num_evictions >= 1
    assert results.recomputed_tokens >= 500
    assert (results.online_done, results.offline_done) == (1, 2)
    assert results.ttft_s[0] < 0.5


def test_a_cap_makes_offline_decodes_sit_out_for_online_ones() -> None:
    config = fleet("online-priority", kv_tokens=30_000, typical_tokens=900, tpot_s=0.012)
    crowd = [(3.0, 20, 100)] * 40
    results = simulate_fleet(config, online(*crowd), offline(*[(0.0, 50, 900)] * 30))
    assert results.num_parks > 0
    assert results.num_evictions == 0
    assert results.offline_done == 30


def test_a_request_that_fits_no_instance_is_refused_and_counted() -> None:
    results = simulate_fleet(fleet("ooco"), online((0.0, 5000, 2), (0.0, 50, 2)))
    assert (results.refused, results.online_done, results.online_came) == (1, 1, 2)
    assert results.violation_share == 0.5


def test_work_goes_to_the_prefill_instance_with_the_least_to_do() -> None:
    rows = [(0.0, 800, 2)] * 4
    one = simulate_fleet(fleet("base-pd", kv_tokens=9000), online(*rows))
    two = simulate_fleet(fleet("base-pd", kv_tokens=9000, num_relaxed=2), online(*rows))
    assert max(two.ttft_s) < 0.7 * max(one.ttft_s)


def test_a_fleet_without_instances_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_strict is 0; a fleet needs at least 1"):
        fleet("ooco", num_strict=0)
    with pytest.raises(ConfigError, match=r"tpot_s is 0\.0; it must be above 0"):
        fleet("ooco", tpot_s=0.0)


def test_only_the_fleet_itself_asks_the_oracle() -> None:
    folder = Path(echo_sgl.__file__).parent / "sim" / "fleet"
    files = sorted(folder.glob("*.py"))
    assert len(files) > 6
    naming = {file.name for file in files if "racle" in file.read_text(encoding="utf-8")}
    assert naming == {"fleet.py"}
    assert Task.OFFLINE == "offline"
