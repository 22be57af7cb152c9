"""What is prefilled next: benefit less punishment per second, and what goes before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape, Step
from echo_sgl.policies.cache.eviction_order import LeafFacts
from echo_sgl.policies.order.candidates import (
    MAX_VICTIMS,
    Candidate,
    Victims,
    length_bucket,
    mean_bucket,
    rank,
    score,
)

INFINITE = float("inf")


class Predictor:
    """1 ms a step, 10 us per computed token, 1 us per token of context."""

    num_predictions = 0

    def predict_s(self, step: Step) -> float:
        self.num_predictions += 1
        if not (step.num_prefills or step.num_decodes):
            return 0.0
        return 1e-3 + 1e-5 * step.prefill_tokens + 1e-6 * (step.cached_tokens + step.decode_tokens)


def candidate(rid: str, new_tokens: int = 100, cached_tokens: int = 0, **facts) -> Candidate:
    values = {
        "evicted_needed_tokens": 0,
        "laxity_s": INFINITE,
        "length_bucket": length_bucket(new_tokens + cached_tokens),
    }
    return Candidate(rid, new_tokens, cached_tokens, **{**values, **facts})


def running(*contexts: int) -> BatchShape:
    shape = BatchShape()
    for context_tokens in contexts:
        shape.add_decode(context_tokens)
    return shape


@st.composite
def any_candidates(draw: st.DrawFn) -> list[Candidate]:
    facts = st.tuples(
        st.integers(1, 2000),
        st.integers(0, 2000),
        st.integers(0, 5000),
        st.sampled_from([INFINITE, 5.0, 0.0, -1.0, -2.0]),
    )
    return [
        Candidate(f"r{number}", *one, length_bucket(one[0] + one[1]))
        for number, one in enumerate(draw(st.lists(facts, max_size=8)))
    ]


contexts = st.lists(st.integers(1, 4000), max_size=3)


@given(any_candidates(), contexts)
def test_every_candidate_is_ranked_once_with_few_predictions(candidates, lengths):
    shape, predictor = running(*lengths), Predictor()
    before = shape.row()
    ranked = rank(candidates, shape, predictor)
    assert sorted(ranked) == sorted(one.rid for one in candidates)
    assert shape.row() == before and len(shape) == len(lengths)
    assert predictor.num_predictions <= len(candidates) + 1
    assert rank(candidates, shape, predictor) == ranked


@given(any_candidates(), contexts)
def test_nobody_is_ranked_before_one_that_is_clearly_better(candidates, lengths):
    shape, predictor = running(*lengths), Predictor()
    by_rid = {one.rid: one for one in candidates}
    alone_s = predictor.predict_s(shape)
    ranked = [by_rid[rid] for rid in rank(candidates, shape, predictor)]
    for number, one in enumerate(ranked):
        for later in ranked[number + 1 :]:
            if later.laxity_s < 0:
                assert one.laxity_s <= later.laxity_s
            elif one.laxity_s >= 0:
                mine, other = (score(x, shape, predictor, alone_s) for x in (one, later))
                assert mine >= other - 0.05 * abs(other) - 1e-6


def test_the_prompt_that_is_in_the_cache_goes_first():
    shares, alone = candidate("shares", 100, 1000), candidate("alone", 1100)
    assert rank([alone, shares], running(500), Predictor()) == ["shares", "alone"]


def test_one_that_evicts_what_others_need_goes_last():
    harmful = candidate("harmful", 100, 1000, evicted_needed_tokens=1050)
    assert rank([harmful, candidate("plain", 1100)], running(500), Predictor())[0] == "plain"


def test_the_score_is_tokens_done_less_tokens_lost_per_second_added():
    one = candidate("a", 100, 300, evicted_needed_tokens=150)
    shape = running(1000)
    alone_s = Predictor().predict_s(shape)
    added_s = 100 * 1e-5 + 300 * 1e-6
    assert score(one, shape, Predictor(), alone_s) == pytest.approx((400 - 150) / added_s)


def test_the_late_go_before_the_best_and_the_latest_before_the_late():
    best = candidate("best", 10, 5000)
    late, later = candidate("late", laxity_s=-1.0), candidate("later", laxity_s=-2.0)
    assert rank([best, late, later], running(9), Predictor()) == ["later", "late", "best"]


def test_of_near_ties_the_one_as_long_as_what_runs_goes_first_and_then_the_first_given():
    # Both compute all they bring, so their scores are equal but for rounding.
    short, long = candidate("short", 200), candidate("long", 3000)

    def ranked(first: Candidate, second: Candidate, *running_tokens: int) -> list[str]:
        bucket = mean_bucket(len(running_tokens), sum(running_tokens))
        return rank([first, second], running(9), Predictor(), bucket=bucket)

    assert ranked(short, long, 2900, 3100) == ["long", "short"]
    assert ranked(short, long, 190, 210) == ["short", "long"]
    for others in ((50_000,), ()):
        assert ranked(long, short, *others) == ["long", "short"]
        assert ranked(short, long, *others) == ["short", "long"]


def test_a_regular_length_does_not_outweigh_a_clearly_better_score():
    regular, better = candidate("regular", 1000), candidate("better", 4000, 4000)
    bucket = mean_bucket(1, 1000)
    assert rank([regular, better], running(9), Predictor(), bucket=bucket)[0] == "better"


def test_where_a_prefill_costs_nothing_the_tokens_decide():
    class Free:
        def predict_s(self, step: Step) -> float:
            return 0.5

    assert rank([candidate("a", 10), candidate("b", 99)], running(5), Free()) == ["b", "a"]


def test_buckets_are_powers_of_two():
    assert [length_bucket(n) for n in (1, 2, 3, 4, 1023, 1024, 2047, 2048)] == [
        *(1, 2, 2, 3),
        *(10, 11, 11, 12),
    ]


def victims(*leaves: tuple[int, int]) -> Victims:
    """Tokens of each leaf, and how many pending requests wait for it."""
    facts = [LeafFacts(number, 0.0, num_pending=num) for number, (_, num) in enumerate(leaves)]
    return Victims((tokens, one) for (tokens, _), one in zip(leaves, facts, strict=True))


def test_what_an_eviction_takes_from_pending_requests_is_as_much_as_is_missing():
    """The last leaf goes as a whole, but only what was missing of it is laid to the charge."""
    leaves = victims((100, 0), (50, 2), (80, 0), (60, 1))
    needed = {0: 0, 100: 0, 120: 20, 150: 50, 230: 50, 260: 80, 290: 110, 999: 110}
    for missing_tokens in (150, 0, 999, 120, 290, 230, 100, 260):
        assert leaves.needed_tokens(missing_tokens) == needed[missing_tokens]


def test_no_more_victims_are_looked_at_than_a_step_may_evict():
    leaves = iter([(10, LeafFacts(number, 0.0, num_pending=1)) for number in range(99)])
    seen = Victims(leaves)
    assert seen.needed_tokens(25) == 25
    assert len(list(leaves)) == 99 - 3, "as far as somebody asks"
    most = victims(*[(10, 1)] * 99)
    assert most.needed_tokens(990) == 10 * MAX_VICTIMS == most.needed_tokens(10**9)
