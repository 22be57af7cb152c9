"""Which offline prefills wait for more room, and for how long."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape
from echo_sgl.config import SloConfig, parse_config
from echo_sgl.policies.planners import create_step_planner
from echo_sgl.policies.prefills.chunk_wait import (
    CACHED_TOKENS,
    GROWTH,
    MOST_STEPS,
    STEPS_PER_INTERRUPTION,
    USES,
    ChunkWait,
)
from tests.policies.plans import Clockwork, begin, planner

STALL_S = 10.0


class Device(Clockwork):
    """A fixed part for each step that prefills, and 1 ms for each of its tokens."""

    def __init__(self, fixed_s: float) -> None:
        self.fixed_s = fixed_s

    def predict_s(self, step):
        return super().predict_s(step) + self.fixed_s * (step.num_prefills > 0)


def prefill_s(device: Device, num_tokens: int) -> float:
    shape = BatchShape()
    shape.add_prefill(num_tokens)
    return device.predict_s(shape)


def wait_for(overhead: float = 0.1, longest_tokens: int = 4096) -> ChunkWait:
    return ChunkWait(overhead, 64, longest_tokens)


def waits(wait: ChunkWait, room_s: float, device: Device, *, left_tokens=math.inf, stall_s=STALL_S):
    return wait.waits(room_s, device, stall_s=stall_s, cached_tokens=0, left_tokens=left_tokens)


def test_where_a_step_has_no_fixed_cost_the_shortest_chunk_is_worth_one():
    assert wait_for().tokens(Device(0.0), STALL_S, 0) == 64
    assert not waits(wait_for(), 0.064, Device(0.0))


@given(st.floats(0.001, 1.0), st.floats(0.01, 2.0), st.integers(64, 8192))
def test_a_token_of_a_chunk_that_is_worth_it_takes_little_more_than_in_the_best(
    fixed_s, overhead, longest_tokens
):
    device = Device(fixed_s)
    tokens = wait_for(overhead, longest_tokens).tokens(device, STALL_S, 0)
    lengths = [64]
    while (longer := math.ceil(lengths[-1] * GROWTH)) <= longest_tokens:
        lengths.append(longer)
    allowed = [one for one in lengths if one == 64 or prefill_s(device, one) <= STALL_S]
    best_s = min(prefill_s(device, one) / one for one in allowed)
    assert prefill_s(device, tokens) / tokens <= (1 + overhead) * best_s
    shorter = [one for one in allowed if one < tokens]
    assert all(prefill_s(device, one) / one > (1 + overhead) * best_s for one in shorter)


def test_nobody_waits_for_a_chunk_that_a_stall_forbids():
    """Of the chunks that may run, the longest pays a step best, however much that is."""
    device, wait = Device(0.2), wait_for()
    assert prefill_s(device, wait.tokens(device, STALL_S, 0)) > 0.4
    tokens = wait.tokens(device, 0.4, 0)
    assert prefill_s(device, tokens) <= 0.4 < prefill_s(device, math.ceil(tokens * GROWTH))


def test_a_prefill_waits_while_the_room_grows_and_no_longer():
    device, wait = Device(0.1), wait_for()
    enough_s = prefill_s(device, wait.tokens(device, STALL_S, 0))
    assert waits(wait, 0.3, device) and waits(wait, 0.4, device)
    assert wait.awaited_s == pytest.approx(enough_s)
    assert not waits(wait, 0.4, device), "it did not grow"
    assert waits(wait, 0.2, device), "that one has run; the next waits for its own"
    assert not waits(wait, enough_s, device)


def test_room_that_grows_too_slowly_is_not_waited_for():
    """Offline decodes that use nearly all there is let it grow by less and less."""
    device, wait = Device(0.1), wait_for()
    missing_s = prefill_s(device, wait.tokens(device, STALL_S, 0)) - 0.3
    assert waits(wait, 0.3, device)
    assert waits(wait, 0.3 + 1.1 * missing_s / MOST_STEPS, device)
    assert not waits(wait, 0.3 + 1.5 * missing_s / MOST_STEPS, device)


def test_no_wait_is_without_an_end():
    device, wait = Device(0.1), wait_for()
    num_steps = 0
    while waits(wait, 0.2 + 1e-6 * 1.5**num_steps if num_steps < 9 else 0.9, device):
        num_steps += 1
        wait._next_room_s = -math.inf  # as if there was always enough growth
    assert num_steps == MOST_STEPS


def test_an_online_prefill_that_takes_the_room_does_not_end_a_wait_but_many_do():
    device, wait = Device(0.1), wait_for()
    num_interruptions = 0
    while waits(wait, 0.3, device):
        wait.interrupt()
        num_interruptions += 1
    assert 1 < num_interruptions <= MOST_STEPS // STEPS_PER_INTERRUPTION
    for _ in range(MOST_STEPS):
        wait.interrupt()
    assert waits(wait, 0.3, device), "nobody waited: there was nothing to interrupt"


def test_what_is_left_of_a_prompt_needs_no_room_for_more():
    device = Device(0.1)
    assert waits(wait_for(), 0.2, device)
    assert not waits(wait_for(), 0.2, device, left_tokens=100)
    assert not waits(wait_for(), 0.2, device, left_tokens=0)


def test_an_overhead_of_nothing_switches_it_off():
    assert not waits(wait_for(overhead=0.0), 0.165, Device(0.1))
    assert wait_for(overhead=0.0).tokens(Device(0.1), STALL_S, 0) == 64


def test_what_is_worth_a_step_is_looked_for_again_as_the_estimator_learns():
    device, wait = Device(0.0), wait_for()
    assert wait.tokens(device, STALL_S, 0) == 64
    device.fixed_s = 0.1
    lengths = [wait.tokens(device, STALL_S, 0) for _ in range(USES)]
    assert lengths[0] == lengths[-2] == 64 < lengths[-1]


def test_prefixes_of_all_lengths_leave_little_behind():
    wait = wait_for()
    for number in range(10 * USES):
        wait.tokens(Device(0.1), STALL_S, number * CACHED_TOKENS)
    assert len(wait._worth) <= USES + 1


def test_decodes_go_on_while_the_room_for_a_prefill_grows():
    """Two decodes take 20 ms; a prefill 100 and one for each token."""
    plan = planner(Device(0.1), min_chunk_tokens=64, chunk_overhead=0.1)
    turn = {"online_prefill_waits": False, "last_was_prefill": False, "left_tokens": 1000}
    begin(plan, decodes=2, due_in_s=0.3)
    assert plan.decodes_first(**turn) and plan.chunk_wait.awaited_s > 0.28
    begin(plan, decodes=2, due_in_s=0.38)
    assert plan.decodes_first(**turn)
    begin(plan, decodes=2, due_in_s=0.38)
    assert not plan.decodes_first(**turn)
    begin(plan, decodes=2, due_in_s=0.3)
    assert not plan.decodes_first(**{**turn, "left_tokens": 100})


@pytest.mark.parametrize(("num_prefills", "waits"), [(2, True), (3, False)])
def test_a_chunk_waits_through_two_online_prefills(num_prefills, waits):
    plan = planner(Device(0.1), min_chunk_tokens=64, chunk_overhead=0.1)
    turn = {"last_was_prefill": False, "left_tokens": 1000}
    begin(plan, decodes=2, due_in_s=0.3, first_due_in_s=9.0, waiting=1)
    assert plan.decodes_first(**turn, online_prefill_waits=False)
    for _ in range(num_prefills):
        assert not plan.decodes_first(**turn, online_prefill_waits=True)
    assert plan.decodes_first(**turn, online_prefill_waits=False) is waits


def test_who_waits_for_another_reason_awaits_no_chunk():
    plan = planner(Device(0.1), min_chunk_tokens=64, chunk_overhead=0.1)
    begin(plan, decodes=2, due_in_s=0.3)
    turn = {"online_prefill_waits": False, "left_tokens": 1000}
    assert plan.decodes_first(**turn, last_was_prefill=False)
    assert plan.chunk_wait.facts == {"worth_chunk_s": plan.chunk_wait.awaited_s}
    assert plan.decodes_first(**turn, last_was_prefill=True)
    assert plan.chunk_wait.facts == {}


@pytest.mark.parametrize(
    "limits", [{"limit": "budget", "budget_s": 0.3}, {"limit": "relative", "max_inflation": 10.5}]
)
def test_room_that_is_not_kept_is_not_waited_for(limits):
    """Two decodes take 20 ms; 0.3 and 0.21 s are enough for the shortest chunk beside them."""
    plan = planner(Device(0.1), chunk_overhead=0.1, min_chunk_tokens=64, **limits)
    begin(plan, decodes=2, due_in_s=0.3)
    turn = {"online_prefill_waits": False, "last_was_prefill": False, "left_tokens": 1000}
    assert not plan.decodes_first(**turn)


@pytest.mark.parametrize("limits", [{"limit": "budget", "budget_s": 0.18}, {}])
def test_where_others_queue_no_online_chunk_is_shorter_than_is_worth_a_step(limits):
    """The limit leaves 80 ms beside the fixed part of the step."""
    plan = planner(Device(0.1), online_chunks="slack", chunk_overhead=0.1, **limits)
    chunk = {"cached_tokens": 0, "max_tokens": 512, "page_size": 1}
    begin(plan, decodes=2, due_in_s=0.2, first_due_in_s=5.0, waiting=1)
    assert plan.online_chunk_tokens(BatchShape(), **chunk) == 80
    begin(plan, decodes=2, due_in_s=0.2, first_due_in_s=5.0, waiting=2)
    worth = plan.chunk_wait.tokens(plan.estimator.upper, plan.limit.stall_s, 0)
    assert plan.online_chunk_tokens(BatchShape(), **chunk) == worth > 80
    beside = BatchShape()
    beside.add_prefill(worth)
    assert plan.online_chunk_tokens(beside, **chunk) == 64, "the step is worth it already"
    mixed = BatchShape()
    mixed.add_decode(100)
    assert plan.online_chunk_tokens(mixed, **chunk) < worth, "its fixed part is paid for decodes"


def test_no_chunk_is_waited_for_that_the_config_would_cut():
    sections = {"slo": {"ttft_s": 99.0, "tpot_s": 99.0}, "steps": {"max_stall_s": 9.0}}
    plans = [
        create_step_planner(
            parse_config({**sections, "offline": {"max_prefill_tokens_per_step": most}}),
            Device(0.1),
            max_requests=64,
            chunk_tokens=4096,
            captured_batch_sizes=[],
        )
        for most in (0, 128)
    ]
    lengths = [plan.chunk_wait.tokens(plan.estimator.upper, STALL_S, 0) for plan in plans]
    assert lengths[0] > 128 >= lengths[1]


def test_a_chunk_may_take_what_decodes_would_leave_for_later():
    """A decode step may take 48 of 800 ms; a prefill all but 400 ms and two decodes."""
    plan = planner(
        slo=SloConfig(ttft_s=100.0, tpot_s=0.1), slack_pace=0.0, slack_share=0.06, reserve_tokens=4
    )
    begin(plan, decodes=2, due_in_s=0.8)
    chunk = {"cached_tokens": 0, "max_tokens": 500, "page_size": 1}
    assert plan.limit_s == pytest.approx(0.048)
    assert plan.offline_chunk_tokens(BatchShape(), **chunk) == pytest.approx(380, abs=1)
    assert not plan.decodes_first(online_prefill_waits=False, last_was_prefill=False)
    beside = BatchShape()
    beside.add_decode(100)
    # One step for both is as long as online decodes wait for their next token.
    assert plan.offline_chunk_tokens(beside, **chunk) == 0


@pytest.mark.parametrize(
    ("due_in_s", "left_tokens", "waits"), [(0.1, 500, False), (0.05, 500, True), (0.05, 20, False)]
)
def test_between_two_chunks_one_waits_where_a_step_of_both_has_no_room_for_the_next(
    due_in_s, left_tokens, waits
):
    """Two decodes take 20 ms, 64 tokens 64."""
    plan, decodes = planner(min_chunk_tokens=64), BatchShape()
    for _ in range(2):
        decodes.add_decode(100)
    begin(plan, decodes=2, due_in_s=due_in_s)
    assert plan.keeps_chunk_waiting(decodes, 0, left_tokens, 1) == waits
    begin(plan)
    assert not plan.keeps_chunk_waiting(BatchShape(), 0, left_tokens, 1)
