"""Starts in lots, on a server of places whose every step costs the same, whatever is in it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchRow, BatchShape
from echo_sgl.policies.prefills.gathering import Gathering
from tests.policies.plans import CHUNK_TOKENS, Clockwork, Unknown, begin, planner

NUM_STEPS, MANY = 20_000, 99_999


def prefills(num: int, new: int = 10, cached: int = 100) -> BatchShape:
    shape = BatchShape()
    for _ in range(num):
        shape.add_prefill(new, cached)
    return shape


def full(gathering: Gathering, num_started: int = 1) -> Gathering:
    gathering.note_pass(prefills(num_started), is_full=True)
    return gathering


def steady(
    ends: int = 1, steps: int = 2, passes: int = 30, gathering: Gathering | None = None
) -> Gathering:
    """As it is after many passes between which so many ended in so many steps."""
    gathering = full(gathering or Gathering())
    for _ in range(passes):
        for _ in range(ends):
            gathering.note_end()
        for _ in range(steps):
            gathering.note_decode()
        full(gathering, ends)
    return gathering


def tokens_per_step(
    num_places: int, longest: int, waits: Callable[[Gathering, int, int], bool], seed: int = 0
) -> float:
    """Tokens that a server of so many places makes in a step, prefill steps among them."""
    rng, gathering = random.Random(seed), Gathering()
    running: list[int] = []
    num_tokens = 0
    for _ in range(NUM_STEPS):
        num_free = num_places - len(running)
        if num_free and not (running and waits(gathering, len(running), MANY)):
            running += [rng.randint(1, longest) for _ in range(num_free)]
            full(gathering, num_free)
            continue
        num_tokens += len(running)
        gathering.note_decode()
        running = [left - 1 for left in running]
        for _ in range(sum(left == 0 for left in running)):
            gathering.note_end()
        running = [left for left in running if left]
    return num_tokens / NUM_STEPS


@pytest.mark.parametrize(("num_places", "longest"), [(8, 60), (32, 30), (64, 255), (64, 2000)])
def test_lots_make_nearly_as_many_tokens_as_the_best_lot_of_one_size(num_places, longest):
    at_once = tokens_per_step(
        num_places, longest, lambda gathering, num_decodes, num_waiting: False
    )
    gathered = tokens_per_step(num_places, longest, Gathering.waits)
    fixed = [
        tokens_per_step(num_places, longest, lambda one, *_, size=size: one.num_places < size)
        for size in (1, 2, 3, 4, 6, 8, 12, 16, 24)
        if size < num_places
    ]
    assert gathered >= 0.98 * max(fixed)
    assert gathered > 1.02 * at_once


def test_starting_at_once_is_best_for_long_answers_of_few_and_so_it_does():
    """Two places and answers of thousands of tokens: a start in 1,500 steps costs nothing."""
    gathering = steady(ends=1, steps=1500, passes=5)
    gathering.note_end()
    assert not gathering.waits(1, MANY)


def test_switched_off_nobody_waits_and_what_starts_is_learned_all_the_same():
    on, off = steady(), steady(gathering=Gathering(is_on=False))
    on.note_end()
    off.note_end()
    assert on.waits(64, MANY) and not off.waits(64, MANY)
    assert on.lot() == off.lot() and on.free_tokens(MANY) == off.free_tokens(MANY) > 0


def test_who_has_started_all_or_knows_nothing_does_not_wait():
    unfilled = steady()
    unfilled.note_pass(prefills(3), is_full=False)
    unfilled.note_end()
    unknown = full(Gathering())
    unknown.note_end()
    assert (
        not unfilled.waits(64, MANY)
        and not unknown.waits(64, MANY)
        and not Gathering().waits(64, MANY)
    )
    assert not steady().waits(64, MANY), "there is no room for anybody"
    assert not full(unknown).waits(64, MANY)


def test_when_no_more_requests_end_waiting_costs_no_more_than_the_start():
    gathering = steady()
    gathering.note_end()
    num_waited = 0
    while gathering.waits(20, MANY):
        gathering.note_decode()
        num_waited += 1
    assert 10 < num_waited <= 20


def test_nobody_waits_for_more_than_wait():
    gathering = steady()
    gathering.note_end()
    gathering.note_end()
    assert gathering.waits(64, 3)
    assert not gathering.waits(64, 2) and not gathering.waits(64, 0)


def test_room_that_others_take_is_no_room():
    gathering = steady()
    gathering.note_end()
    assert gathering.waits(64, MANY) and gathering.facts == {"num_places": 1, "empty_steps": 0}
    gathering.note_end()
    gathering.note_start()
    assert gathering.num_places == 1, "of two"
    gathering.note_start()
    gathering.note_start()
    assert not gathering.waits(64, MANY) and gathering.num_places == 0


def test_a_pass_that_changes_nothing_forgets_nothing():
    """A reserve that binds refuses in every step, an end later or not."""
    one, other = steady(), steady()
    for _ in range(50):
        one.note_decode()
        other.note_decode()
        other.note_pass(prefills(0), is_full=True)
    for gathering in (one, other):
        gathering.note_end()
    assert [one.waits(num, MANY) for num in range(99)] == [
        other.waits(num, MANY) for num in range(99)
    ]


def test_the_lot_is_as_its_requests_were_lately():
    gathering = steady()
    for _ in range(200):
        gathering.note_pass(prefills(2, new=30, cached=500), is_full=True)
    gathering.note_end()
    row = gathering.lot()
    expected = prefills(2, new=30, cached=500).row()
    assert row == pytest.approx(expected, abs=1, rel=1e-4)
    assert Gathering().lot() == BatchRow(1, 0, 0, 0, 0, 0, 0)


@given(st.lists(st.sampled_from(["end", "start", "decode", "full", "room"]), max_size=200))
def test_it_never_waits_for_longer_than_a_start_costs(events):
    gathering, num_waits = Gathering(), 0
    calls = {
        "end": gathering.note_end,
        "start": gathering.note_start,
        "decode": gathering.note_decode,
        "full": lambda: full(gathering),
        "room": lambda: gathering.note_pass(prefills(1), is_full=False),
    }
    for event in events:
        calls[event]()
        num_waits = num_waits + 1 if event == "decode" and gathering.waits(5, MANY) else 0
        assert num_waits <= 5


def plan_with(new_tokens: int, **given: object):
    plan = planner(**given)
    steady(gathering=plan.gathering)
    for _ in range(99):
        plan.gathering.note_pass(prefills(1, new=new_tokens, cached=0), is_full=True)
    plan.gathering.note_end()
    return plan


def test_lots_are_of_requests_that_fit_into_one_prefill_step():
    small, large = CHUNK_TOKENS // 2 - 1, CHUNK_TOKENS // 2 + 2
    assert begin(plan_with(small)).gathers(30, MANY)
    assert not begin(plan_with(large)).gathers(30, MANY)
    assert not begin(plan_with(small, gather=False)).gathers(30, MANY)


def test_a_planner_asks_how_many_would_be_stopped_and_how_many_wait():
    plan = begin(planner())
    steady(gathering=plan.gathering)
    plan.gathering.note_end()
    plan.gathering.note_end()
    assert plan.gathers(30, 3) and not plan.gathers(3, 30)


@pytest.mark.parametrize(("due_in_s", "gathers"), [(0.13, True), (0.11, False), (math.inf, True)])
def test_lots_fit_beside_online_decodes(due_in_s, gathers):
    """Two prompts of 50 tokens take 100 ms, two online decodes 20 ms."""
    plan = begin(plan_with(50), decodes=2, due_in_s=due_in_s)
    assert plan.gathers(30, MANY) is gathers


def test_while_nothing_is_known_of_steps_nobody_gathers():
    assert not begin(plan_with(50, estimator=Unknown())).gathers(30, MANY)


def test_the_lot_is_asked_about_once_for_each_end():
    class Counted(Clockwork):
        num_asked = 0

        def predict_s(self, step):
            self.num_asked += 1
            return super().predict_s(step)

    predictor, gathering = Counted(), steady()
    gathering.note_end()
    before_s = gathering.lot_s(predictor, 512)
    assert gathering.lot_s(predictor, 512) == before_s and predictor.num_asked == 1
    gathering.note_end()
    assert gathering.lot_s(predictor, 512) > before_s and predictor.num_asked == 2
    assert gathering.lot_s(predictor, 10) == math.inf


def test_what_could_start_is_as_long_as_requests_were_lately():
    gathering = Gathering()
    assert math.isinf(gathering.free_tokens(3)), "nobody has started"
    gathering.note_pass(prefills(4, new=50), is_full=False)
    assert gathering.free_tokens(3) == pytest.approx(150)
    assert gathering.free_tokens(0) == 0.0
    full(gathering, 0)
    assert gathering.free_tokens(3) == 0.0, "there is no place"
    gathering.note_end()
    assert gathering.free_tokens(3) == pytest.approx(50)
    gathering.note_end()
    assert gathering.free_tokens(1) == pytest.approx(50), "only one waits"
