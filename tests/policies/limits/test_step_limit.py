"""How long a step may take: due times, and what each limit makes of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import StepKind
from echo_sgl.config import SloConfig, StepsConfig, parse_config
from echo_sgl.policies.limits.slack_limit import SlackLimit, SlackUse
from echo_sgl.policies.limits.step_limit import OnlinePart, OnlineView
from echo_sgl.policies.limits.step_limits import MAX_CREDIT_STALLS, RelativeLimit, create_step_limit

# All of the slack of online decodes is used.
ALL = {"slack_share": 1.0, "lag_tokens": 0.0, "place_share": 0.0, "place_gain": 0.0}
seconds = st.floats(0.001, 10.0)


def view(**given_values: object) -> OnlineView:
    values = {
        "now_s": 100.0,
        "decode_due_s": math.inf,
        "first_due_s": math.inf,
        "alone_s": 0.0,
        "is_present": True,
    }
    return OnlineView(**{**values, **given_values})


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_endless_slack_stays_endless_however_little_of_it_is_used(share):
    """NaN would let nobody in."""
    assert SlackUse(pace_s=0.05, share=share).usable_s(math.inf) == math.inf
    assert SlackUse(pace_s=0.05, share=share).usable_s(0.15) == pytest.approx(0.05 + share * 0.1)


def test_slack_is_the_time_until_the_first_thing_due():
    limit = SlackLimit(stall_s=10.0)
    assert limit.limit_s(view(decode_due_s=100.3, first_due_s=100.2)) == pytest.approx(0.2)
    assert limit.limit_s(view(decode_due_s=100.3)) == pytest.approx(0.3)


def test_a_late_token_leaves_no_time_at_all():
    assert SlackLimit(stall_s=1.0).limit_s(view(decode_due_s=99.0)) < 0


def test_an_online_prefill_leaves_online_decodes_their_next_step():
    limit = SlackLimit(stall_s=10.0)
    room_s = limit.chunk_limit_s(view(decode_due_s=100.5, alone_s=0.1))
    assert room_s == pytest.approx(0.4)


def decode_limit_s(limit, view):
    return limit.decode_limit_s(view, limit.limit_s(view))


@pytest.mark.parametrize("name", ["slack", "relative"])
@given(alone_s=seconds)
def test_no_limit_lengthens_a_step_by_more_than_the_stall(name, alone_s):
    steps = StepsConfig(limit=name, max_stall_s=0.05, max_inflation=1000.0)
    limit = create_step_limit(steps, SloConfig(ttft_s=3600.0, tpot_s=3600.0))
    assert limit.limit_s(view(alone_s=alone_s)) <= alone_s + 0.05


@pytest.mark.parametrize(
    ("taken", "share_of_the_slack"),
    [(0.0, 1.0), (0.5, 1.0), (0.625, 0.5), (0.75, 0.0), (1.0, 0.0), (1.5, 0.0)],
)
def test_the_fewer_places_are_left_the_less_of_the_slack_is_used(taken, share_of_the_slack):
    limit = SlackLimit(stall_s=10.0, place_share=0.75)
    at_hand = view(decode_due_s=100.5, alone_s=0.1, places_ahead=taken)
    given_s = pytest.approx(0.1 + share_of_the_slack * 0.4)
    assert limit.limit_s(at_hand) == given_s
    assert decode_limit_s(limit, at_hand) == given_s
    assert SlackLimit(stall_s=10.0).limit_s(at_hand) == pytest.approx(0.5), "unless it is asked for"


def test_places_give_no_time_that_is_not_there():
    late = view(decode_due_s=99.9, alone_s=0.1, places_ahead=0.7)
    assert SlackLimit(stall_s=10.0, place_share=0.75).limit_s(late) == pytest.approx(-0.1)


def test_where_nothing_is_due_places_matter_as_well():
    limit = SlackLimit(stall_s=1.0, place_share=1.0)
    full = limit.limit_s(view(alone_s=0.1, places_ahead=1.0))
    assert full == pytest.approx(0.1) and full < 0.1, "nobody joins, though it took no time"
    assert limit.limit_s(view(alone_s=0.1, places_ahead=0.5)) == pytest.approx(1.1)


def test_the_relative_limit_gives_what_the_inflation_allows():
    limit = RelativeLimit(stall_s=1.0, max_inflation=1.2)
    assert limit.limit_s(view(alone_s=0.1)) == pytest.approx(0.12)


def part(predicted_s, kind=StepKind.DECODE, *, is_alone=False):
    return OnlinePart(predicted_s, kind, is_alone)


MADE_TO_WAIT = OnlinePart(0.0, None, False)


@pytest.mark.parametrize("name", ["relative", "slack"])
def test_while_nobody_is_online_a_step_may_take_the_longest_stall(name):
    """However much was saved up or is owed: who arrives waits for no longer."""
    limit = create_step_limit(StepsConfig(limit=name, max_stall_s=0.2), SloConfig())
    assert limit.limit_s(view(is_present=False)) == 0.2
    limit.note_step(part(0.1), elapsed_s=5.0)
    assert limit.limit_s(view(is_present=False)) == 0.2


def test_the_first_step_of_online_work_after_offline_work_alone_teaches_nothing():
    """With overlap it pays for the step before it, which held nothing online."""
    limit = RelativeLimit(stall_s=1.0, max_inflation=1.5)
    for _ in range(20):
        limit.note_step(None, elapsed_s=0.5)
        limit.note_step(part(0.1, is_alone=True), elapsed_s=0.6)
    limit.note_step(None, elapsed_s=0.5)
    limit.note_step(part(0.1, is_alone=True), elapsed_s=0.1)
    assert limit.limit_s(view(alone_s=0.1)) == pytest.approx(0.15 + 0.05)


def test_steps_below_the_inflation_save_up_for_a_chunk():
    limit = RelativeLimit(stall_s=1.0, max_inflation=1.5)
    for _ in range(4):
        limit.note_step(part(0.1), elapsed_s=0.1)
    assert limit.limit_s(view(alone_s=0.1)) == pytest.approx(0.15 + 4 * 0.05)
    limit.note_step(MADE_TO_WAIT, elapsed_s=0.2)
    assert limit.limit_s(view(alone_s=0.1)) == pytest.approx(0.15)


def test_nothing_is_saved_up_while_nobody_is_online():
    limit = RelativeLimit(stall_s=1.0, max_inflation=1.5)
    limit.note_step(part(0.1), elapsed_s=0.05)
    limit.note_step(None, elapsed_s=5.0)
    assert limit.limit_s(view(alone_s=0.1)) == pytest.approx(0.15)


def test_who_waits_for_a_first_token_ends_credit_and_not_debt():
    """It came later than what the others saved, and would pay for it with them."""
    for elapsed_s, left_s in ((0.1, 0.0), (0.3, -0.15)):
        limit = RelativeLimit(stall_s=1.0, max_inflation=1.5)
        limit.note_step(part(0.1), elapsed_s)
        limit.note_waiting()
        assert limit.limit_s(view(alone_s=0.1)) == pytest.approx(0.15 + left_s)


def test_what_the_host_takes_beside_each_step_is_part_of_what_online_work_takes_alone():
    """Else a server with a third of each step on the host never lets offline work in."""
    limit = RelativeLimit(stall_s=1.0, max_inflation=1.1)
    for _ in range(200):
        limit.note_step(part(0.010, is_alone=True), elapsed_s=0.015)
    before_s = limit.limit_s(view(alone_s=0.010))
    limit.note_step(part(0.010), elapsed_s=0.0165)
    assert limit.limit_s(view(alone_s=0.010)) == pytest.approx(before_s, abs=1e-5)
    assert before_s > 0.1
    limit.note_step(part(0.010), elapsed_s=0.0265)
    assert limit.limit_s(view(alone_s=0.010)) == pytest.approx(before_s - 0.01, abs=1e-5)


@given(steps=st.lists(st.tuples(seconds, seconds), max_size=50), inflation=st.floats(1.0, 3.0))
def test_credit_and_debt_are_bounded(steps, inflation):
    limit = RelativeLimit(stall_s=0.1, max_inflation=inflation)
    for place, (online_s, elapsed_s) in enumerate(steps):
        limit.note_step(part(online_s, is_alone=place % 3 > 0), elapsed_s)
    credit_s = limit._limit_s(view(alone_s=0.0))
    assert -0.1 - 1e-9 <= credit_s <= MAX_CREDIT_STALLS * 0.1 + 1e-9


@given(
    online=st.lists(seconds, min_size=1, max_size=50),
    wish=st.lists(seconds, min_size=50, max_size=50),
)
def test_online_work_is_never_slower_than_the_inflation_over_time(online, wish):
    """Whatever offline work wants, a scheduler that obeys the limit keeps the total."""
    limit, spent_s = RelativeLimit(stall_s=0.5, max_inflation=1.3), 0.0
    for alone_s, wish_s in zip(online, wish, strict=False):
        allowed_s = limit.limit_s(view(alone_s=alone_s))
        elapsed_s = max(alone_s, min(alone_s + wish_s, allowed_s))
        limit.note_step(part(alone_s), elapsed_s)
        spent_s += elapsed_s
    assert spent_s <= 1.3 * sum(online) * (1 + 1e-9)


def test_the_budget_holds_while_somebody_is_online():
    limit = create_step_limit(
        StepsConfig(limit="budget", budget_s=0.3, max_stall_s=0.1), SloConfig()
    )
    assert limit.limit_s(view()) == 0.3
    assert limit.limit_s(view(is_present=False)) == 0.1


@pytest.mark.parametrize("due_in_s", [1.0, -1.0, math.inf])
def test_online_chunks_are_held_to_the_budget_beside_decodes_that_are_promised_anything_or_not(
    due_in_s,
):
    limit = create_step_limit(StepsConfig(limit="budget", budget_s=0.3), SloConfig())
    assert limit.chunk_limit_s(view(decode_due_s=100 + due_in_s, alone_s=0.02)) == 0.3
    assert limit.chunk_limit_s(view()) == math.inf, "without decodes nobody waits for it"


def test_a_budget_that_was_set_stays_and_one_from_the_config_begins_anew():
    limit = create_step_limit(StepsConfig(limit="budget", budget_s=0.3), SloConfig())
    for _ in range(20):
        limit.note_request(False)
    limit.forget_requests()
    assert limit.limit_s(view()) == 0.3
    limit.set_budget(0.1)
    for _ in range(20):
        limit.note_request(False)
    assert limit.limit_s(view()) == 0.1
    limit.forget_requests()
    assert limit.limit_s(view()) == 0.1


def test_missed_promises_shrink_the_budget_and_kept_ones_raise_it():
    limit = create_step_limit(StepsConfig(limit="budget", budget_s=0.3), SloConfig())
    for _ in range(20):
        limit.note_request(False)
    shrunk_s = limit.limit_s(view())
    assert shrunk_s < 0.3
    for _ in range(20):
        limit.note_request(True)
    assert limit.limit_s(view()) > shrunk_s


def test_a_fixed_budget_stays():
    steps = StepsConfig(limit="budget", budget_s=0.3, adapt_budget=False)
    limit = create_step_limit(steps, SloConfig())
    for _ in range(100):
        limit.note_request(False)
    assert limit.limit_s(view()) == 0.3


def test_off_limits_nothing():
    limit = create_step_limit(parse_config({"steps": {"limit": "off"}}).steps, SloConfig())
    assert math.isinf(limit.limit_s(view(decode_due_s=0.0)))


def test_an_unknown_limit_is_refused_by_name():
    with pytest.raises(ValueError, match="'auto'; known are slack, budget, relative, off"):
        create_step_limit(StepsConfig(limit="auto"), SloConfig())


def waiting(*, first_due_in_s: float, **others: float) -> OnlineView:
    """Decodes with time to spare, and a request that waits for its first token."""
    return view(decode_due_s=101.0, first_due_s=100.0 + first_due_in_s, **others)


def test_decodes_hold_no_offline_work_while_a_first_token_would_be_late() -> None:
    steps = StepsConfig(limit="slack", max_stall_s=10.0, stall_share=1.0, ttft_margin=0.5, **ALL)
    limit = create_step_limit(steps, SloConfig(ttft_s=2.0, tpot_s=0.1))
    assert decode_limit_s(limit, waiting(first_due_in_s=1.5)) == pytest.approx(1.0)
    assert decode_limit_s(limit, waiting(first_due_in_s=0.9)) <= 0.0
    assert decode_limit_s(limit, waiting(first_due_in_s=1.5, prefill_s=0.6)) <= 0.0
    # Online decodes take four fifths of the time: 0.2 s of prefill need a second.
    late = waiting(first_due_in_s=1.5, prefill_s=0.2, alone_s=0.08)
    assert decode_limit_s(limit, late) == pytest.approx(0.08)
    # Less than online decodes alone, so that one which takes no time beside them sits out, too.
    assert decode_limit_s(limit, late) < 0.08
    # A prefill step is held against the due times as before.
    assert limit.limit_s(late) == pytest.approx(1.0)


@pytest.mark.parametrize("alone_s", [0.08, 0.1, 0.7])
def test_however_long_online_decodes_take_a_fifth_of_the_time_is_for_prefills(alone_s) -> None:
    limit = create_step_limit(StepsConfig(limit="slack"), SloConfig(ttft_s=2.0, tpot_s=0.1))
    at_hand = view(prefill_s=0.2, alone_s=alone_s)
    assert limit.is_pressed(at_hand, 100.0 + 1.99), "a second of prefills, and one of margin"
    assert not limit.is_pressed(at_hand, 100.0 + 2.01)


def test_without_a_margin_offline_work_uses_all_of_the_slack() -> None:
    steps = StepsConfig(limit="slack", max_stall_s=10.0, stall_share=1.0, ttft_margin=0.0, **ALL)
    limit = create_step_limit(steps, SloConfig(ttft_s=2.0, tpot_s=0.1))
    late = waiting(first_due_in_s=0.3, prefill_s=0.6)
    assert decode_limit_s(limit, late) == pytest.approx(0.3) == limit.limit_s(late)


def echo_limit() -> SlackLimit:
    """TTFT 2 s, TPOT 100 ms; no stall bounds anything."""
    steps = StepsConfig(limit="slack", max_stall_s=10.0, stall_share=1.0)
    return create_step_limit(steps, SloConfig(ttft_s=2.0, tpot_s=0.1))


@pytest.mark.parametrize(
    ("slack_s", "limit_s"), [(-0.1, -0.1), (0.05, 0.05), (0.1, 0.055), (0.55, 0.1)]
)
def test_online_decodes_get_ahead_until_a_step_takes_one_tpot(slack_s, limit_s):
    """Half of the TPOT at once, and a tenth of what is beyond."""
    assert echo_limit().limit_s(view(decode_due_s=100 + slack_s)) == pytest.approx(limit_s)


def test_for_a_first_token_that_would_be_late_decodes_may_fall_behind():
    """Half of the margin, 1 s, is where lateness begins."""
    limit = echo_limit()
    in_time, late = 101.6, 101.4
    for first_due_s, room_s in ((math.inf, 0.05), (in_time, 0.05), (late, 0.45)):
        waits = view(decode_due_s=100.05, first_due_s=first_due_s, prefill_s=1.0)
        assert limit.chunk_limit_s(waits) == pytest.approx(room_s)


@given(slack_s=st.floats(-1, 10), more_s=st.floats(0, 1))
def test_more_slack_is_never_less_time_and_never_more_than_there_is(slack_s, more_s):
    limit = echo_limit()
    less = limit.limit_s(view(decode_due_s=100 + slack_s))
    assert less <= slack_s + 1e-9
    assert less <= limit.limit_s(view(decode_due_s=100 + slack_s + more_s)) + 1e-9


@pytest.mark.parametrize(
    ("slack_s", "room_s"),
    [
        (0.3, 0.055),  # as a decode: 0.05 + a tenth of the rest, less what online decodes take
        (0.5, 0.08),  # all but 4 TPOTs
        (0.9, 0.48),
    ],
)
def test_a_step_that_only_prefills_takes_all_the_slack_but_what_is_kept_for_online_prefills(
    slack_s, room_s
):
    limit, ahead = echo_limit(), view(decode_due_s=100 + slack_s, alone_s=0.02)
    assert limit.prefill_room_s(ahead, limit.limit_s(ahead)) == pytest.approx(room_s)


def test_room_for_a_prefill_is_bounded_as_a_step_is():
    steps = StepsConfig(limit="slack", max_stall_s=0.3, stall_share=1.0, place_share=0.75)
    limit = create_step_limit(steps, SloConfig(ttft_s=2.0, tpot_s=0.1))
    for others, room_s in (
        ({}, 0.3),
        ({"first_due_s": 100.25}, 0.23),
        ({"places_ahead": 0.5}, 0.3),
        ({"places_ahead": 0.625}, 0.15),
        ({"places_ahead": 0.75}, 0.0),
    ):
        ahead = view(decode_due_s=110.0, alone_s=0.02, **others)
        assert limit.prefill_room_s(ahead, limit.limit_s(ahead)) == pytest.approx(room_s)


@pytest.mark.parametrize("name", ["slack", "relative", "budget", "off"])
@given(
    slack_s=st.floats(-1, 100),
    alone_s=st.floats(0, 2),
    stall_s=st.floats(0, 1),
    prefill_stall_s=st.floats(0, 1),
    is_present=st.booleans(),
)
def test_no_step_is_allowed_more_than_the_most_that_is_told(
    name, slack_s, alone_s, stall_s, prefill_stall_s, is_present
):
    slo = SloConfig(ttft_s=2.0, tpot_s=0.1)
    limit = create_step_limit(StepsConfig(limit=name, max_stall_s=1.0), slo)
    limit.stall_s = stall_s
    limit.prefill_stall_s = prefill_stall_s if name == "slack" else stall_s
    ahead = view(decode_due_s=100 + slack_s, alone_s=alone_s, is_present=is_present)
    limit_s = limit.limit_s(ahead)
    assert limit_s <= limit.most_s(ahead, decodes=True)
    assert limit.prefill_room_s(ahead, limit_s) <= limit.most_s(ahead, decodes=False) + 1e-9


def test_with_slack_for_more_the_most_is_what_a_step_may_take():
    limit = create_step_limit(StepsConfig(limit="slack"), SloConfig(ttft_s=2.0, tpot_s=0.1))
    limit.stall_s, limit.prefill_stall_s = 0.02, 0.05
    ahead = view(decode_due_s=200.0, alone_s=0.01)
    assert limit.limit_s(ahead) == limit.most_s(ahead, decodes=True) == pytest.approx(0.03)
    room_s = limit.prefill_room_s(ahead, limit.limit_s(ahead))
    assert room_s == pytest.approx(limit.most_s(ahead, decodes=False))


@given(slack_s=st.floats(-1, 10), more_s=st.floats(0, 1), alone_s=st.floats(0, 0.2))
def test_a_prefill_has_no_less_room_than_a_decode_step_and_never_more_than_there_is(
    slack_s, more_s, alone_s
):
    limit = echo_limit()
    ahead = view(decode_due_s=100 + slack_s, alone_s=alone_s)
    room_s = limit.prefill_room_s(ahead, limit.limit_s(ahead))
    assert limit.limit_s(ahead) - alone_s <= room_s + 1e-9
    assert room_s <= slack_s - alone_s + 1e-9
    further = view(decode_due_s=100 + slack_s + more_s, alone_s=alone_s)
    assert room_s <= limit.prefill_room_s(further, limit.limit_s(further)) + 1e-9


@pytest.mark.parametrize("name", ["relative", "budget", "off"])
def test_other_limits_hold_a_prefill_as_any_step(name):
    limit = create_step_limit(StepsConfig(limit=name), SloConfig())
    ahead = view(decode_due_s=110.0, alone_s=0.02)
    assert limit.prefill_room_s(ahead, 0.07) == pytest.approx(0.05)
