"""Who gives a place away, to whom, and where it waits then."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.config import SloConfig
from echo_sgl.policies.prefills.places import Placed, Places, Queued
from tests.policies.plans import NOW_S, Clockwork, Unknown, begin, planner


def decodes(*due_s: float) -> list[Placed]:
    return [Placed(f"r{number}", one) for number, one in enumerate(due_s)]


def test_who_is_furthest_ahead_gives_its_place():
    ahead = decodes(10.5, 12.0, 11.0)
    assert Places(2.0).gives_way(ahead, from_s=10.0, return_place_s=0.2) == "r1"


@pytest.mark.parametrize(("ahead_s", "rid"), [(0.39, None), (0.41, "r0")])
def test_nobody_does_whose_return_would_take_more_than_its_place_gave(ahead_s, rid):
    """Twice 200 ms of places, from when the other one has it for certain."""
    ahead = decodes(10.0 + ahead_s)
    assert Places(2.0).gives_way(ahead, from_s=10.0, return_place_s=0.2) == rid


def test_without_gain_and_without_due_times_everybody_keeps_its_place():
    assert Places(0.0).gives_way(decodes(99.0), from_s=10.0, return_place_s=0.0) is None
    endless = [Placed("endless", math.inf)]
    assert Places(2.0).gives_way(endless, from_s=10.0, return_place_s=0.2) is None
    assert Places(2.0).gives_way([], from_s=10.0, return_place_s=0.2) is None


def test_who_gave_its_place_waits_by_due_time():
    places = Places(2.0)
    fresh = [Queued(11.0, has_started=False), Queued(12.0, has_started=False)]
    assert places.num_behind(fresh[::-1], Queued(11.5, has_started=True)) == 1
    assert places.num_behind(fresh[::-1], Queued(10.0, has_started=True)) == 2
    assert Places(0.0).num_behind(fresh[::-1], Queued(10.0, has_started=True)) == 0


def test_among_those_that_come_the_servers_own_order_holds():
    places = Places(2.0)
    later = [Queued(12.0, has_started=False), Queued(13.0, has_started=True)]
    assert places.num_behind(later[::-1], Queued(11.0, has_started=False)) == 1


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=30))
def test_whoever_has_tokens_waits_behind_nobody_that_is_due_later(entries):
    places, queue = Places(2.0), []
    for due_s, has_started in entries:
        own = Queued(float(due_s), has_started)
        queue.insert(len(queue) - places.num_behind(reversed(queue), own), own)
    assert sorted(queue) == sorted(Queued(float(due_s), started) for due_s, started in entries)
    fresh = [one.due_s for one in queue if not one.has_started]
    assert fresh == [float(due_s) for due_s, started in entries if not started]
    started = [one.due_s for one in queue if one.has_started]
    assert started == sorted(started)


def test_a_place_changes_hands_only_when_a_first_token_would_be_late():
    plan = planner(slo=SloConfig(ttft_s=1.0, tpot_s=1.0), place_gain=2.0)
    begin(plan, decodes=2, due_in_s=5.0, first_due_in_s=0.9, waiting=1)
    ahead = [Placed("ahead", NOW_S + 5.0)]
    assert plan.gives_way(Queued(NOW_S + 0.9, has_started=False), ahead) is None
    begin(plan, decodes=2, due_in_s=5.0, first_due_in_s=0.4, waiting=1)
    assert plan.gives_way(Queued(NOW_S + 0.4, has_started=False), ahead) == "ahead"


def test_no_place_changes_hands_for_a_first_token_that_lets_others_go_first():
    ahead, late = [Placed("ahead", NOW_S + 9.0)], Queued(NOW_S - 0.1, has_started=False)
    slo = SloConfig(ttft_s=1.0, tpot_s=1.0)
    plan = planner(slo=slo, place_gain=2.0, late_wait_s=3.0)
    begin(plan, decodes=2, due_in_s=9.0, first_due_in_s=-0.1, waiting=1)
    assert plan.gives_way(late, ahead) is None
    assert plan.gives_way(Queued(NOW_S - 0.1, has_started=True), ahead) == "ahead"
    assert plan.gives_way(Queued(NOW_S - 3.1, has_started=False), ahead) == "ahead"
    in_turn = planner(slo=slo, place_gain=2.0)
    begin(in_turn, decodes=2, due_in_s=9.0, first_due_in_s=-0.1, waiting=1)
    assert in_turn.gives_way(late, ahead) == "ahead"


@pytest.mark.parametrize("first_due_in_s", [0.1, -0.1])
@pytest.mark.parametrize(("ahead_s", "rid"), [(0.11, None), (0.13, "ahead")])
def test_a_return_stops_all_that_decode_for_a_token(ahead_s, rid, first_due_in_s):
    """Twice 60 decodes for 1 ms each, from now or when the first token is due on."""
    waiting = Queued(NOW_S + first_due_in_s, has_started=False)
    ahead = [Placed("ahead", NOW_S + max(0.0, first_due_in_s) + ahead_s)]
    for estimator, expected in ((None, rid), (Unknown(), None)):
        plan = planner(estimator, slo=SloConfig(ttft_s=1.0, tpot_s=1.0), place_gain=2.0)
        begin(plan, decodes=60, due_in_s=5.0, first_due_in_s=first_due_in_s, waiting=1)
        assert plan.gives_way(waiting, ahead) == expected


class Reading(Clockwork):
    """A prefill takes 10 us for each token that it finds in the cache."""

    def predict_s(self, step):
        return super().predict_s(step) + 1e-5 * step.cached_tokens


@pytest.mark.parametrize(("ahead_s", "rid"), [(0.23, None), (0.25, "ahead")])
def test_who_comes_back_reads_what_decodes_have_cached_in_the_mean(ahead_s, rid):
    """Twice 60 decodes for 1 ms and 100 tokens each."""
    waiting, ahead = Queued(NOW_S, has_started=False), [Placed("ahead", NOW_S + ahead_s)]
    plan = planner(Reading(), slo=SloConfig(ttft_s=1.0, tpot_s=1.0), place_gain=2.0)
    begin(plan, decodes=60, due_in_s=5.0, first_due_in_s=0.0, waiting=1)
    assert plan.gives_way(waiting, ahead) == rid
    begin(plan, first_due_in_s=0.0, waiting=1)
    assert plan.gives_way(waiting, []) is None, "there is nobody"


@pytest.mark.parametrize("steps", [{"ttft_margin": 0.0}, {"limit": "budget"}, {"place_gain": 0}])
def test_presets_without_it_do_not_even_look(steps):
    slo = SloConfig(ttft_s=1.0, tpot_s=1.0)
    plan = planner(slo=slo, **{"place_gain": 2.0, **steps})
    begin(plan, decodes=2, due_in_s=5.0, first_due_in_s=0.0, waiting=1)
    waiting = Queued(NOW_S, has_started=False)
    assert plan.gives_way(waiting, (pytest.fail("looked") for _ in range(1))) is None
