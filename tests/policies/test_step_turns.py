"""Whether a step prefills or decodes where it does one of the two, SGLang's default."""

from __future__ import annotations

import math

import pytest

from echo_sgl.batch_shape import BatchShape
from tests.policies.plans import CHUNK_TOKENS, Clockwork, Unknown, begin, planner

PREFILL_WAITS = {"online_prefill_waits": True, "last_was_prefill": False}


@pytest.mark.parametrize(
    ("due_in_s", "defers"), [(0.2, False), (0.083, True), (-1.0, True), (math.inf, False)]
)
def test_offline_prefill_waits_until_the_smallest_chunk_fits_between_two_tokens(due_in_s, defers):
    plan = begin(planner(min_chunk_tokens=64), decodes=2, due_in_s=due_in_s)
    assert plan.decodes_first(online_prefill_waits=False, last_was_prefill=False) is defers


@pytest.mark.parametrize("limit", ["slack", "budget"])
def test_between_two_tokens_of_an_online_decode_there_is_one_offline_prefill(limit):
    plan = planner(limit=limit, budget_s=9.0)
    begin(plan, decodes=2, due_in_s=50.0)
    assert plan.decodes_first(online_prefill_waits=False, last_was_prefill=True)
    begin(plan)
    assert not plan.decodes_first(online_prefill_waits=False, last_was_prefill=True)


def test_a_chunk_that_attends_to_a_long_prefix_waits_for_more_room():
    class Attention(Clockwork):
        def predict_s(self, step):
            return super().predict_s(step) + 1e-6 * step.cached_tokens

    plan = begin(planner(Attention(), min_chunk_tokens=64), decodes=2, due_in_s=0.1)
    waits = {"online_prefill_waits": False, "last_was_prefill": False}
    assert not plan.decodes_first(**waits, cached_tokens=10_000)
    assert plan.decodes_first(**waits, cached_tokens=20_000)


@pytest.mark.parametrize(
    ("online_chunks", "due_in_s", "defers"),
    [("whole", 0.019, True), ("whole", 0.021, False), ("slack", 0.08, True), ("slack", 0.1, False)],
)
def test_online_prefill_and_online_decodes_take_turns_when_decodes_are_due(
    online_chunks, due_in_s, defers
):
    """Two decodes take 20 ms; the smallest chunk that a limit that cuts makes takes 64 more."""
    plan = planner(online_chunks=online_chunks)
    begin(plan, decodes=2, due_in_s=due_in_s, first_due_in_s=5.0, waiting=1)
    assert plan.decodes_first(online_prefill_waits=True, last_was_prefill=True) is defers
    assert not plan.decodes_first(online_prefill_waits=True, last_was_prefill=False)


def test_under_a_budget_online_decodes_go_between_two_online_prefills():
    turns = {"online_prefill_waits": True, "last_was_prefill": True}
    plan = begin(planner(limit="budget", budget_s=9.0), decodes=2, due_in_s=50.0, waiting=1)
    assert plan.decodes_first(**turns)
    assert not plan.decodes_first(**{**turns, "last_was_prefill": False})
    ample = begin(planner(), decodes=2, due_in_s=50.0, first_due_in_s=60.0, waiting=1)
    assert not ample.decodes_first(**turns), "slack is spent by the first and left for the second"


def test_without_a_limit_online_decodes_go_before_a_second_offline_prefill():
    plan = begin(planner(limit="off"), decodes=2, due_in_s=0.0)
    assert plan.decodes_first(online_prefill_waits=False, last_was_prefill=True)
    assert not plan.decodes_first(online_prefill_waits=True, last_was_prefill=True)
    assert not plan.decodes_first(online_prefill_waits=False, last_was_prefill=False)


def test_while_nothing_is_known_prefills_and_decodes_take_turns():
    """Nothing else would tell what either takes."""
    plan = begin(planner(Unknown()), decodes=2, due_in_s=0.0)
    assert plan.decodes_first(online_prefill_waits=False, last_was_prefill=True)
    assert not plan.decodes_first(online_prefill_waits=True, last_was_prefill=True)
    assert not plan.decodes_first(online_prefill_waits=False, last_was_prefill=False)


# Two decodes take 20 ms a step, a prefill of 100 tokens 100 ms.
@pytest.mark.parametrize(
    ("end_in_s", "num_left", "goes_on"),
    [
        (0.15, 3, True),  # 60 ms to decode, 90 ms of slack
        (0.17, 3, False),  # it can wait for the prefill
        (0.05, 3, False),  # it is late anyway
    ],
)
def test_who_is_about_to_end_ends_before_a_prefill_that_would_make_it_late(
    end_in_s, num_left, goes_on
):
    waits = {"first_due_in_s": 5.0, "waiting": 1, "waiting_tokens": 100}
    plan = begin(planner(), decodes=2, due_in_s=1.0, endings=[(end_in_s, num_left)], **waits)
    assert plan.decodes_first(**PREFILL_WAITS) is goes_on


@pytest.mark.parametrize(("first_due_in_s", "goes_on"), [(0.2, True), (0.15, False)])
def test_nobody_ends_in_time_at_the_cost_of_a_first_token(first_due_in_s, goes_on):
    """60 ms of decoding come before 100 ms of prefill."""
    plan = planner()
    begin(
        plan,
        decodes=2,
        due_in_s=1.0,
        first_due_in_s=first_due_in_s,
        waiting=1,
        waiting_tokens=100,
        endings=[(0.15, 3)],
    )
    assert plan.decodes_first(**PREFILL_WAITS) is goes_on


def test_one_chunk_of_a_long_prompt_is_what_an_ending_would_wait_for():
    waits = {"first_due_in_s": 50.0, "waiting": 1, "waiting_tokens": 10_000}
    chunk_s = 0.001 * CHUNK_TOKENS
    for spare_s, goes_on in ((-0.001, True), (0.001, False)):
        plan = planner()
        begin(plan, decodes=2, due_in_s=1.0, endings=[(0.06 + chunk_s + spare_s, 3)], **waits)
        assert plan.decodes_first(**PREFILL_WAITS) is goes_on


def test_without_a_margin_for_first_tokens_prefills_go_first_as_in_echo():
    waits = {"first_due_in_s": 5.0, "waiting": 1, "waiting_tokens": 100}
    plan = begin(planner(ttft_margin=0.0), decodes=2, due_in_s=1.0, endings=[(0.15, 3)], **waits)
    assert not plan.decodes_first(**PREFILL_WAITS)


def test_a_prefill_of_nothing_makes_nobody_late():
    waits = {"first_due_in_s": 5.0, "waiting": 1, "waiting_tokens": 0}
    plan = begin(planner(), decodes=2, due_in_s=1.0, endings=[(0.06, 3)], **waits)
    assert not plan.decodes_first(**PREFILL_WAITS)


def queued(waiting=20, first_due_in_s=50.0, slo=None, prompt_tokens=20, **steps):
    """Sixteen decodes have all places, one of them ends every second step; one place is empty.

    A decode step takes 160 ms, the prefill step of a lot of two 40.
    """
    plan = planner(slo=slo, **{"gather_online": True, **steps})
    one = BatchShape()
    one.add_prefill(prompt_tokens)
    for _ in range(30):
        plan.online_lots.note_pass(one, is_full=True)
        plan.online_lots.note_decode()
        plan.online_lots.note_decode()
        plan.online_lots.note_end()
    begin(plan, decodes=16, due_in_s=50.0, first_due_in_s=first_due_in_s, waiting=waiting)
    return plan


@pytest.mark.parametrize("waiting", [20, 200])
def test_online_requests_of_a_long_queue_start_in_lots(waiting):
    plan = queued(waiting)
    assert plan.decodes_first(**PREFILL_WAITS) and plan.online_gathers
    for _ in range(3):  # 4 of 16 places: what a fifth would save is less than it costs
        plan.online_lots.note_end()
    assert not plan.decodes_first(**PREFILL_WAITS) and not plan.online_gathers


@pytest.mark.parametrize(
    ("queue", "gathers"),
    [
        ({"waiting": 4}, True),
        ({"waiting": 3}, False),  # two lots of two are not there
        ({"first_due_in_s": 0.21}, True),
        ({"first_due_in_s": 0.19}, False),  # after another decode it would be late
        ({"first_due_in_s": -0.1}, False),
        ({"prompt_tokens": CHUNK_TOKENS}, False),  # two do not fit into one prefill step
        ({"gather": False}, False),
        ({"gather_online": False}, False),
        ({"limit": "relative"}, False),
        ({"limit": "budget", "budget_s": 9.0}, False),
    ],
)
def test_they_do_so_as_far_as_first_tokens_allow(queue, gathers):
    plan = queued(**queue)
    assert plan.decodes_first(**PREFILL_WAITS) is gathers
    assert plan.online_gathers is gathers


def test_who_is_between_chunks_and_who_comes_alone_wait_for_nobody():
    plan = queued()
    assert not plan.decodes_first(**PREFILL_WAITS, cached_tokens=64)
    plan = queued()
    plan.online_lots.note_pass(BatchShape(), is_full=False)
    plan.online_lots.note_end()
    assert not plan.decodes_first(**PREFILL_WAITS)
