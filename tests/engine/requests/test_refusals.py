"""Why a request waits, given why the last pass ended."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from echo_sgl.batch_shape import BatchShape
from echo_sgl.config import SloConfig, StepsConfig, parse_config
from echo_sgl.engine.admission.prefill_adder import EchoPrefillAdder
from echo_sgl.engine.explain import held_back
from echo_sgl.engine.pool.deadlines import DeadlineWatch
from echo_sgl.engine.requests.refusals import Reason, Refusal
from echo_sgl.engine.steps.estimation import create_live_batch_time
from echo_sgl.engine.steps.step_control import StepControl
from echo_sgl.engine.steps.step_timing import StepTimer
from echo_sgl.policies.limits.step_limits import create_step_limit
from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.offline_order import FcfsOrder
from echo_sgl.types import OFFLINE_SERVICE_TIER

SERVER = {"device": "some", "model": "some", "transformer": None, "captured_batch_sizes": []}
FOR_MEMORY = Refusal(Reason.MEMORY, "refused", {"needed_tokens": 10})


def test_the_request_that_was_refused_has_the_reason():
    facts = {"reason": "memory", "needed_tokens": 10}
    assert held_back("refused", FOR_MEMORY, num_before=3) == facts


def test_who_is_behind_waits_for_its_turn_and_learns_what_the_first_waits_for():
    told = held_back("other", FOR_MEMORY, num_before=3, is_exact=False)
    assert (told["reason"], told["num_before"], told["is_exact"]) == ("order", 3, False)
    assert told["first"] == {"reason": "memory", "needed_tokens": 10}
    assert "refused" not in str(told), "nobody is told of other requests' ids"


@pytest.mark.parametrize(("num_before", "reason"), [(0, "limit"), (1, "order")])
def test_a_reason_found_before_anybody_was_asked_is_the_first_ones(num_before, reason):
    refusal = Refusal(Reason.LIMIT, None, {"limit_s": 0.1})
    assert held_back("any", refusal, num_before=num_before)["reason"] == reason


def test_a_pause_holds_for_all():
    assert held_back("any", Refusal(Reason.PAUSED), num_before=9) == {"reason": "paused"}


def test_nothing_is_in_the_way_of_the_next_one_that_nobody_refused():
    assert held_back("any", None, num_before=0) is None
    assert held_back("any", None, num_before=2)["first"] is None


def test_what_is_infinite_is_none_as_json_wants_it():
    refusal = Refusal(Reason.LIMIT, "r", {"slack_s": math.inf, "limit_s": 0.1})
    assert held_back("r", refusal, num_before=0) == {
        "reason": "limit",
        "slack_s": None,
        "limit_s": 0.1,
    }


@pytest.fixture
def control() -> StepControl:
    config = parse_config({"steps": {"limit": "budget", "budget_s": 0.25}})
    live = create_live_batch_time(config, SERVER)
    watch = DeadlineWatch(DeadlineOrder(FcfsOrder()))
    return StepControl(config, live, StepTimer(), max_requests=8, chunk_tokens=512, watch=watch)


def request(rid: str, **params: str) -> SimpleNamespace:
    sampling_params = SimpleNamespace(custom_params=params or None)
    return SimpleNamespace(
        rid=rid,
        sampling_params=sampling_params,
        finished=lambda: False,
        to_finish=None,
        beam_group=None,
    )


@pytest.mark.parametrize("params", [{}, {"service_tier": OFFLINE_SERVICE_TIER}])
def test_who_finds_no_slot_is_told_how_many_run(control, params):
    adder = object.__new__(EchoPrefillAdder)
    adder.control, adder.preempt_list = control, []
    adder.running_batch = SimpleNamespace(reqs=[request("a"), request("b"), request("c")])
    assert not adder.preempt_to_schedule(request("waits", **params))
    assert control.refusal == Refusal(Reason.SLOT, "waits", {"num_running": 3})


def test_who_finds_no_time_is_told_the_limit_and_what_it_would_take(control):
    control.planner.limit_s = control.planner.prefill_room_s = 0.25
    control.refuse_for_time("waits", BatchShape(), max_tokens=10)
    told = held_back("waits", control.refusal, num_before=0)
    assert told == {
        "reason": "limit",
        "limit_s": 0.25,
        "slack_s": None,
        "places_taken": 0.0,
        "places_ahead": 0.0,
        "room_s": 0.25,
        "smallest_chunk_s": None,  # nothing was measured yet
    }


@pytest.mark.parametrize(
    ("chunk_s", "other_tokens", "most_s"), [(0.03, 0, 0.02), (0.01, 0, None), (0.03, 50, None)]
)
def test_who_never_fits_is_told_how_long_whoever_arrives_waits(
    control, chunk_s, other_tokens, most_s
):
    control.planner.limit = create_step_limit(StepsConfig(limit="slack"), SloConfig())
    control.planner.limit.stall_s = control.planner.limit.prefill_stall_s = 0.02
    control.planner.smallest_chunk_s = lambda shape, **chunk: chunk_s
    shape = BatchShape()
    if other_tokens:
        shape.add_prefill(other_tokens, 0)
    control.refuse_for_time("waits", shape, max_tokens=10)
    assert control.refusal.facts.get("most_s") == most_s


def test_only_the_last_refusal_is_kept(control):
    for number in range(1000):
        control.refuse(Reason.ORDER, f"r{number}")
    assert control.refusal == Refusal(Reason.ORDER, "r999")
