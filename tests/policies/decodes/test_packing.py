"""BROS's packing: online decodes with time to spare leave a step that is too long for the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import Step
from echo_sgl.estimators.batch_time import StepPredictor
from echo_sgl.policies.decodes.packing import leaves_for_urgent
from echo_sgl.policies.decodes.replacement import SPARE_STEPS, OnlineDecode

NOW_S, MANY = 64.0, 99


class ByTokens:
    """1 ms per token of context."""

    def predict_s(self, step: Step) -> float:
        return 0.001 * step.decode_tokens


class ByLongest:
    """1 ms per token of the longest context."""

    def predict_s(self, step: Step) -> float:
        return 0.001 * step.max_decode_tokens


def online(*rows: tuple[str, float, int]) -> list[OnlineDecode]:
    """Id, seconds until due, context."""
    return [OnlineDecode(rid, NOW_S + in_s, tokens) for rid, in_s, tokens in rows]


def leaving(
    ons: Sequence[OnlineDecode],
    *,
    due_in_s: float = math.inf,
    most: int = MANY,
    beside: Sequence[int] = (),
    predictor: StepPredictor | None = None,
) -> frozenset[str]:
    due_s = min([NOW_S + due_in_s, *(one.due_s for one in ons)])
    predictor = predictor or ByTokens()
    return leaves_for_urgent(
        ons, predictor, now_s=NOW_S, due_s=due_s, max_decodes=most, beside=beside
    )


def test_as_many_as_the_first_can_wait_for_stay_least_slack_first():
    ons = online(("d", 9.0, 40), ("a", 0.1, 40), ("c", 8.0, 40), ("b", 0.15, 40))
    assert leaving(ons) == {"c", "d"}


def test_nobody_leaves_a_step_that_ends_in_time():
    assert leaving(online(("a", 0.1, 50), ("b", 9.0, 49))) == frozenset()


def test_a_first_token_that_is_due_counts_as_well():
    ons = online(("a", 1.0, 50), ("b", 9.0, 50))
    assert leaving(ons) == frozenset()
    assert leaving(ons, due_in_s=0.06) == {"b"}


def test_nobody_leaves_who_would_be_late_for_it():
    """It needs two steps, which end when the first one is due: in 90 ms each."""
    for due_in_s, gone in ((0.17, frozenset()), (0.19, {"b"})):
        assert leaving(online(("a", 0.09, 40), ("b", due_in_s, 60))) == gone
    ons = online(("a", 0.09, 40), ("b", 0.17, 50), ("c", 9.0, 50))
    assert leaving(ons) == {"c"}
    assert leaving(ons[:2]) == frozenset()


def test_where_only_their_number_is_too_high_two_short_steps_are_soon_over():
    """Two of 10 ms: who is due a little later than the first, in a second, can sit out."""
    ons = online(("a", 1.0, 5), ("b", 1.001, 5))
    assert leaving(ons, most=1) == {"b"}
    soon = online(("a", 0.015, 5), ("b", 0.019, 5))
    assert leaving(soon, most=1) == frozenset()


def test_beside_others_that_decode_in_any_case_all_may_sit_out():
    ons = online(("a", 1.0, 5))
    assert leaving(ons, most=1) == frozenset()
    assert leaving(ons, most=1, beside=[5]) == {"a"}


def test_the_longest_context_counts_where_a_step_waits_for_it():
    ons = online(("a", 0.1, 40), ("b", 9.0, 150))
    assert leaving(ons, predictor=ByLongest()) == {"b"}
    assert leaving(ons[:1], predictor=ByLongest(), beside=[150]) == frozenset()


def test_where_the_first_is_late_in_any_case_all_go_on():
    assert leaving(online(("a", -0.01, 40), ("b", 9.0, 40))) == frozenset()
    assert leaving(online(("a", 0.03, 40), ("b", 9.0, 40))) == frozenset()


def test_the_batch_size_holds_for_online_decodes_too():
    ons = online(*((f"r{number}", 1.0 + 10 * number, 1) for number in range(6)))
    assert leaving(ons, most=4) == {"r4", "r5"}
    assert leaving(ons, most=4, beside=[1]) == {"r3", "r4", "r5"}


def test_what_decodes_in_any_case_takes_its_time():
    ons = online(("a", 0.1, 40), ("b", 9.0, 40))
    assert leaving(ons, beside=[19]) == frozenset()
    assert leaving(ons, beside=[21]) == {"b"}


def test_who_is_never_due_leaves_first():
    ons = online(("a", 0.05, 40), ("b", math.inf, 40))
    assert leaving(ons) == {"b"}


rows = st.lists(st.tuples(st.floats(-0.1, 2.0), st.integers(1, 80)), min_size=1, max_size=12)


@given(rows, st.floats(-0.1, 1.0), st.integers(1, 14), st.lists(st.integers(1, 50), max_size=3))
def test_who_stays_is_in_time_and_nobody_who_leaves_fits_or_is_late(drawn, first_s, most, beside):
    ons = online(*((f"{n:02}", in_s, tokens) for n, (in_s, tokens) in enumerate(drawn)))
    gone = leaving(ons, due_in_s=first_s, most=most, beside=beside)
    if not gone:
        return
    limit_s = min([first_s, *(in_s for in_s, _ in drawn)])
    staying = sorted(one for one in ons if one.rid not in gone)
    tokens = sum(one.context_tokens for one in staying) + sum(beside)
    assert 0.001 * tokens <= limit_s
    leavers = sorted((one for one in ons if one.rid in gone), key=lambda one: (one.due_s, one.rid))
    all_s = 0.001 * (sum(one.context_tokens for one in ons) + sum(beside))
    assert all(one.due_s - NOW_S >= SPARE_STEPS * min(all_s, limit_s) for one in leavers)
    assert all(one.due_s <= leavers[0].due_s for one in staying)
    num = len(staying) + len(beside)
    assert num >= most or 0.001 * (tokens + leavers[0].context_tokens) > limit_s
