"""BROS's replacement: offline decodes that take the turn of online ones with time to spare."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchRow, BatchShape
from echo_sgl.policies.decodes.decode_selection import Decode
from echo_sgl.policies.decodes.replacement import (
    NOBODY,
    SPARE_STEPS,
    OnlineDecode,
    Replacement,
    replace_decodes,
)
from tests.policies.plans import NOW_S, Clockwork, Unknown, planner

MANY = 99


class ByTokens(Clockwork):
    """1 ms for each token that a decode attends to: short ones make room for long ones."""

    def predict_s(self, step: BatchRow | BatchShape) -> float:
        return 0.001 * step.decode_tokens


class ByLongest(Clockwork):
    """1 ms for each token of the longest context."""

    def predict_s(self, step: BatchRow | BatchShape) -> float:
        return 0.001 * step.max_decode_tokens


def online(*rows: tuple[str, float, int]) -> list[OnlineDecode]:
    """Id, seconds until it is due, context."""
    return [OnlineDecode(rid, NOW_S + in_s, tokens) for rid, in_s, tokens in rows]


def offline(*rows: tuple[str, int]) -> list[Decode]:
    """Id and context; all of it would be lost."""
    return [
        Decode(rid, tokens, tokens, None, float("inf"), True, number)
        for number, (rid, tokens) in enumerate(rows)
    ]


def replaced(
    ons: Sequence[OnlineDecode],
    left: Sequence[Decode],
    *,
    limit_s: float = 0.1,
    most: int = MANY,
    joined: Sequence[int] = (),
    predictor: Clockwork | None = None,
) -> Replacement:
    predictor = predictor or ByTokens()
    return replace_decodes(
        ons, left, predictor, limit_s, now_s=NOW_S, max_decodes=most, joined=joined
    )


def pair(leaving: str, joining: str) -> Replacement:
    return Replacement(frozenset(leaving), frozenset(joining))


def test_the_one_due_last_leaves_its_turn_to_the_one_with_least_to_lose() -> None:
    ons = online(("a", 0.1, 50), ("b", 9.0, 50), ("c", 5.0, 50))
    assert replaced(ons, offline(("E", 60), ("F", 40)), limit_s=0.145) == pair("b", "F")


def test_one_for_one_until_the_next_does_not_fit() -> None:
    ons = online(("a", 0.1, 20), ("b", 7.0, 30), ("c", 8.0, 30), ("d", 9.0, 20))
    left = offline(("E", 20), ("F", 30), ("G", 40))
    # d for E and c for F make 100; b for G would make 110.
    assert replaced(ons, left) == pair("cd", "EF")


def test_a_long_one_that_left_makes_room_for_several() -> None:
    ons = online(("a", 0.1, 20), ("b", 9.0, 80))
    assert replaced(ons, offline(("E", 20), ("F", 30), ("G", 30), ("H", 1))) == pair("b", "HEF")


def test_the_paper_stops_at_the_first_that_does_not_fit() -> None:
    ons = online(("a", 0.1, 50), ("b", 9.0, 50))
    assert replaced(ons, offline(("E", 60))) == NOBODY


def test_the_most_urgent_one_always_decodes() -> None:
    assert replaced(online(("a", 9.0, 90)), offline(("E", 1))) == NOBODY
    ons = online(("a", 8.0, 50), ("b", 9.0, 50))
    assert replaced(ons, offline(("E", 45), ("F", 45))) == pair("b", "E")


def test_nobody_leaves_who_would_be_late_for_it() -> None:
    left = offline(("E", 10))
    for in_s, expected in ((1.9 * 0.1, NOBODY), (2.1 * 0.1, pair("b", "E"))):
        assert replaced(online(("a", 0.1, 50), ("b", in_s, 50)), left) == expected


def test_one_that_is_never_due_keeps_its_turn_and_takes_its_time() -> None:
    never = float("inf")
    assert replaced(online(("a", 0.1, 50), ("b", never, 50)), offline(("E", 10))) == NOBODY
    ons = online(("a", 0.1, 30), ("b", never, 30), ("c", 9.0, 40))
    assert replaced(ons, offline(("E", 40))) == pair("c", "E")
    assert replaced(ons, offline(("E", 41))) == NOBODY


def test_a_turn_makes_room_where_the_number_of_decodes_is_what_holds() -> None:
    ons = online(("a", 0.1, 5), ("b", 9.0, 5))
    left = offline(("E", 5), ("F", 6))
    assert replaced(ons, left, most=3, joined=[5]) == pair("b", "E")
    assert replaced(ons, left, most=2, joined=[5]) == NOBODY


def test_those_that_decode_in_any_case_take_their_time() -> None:
    ons, left = online(("a", 0.1, 40), ("b", 9.0, 40)), offline(("E", 30))
    assert replaced(ons, left, joined=[30]) == pair("b", "E")
    assert replaced(ons, left, joined=[31]) == NOBODY


def test_the_longest_context_counts_where_a_step_waits_for_it() -> None:
    ons = online(("a", 0.1, 50), ("b", 9.0, 150))
    assert replaced(ons, offline(("E", 100)), predictor=ByLongest()) == pair("b", "E")
    assert replaced(ons, offline(("E", 101)), predictor=ByLongest()) == NOBODY


def test_a_step_that_nobody_can_predict_replaces_nobody() -> None:
    ons, left = online(("a", 0.1, 1), ("b", 9.0, 1)), offline(("E", 1))
    for answer in (float("nan"), float("inf")):

        class Odd(Clockwork):
            def predict_s(self, step: BatchRow | BatchShape, answer: float = answer) -> float:
                return answer

        one = replace_decodes(ons, left, Odd(), 0.1, now_s=NOW_S, max_decodes=MANY)
        assert one == NOBODY


ROWS = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 60)), max_size=12)


@given(ROWS, st.lists(st.integers(1, 60), max_size=12), st.floats(0.0, 0.5), st.integers(0, 20))
def test_the_step_stays_within_its_limits_and_nobody_is_late(rows, lengths, limit_s, most):
    ons = online(*((f"on-{number}", *row) for number, row in enumerate(rows)))
    left = offline(*((f"off-{number}", tokens) for number, tokens in enumerate(lengths)))
    leaving, joining = replaced(ons, left, limit_s=limit_s, most=most)
    assert len(leaving) <= len(joining)
    assert replaced(ons[::-1], left[::-1], limit_s=limit_s, most=most) == (leaving, joining)
    if not leaving:
        return
    stays = [one for one in ons if one.rid not in leaving]
    assert min(one.due_s for one in ons) in {one.due_s for one in stays}
    assert max(one.due_s for one in stays) <= min(o.due_s for o in ons if o.rid in leaving)
    tokens = sum(one.context_tokens for one in stays)
    tokens += sum(one.context_tokens for one in left if one.rid in joining)
    assert 0.001 * tokens <= limit_s
    assert len(stays) + len(joining) <= most
    for one in ons:
        assert one.rid not in leaving or one.due_s - NOW_S >= SPARE_STEPS * limit_s


def begun(estimator=None, *, num_online: int = 2, **steps):
    plan = planner(estimator or ByTokens(), selection="uncached", **steps)
    shape = BatchShape()
    for _ in range(num_online):
        shape.add_decode(50)
    plan.begin(NOW_S, shape, decode_due_s=NOW_S + 0.1, first_due_s=float("inf"), num_waiting=0)
    return plan


ONS, LEFT = online(("a", 0.1, 50), ("b", 9.0, 50)), offline(("E", 40))


def test_a_planner_replaces_within_the_limit_of_the_step() -> None:
    plan = begun(replace=True, slack_pace=1.0)
    assert plan.choose_decodes(lambda: LEFT) == set()
    assert plan.replace_decodes(LEFT, set(), ONS) == pair("b", "E")
    assert plan.replace_decodes(LEFT, {"E"}, ONS) == NOBODY
    assert plan.replace_decodes(LEFT, set(), ONS, beside=[11]) == NOBODY


def test_a_planner_replaces_nobody_unless_told_or_while_it_knows_nothing() -> None:
    assert begun().replace_decodes(LEFT, set(), ONS) == NOBODY
    assert begun(Unknown(), replace=True).replace_decodes(LEFT, set(), ONS) == NOBODY
    assert begun(replace=True, limit="off").replace_decodes(LEFT, set(), ONS) == NOBODY
