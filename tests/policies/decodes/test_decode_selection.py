"""The contract of every decode selection, and what each of them promises on top."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape, Step
from echo_sgl.policies.decodes.decode_selection import (
    RESUME_SHARE,
    Decode,
    ShortestSelection,
)
from echo_sgl.policies.decodes.decode_selections import create_decode_selection

NAMES = ("in-order", "shortest", "mix", "bottleneck", "uncached")
INFINITE = float("inf")
NOW_S = 100.0


class Predictor:
    """1 ms a step, 1 ms a decode, 1 us per token of context and of the longest; counts."""

    def __init__(self, *, captured: tuple[int, ...] = ()) -> None:
        self.num_predictions = 0
        self._captured = captured

    def predict_s(self, step: Step) -> float:
        self.num_predictions += 1
        padded = next((size for size in self._captured if size >= step.num_decodes), 0)
        context_tokens = step.decode_tokens + step.max_decode_tokens
        return 1e-3 * (1 + (padded or step.num_decodes)) + 1e-6 * context_tokens


def decode(sequence: int, context_tokens: int = 1000, **facts: object) -> Decode:
    """Runs, unless it was parked: `waiting_since_s`."""
    values: dict[str, object] = {
        "rid": f"r{sequence}",
        "context_tokens": context_tokens,
        "uncached_tokens": context_tokens,
        "waiting_since_s": None,
        "laxity_s": INFINITE,
        "is_running": facts.get("waiting_since_s") is None,
        "sequence": sequence,
    }
    return Decode(**{**values, **facts})


def online(*contexts: int) -> BatchShape:
    shape = BatchShape()
    for context_tokens in contexts:
        shape.add_decode(context_tokens)
    return shape


def select(name, candidates, limit_s, *, shape=None, max_decodes=99, seed=0, predictor=None):
    return create_decode_selection(name, seed=seed).select(
        candidates,
        shape if shape is not None else BatchShape(),
        predictor or Predictor(),
        limit_s,
        now_s=NOW_S,
        max_decodes=max_decodes,
    )


def time_s(candidates, shape_of=(), predictor=None) -> float:
    shape = online(*shape_of, *(one.context_tokens for one in candidates))
    return (predictor or Predictor()).predict_s(shape)


class ByLongestPrefill(Predictor):
    """A ms for each token of the longest prefill, and for each decode."""

    def predict_s(self, step: Step) -> float:
        return 1e-3 * (step.max_prefill_tokens + step.num_decodes)


@pytest.mark.parametrize("name", NAMES)
def test_who_joins_a_prefill_is_asked_for_beside_all_of_it(name):
    shape = online(500)
    shape.add_prefill(20, cached_tokens=30)
    candidates = [decode(number) for number in range(8)]
    selected = select(name, candidates, 0.0545, shape=shape, predictor=ByLongestPrefill())
    assert len(selected) == 3


@st.composite
def any_candidates(draw: st.DrawFn, *, kinds: tuple[str, ...] = ("runs", "parked", "late", "long")):
    facts = {
        "runs": {},
        "parked": {"waiting_since_s": NOW_S - 1},
        "late": {"laxity_s": -1.0},
        "long": {"waiting_since_s": NOW_S - 30},
    }
    drawn = draw(st.lists(st.tuples(st.integers(1, 5000), st.sampled_from(kinds)), max_size=9))
    uncached = draw(st.permutations(range(len(drawn))))
    return [
        decode(number, context_tokens, uncached_tokens=uncached[number], **facts[kind])
        for number, (context_tokens, kind) in enumerate(drawn)
    ]


limits = st.floats(0.0, 0.06)
online_contexts = st.lists(st.integers(1, 5000), max_size=4)
predictors = st.sampled_from([(), (1, 2, 4, 8, 16)]).map(lambda sizes: Predictor(captured=sizes))


@pytest.mark.parametrize("name", NAMES)
@given(any_candidates(), online_contexts, limits, st.integers(0, 9), predictors)
def test_the_step_stays_within_the_limit_and_the_number_and_the_shape_is_left_as_it_was(
    name, candidates, contexts, limit_s, max_decodes, predictor
):
    shape = online(*contexts)
    before = shape.row()
    options = {"shape": shape, "max_decodes": max_decodes, "predictor": predictor}
    chosen = select(name, candidates, limit_s, **options)
    assert shape.row() == before and len(shape) == len(contexts)
    assert chosen <= {one.rid for one in candidates} and len(chosen) <= max_decodes
    joined = [one for one in candidates if one.rid in chosen]
    assert not joined or time_s(joined, contexts, predictor) <= limit_s


@pytest.mark.parametrize("name", NAMES)
@given(any_candidates(), online_contexts, predictors)
def test_all_join_by_one_prediction_when_all_fit(name, candidates, contexts, predictor):
    limit_s = time_s(candidates, contexts, predictor) / RESUME_SHARE * 1.001
    predictor.num_predictions = 0
    chosen = select(name, candidates, limit_s, shape=online(*contexts), predictor=predictor)
    assert chosen == {one.rid for one in candidates}
    assert predictor.num_predictions == min(1, len(candidates))


@pytest.mark.parametrize("name", NAMES)
@given(any_candidates(), online_contexts, limits, st.integers(0, 9), st.integers(0, 99))
def test_ranks_choose_the_same_whatever_order_they_list_the_candidates_in(
    name, candidates, contexts, limit_s, max_decodes, seed
):
    ranks = [create_decode_selection(name, seed=seed) for _ in range(2)]
    for _ in range(3):
        first, second = (
            rank.select(
                listed,
                online(*contexts),
                Predictor(),
                limit_s,
                now_s=NOW_S,
                max_decodes=max_decodes,
            )
            for rank, listed in zip(ranks, (candidates, candidates[::-1]), strict=True)
        )
        assert first == second


@pytest.mark.parametrize("name", ["shortest", "mix"])
@given(any_candidates(), limits)
def test_nobody_who_still_fits_is_left_out(name, candidates, limit_s):
    chosen = select(name, candidates, limit_s)
    joined = [one for one in candidates if one.rid in chosen]
    for one in set(candidates) - set(joined):
        limit_for_one_s = limit_s if one.is_running else RESUME_SHARE * limit_s
        assert time_s([*joined, one]) > limit_for_one_s


@pytest.mark.parametrize("name", NAMES)
def test_who_was_parked_for_too_long_comes_first_although_it_is_the_longest(name):
    crowd = [decode(number, 100) for number in range(1, 40)]
    starved = decode(0, 5000, waiting_since_s=NOW_S - 10.1, uncached_tokens=9999)
    waits = decode(0, 5000, waiting_since_s=NOW_S - 9.9, uncached_tokens=9999)
    limit_s = time_s(crowd[:20])
    assert starved.rid in select(name, [*crowd, starved], limit_s)
    assert waits.rid not in select(name, [*crowd, waits], limit_s)


@pytest.mark.parametrize("name", NAMES)
def test_a_late_job_comes_first_although_it_is_the_longest(name):
    crowd = [decode(number, 100) for number in range(40)]
    late = decode(40, 5000, laxity_s=-0.1, uncached_tokens=9999)
    limit_s = time_s(crowd[:20])
    assert late.rid in select(name, [*crowd, late], limit_s)


@pytest.mark.parametrize("name", NAMES)
def test_an_urgent_one_that_can_never_fit_does_not_block_the_next(name):
    huge = decode(0, 10**6, waiting_since_s=NOW_S - 99)
    starved = decode(1, 5000, waiting_since_s=NOW_S - 11)
    crowd = [decode(number, 100) for number in range(2, 40)]
    assert starved.rid in select(name, [huge, *crowd, starved], time_s(crowd[:20]))


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(st.integers(1, 5000), min_size=2, max_size=12))
def test_nobody_starves_when_each_fits_alone(name, contexts):
    """A limit with room for the longest alone; who is not chosen is parked until it is."""
    selection = create_decode_selection(name, seed=3)
    limit_s = time_s([decode(0, max(contexts))]) / RESUME_SHARE * 1.001
    parked_since_s: dict[int, float | None] = dict.fromkeys(range(len(contexts)))
    ran: set[str] = set()
    for now_s in range(13 * len(contexts)):
        candidates = [
            decode(number, contexts[number], waiting_since_s=since_s)
            for number, since_s in parked_since_s.items()
        ]
        chosen = selection.select(
            candidates, BatchShape(), Predictor(), limit_s, now_s=float(now_s), max_decodes=99
        )
        ran |= chosen
        for one in candidates:
            since_s = parked_since_s[one.sequence]
            waits_since_s = now_s if since_s is None else since_s
            parked_since_s[one.sequence] = None if one.rid in chosen else waits_since_s
    assert len(ran) == len(contexts)


@pytest.mark.parametrize("name", ["shortest", "uncached"])
def test_who_sat_out_for_too_long_then_decodes_for_as_long(name):
    """Beside a crowd of short ones that goes on for ever, two long ones have their turns."""
    selection, contexts = create_decode_selection(name, seed=3), {0: 5000, 1: 4000}
    contexts |= dict.fromkeys(range(2, 30), 100)
    limit_s = time_s([decode(number, 100) for number in range(20)])
    parked_since_s: dict[int, float | None] = dict.fromkeys(contexts)
    num_steps = dict.fromkeys(contexts, 0)
    for step in range(1000):
        now_s = 0.1 * step
        candidates = [
            decode(number, contexts[number], waiting_since_s=since_s)
            for number, since_s in parked_since_s.items()
        ]
        chosen = selection.select(
            candidates, BatchShape(), Predictor(), limit_s, now_s=now_s, max_decodes=99
        )
        for one in candidates:
            number, has_joined = one.sequence, one.rid in chosen
            num_steps[number] += has_joined
            since_s = parked_since_s[number]
            waits_since_s = now_s if since_s is None else since_s
            parked_since_s[number] = None if has_joined else waits_since_s
    assert min(num_steps[0], num_steps[1]) > 300
    assert min(num_steps.values()) > 300


@pytest.mark.parametrize("name", ["in-order", "shortest", "uncached"])
@given(any_candidates(kinds=("runs", "parked")), online_contexts, limits)
def test_who_was_chosen_stays_while_nothing_changes(name, candidates, contexts, limit_s):
    """What was chosen runs and the rest is parked; "mix" and "bottleneck" draw anew on purpose."""
    chosen = select(name, candidates, limit_s, shape=online(*contexts))
    after = [
        one._replace(
            is_running=one.rid in chosen,
            waiting_since_s=None if one.rid in chosen else NOW_S - 1,
        )
        for one in candidates
    ]
    again = select(name, after, limit_s, shape=online(*contexts))
    assert chosen <= again


def test_a_parked_request_comes_back_only_below_the_limit_and_running_ones_fill_it():
    running, parked = decode(0), decode(1, waiting_since_s=NOW_S - 1)
    both_s = time_s([running, parked])
    assert select("shortest", [running, parked], both_s * 1.05) == {"r0"}
    assert select("shortest", [running, parked], both_s * 1.12) == {"r0", "r1"}
    assert select("shortest", [running, decode(1)], both_s) == {"r0", "r1"}


def test_a_shorter_parked_request_does_not_take_the_place_of_a_running_one():
    running, parked = decode(0, 5000), decode(1, 10, waiting_since_s=NOW_S - 1)
    assert select("shortest", [running, parked], time_s([running])) == {"r0"}


@given(any_candidates(kinds=("runs",)), online_contexts, limits, st.integers(0, 9), predictors)
def test_no_set_that_fits_is_larger_than_that_of_the_shortest(
    candidates, contexts, limit_s, max_decodes, predictor
):
    options = {"shape": online(*contexts), "max_decodes": max_decodes, "predictor": predictor}
    chosen = select("shortest", candidates, limit_s, **options)
    larger = len(chosen) + 1
    if larger <= min(max_decodes, len(candidates)):
        for group in combinations(candidates, larger):
            assert time_s(group, contexts, predictor) > limit_s


@pytest.mark.parametrize(
    ("name", "key"),
    [("in-order", "sequence"), ("shortest", "context_tokens"), ("uncached", "uncached_tokens")],
)
@given(any_candidates(kinds=("runs",)), online_contexts, limits, st.integers(0, 9))
def test_the_longest_prefix_of_the_order_joins(
    name, key, candidates, contexts, limit_s, max_decodes
):
    chosen = select(name, candidates, limit_s, shape=online(*contexts), max_decodes=max_decodes)
    expected: list[Decode] = []
    for one in sorted(candidates, key=lambda item: (getattr(item, key), item.sequence)):
        if len(expected) == max_decodes or time_s([*expected, one], contexts) > limit_s:
            break
        expected.append(one)
    if len(candidates) <= max_decodes and candidates and time_s(candidates, contexts) <= limit_s:
        expected = candidates
    assert chosen == {one.rid for one in expected}


def test_mix_lets_a_long_one_in_now_and_then_where_the_shortest_never_does():
    crowd = [decode(number, 100) for number in range(1, 30)]
    candidates = [decode(0, 3000), *crowd]
    limit_s = time_s(crowd[:15])
    selection = create_decode_selection("mix", seed=5)
    steps = [
        selection.select(
            candidates, BatchShape(), Predictor(), limit_s, now_s=NOW_S, max_decodes=99
        )
        for _ in range(100)
    ]
    assert 3 <= sum("r0" in chosen for chosen in steps) <= 40
    assert all("r0" not in select("shortest", candidates, limit_s) for _ in range(3))


def test_mix_fills_what_the_random_tries_leave_with_the_shortest():
    candidates = [decode(number, 10 + number) for number in range(30)]
    chosen = select("mix", candidates, time_s(candidates[-15:]))
    assert len(chosen) >= 15


@pytest.mark.parametrize("name", NAMES)
def test_predictions_stay_few_with_many_decodes(name):
    facts = ({}, {"waiting_since_s": NOW_S - 1})
    candidates = [decode(number, 10 + number, **facts[number % 2]) for number in range(64)]
    predictor = Predictor()
    select(name, candidates, time_s(candidates[:20]), predictor=predictor)
    assert predictor.num_predictions <= 30


@pytest.mark.parametrize("limit_s", [float("nan"), -1.0, 0.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_limit_that_is_no_time_lets_nobody_in(name, limit_s):
    assert select(name, [decode(0), decode(1, waiting_since_s=0.0)], limit_s) == set()


def test_without_a_limit_all_join():
    candidates = [decode(0), decode(1, waiting_since_s=0.0)]
    assert select("shortest", candidates, INFINITE) == {"r0", "r1"}


def test_the_shape_is_left_as_it_was_when_the_predictor_fails():
    class Broken:
        def predict_s(self, step: Step) -> float:
            raise ValueError("no coefficients")

    shape = online(10, 20)
    with pytest.raises(ValueError, match="no coefficients"):
        select("shortest", [decode(0), decode(1)], 1.0, shape=shape, predictor=Broken())
    assert len(shape) == 2


def test_an_unknown_selection_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'longest'; known are in-order, shortest, uncached, mix"):
        create_decode_selection("longest", seed=0)


def test_a_negative_waiting_time_is_refused():
    with pytest.raises(ValueError, match="max_parked_s is -1"):
        ShortestSelection(max_parked_s=-1)
