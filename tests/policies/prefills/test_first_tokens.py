"""Which online requests that wait are prefilled in one step, and which in the next."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape
from echo_sgl.config import SloConfig
from echo_sgl.policies.prefills.first_tokens import Joining, starts_later, waits_for_prefix
from tests.policies.plans import NOW_S, Clockwork, Unknown, begin, planner

# 1 ms a token, see `Clockwork`.
FIRST_TOKENS, SECOND_TOKENS = 30, 50
tokens = st.integers(1, 200)
seconds = st.floats(-0.1, 0.5)


def step(*prompts: int) -> BatchShape:
    shape = BatchShape()
    for new_tokens in prompts:
        shape.add_prefill(new_tokens)
    return shape


def waits(first_in_s: float, second_in_s: float, *, between_s: float = 0.0) -> bool:
    """Whether the second one waits; alone they take 30 and 50 ms, together 80."""
    return starts_later(
        Clockwork(),
        step(FIRST_TOKENS),
        Joining(SECOND_TOKENS, 0, NOW_S + second_in_s),
        now_s=NOW_S,
        first_due_s=NOW_S + first_in_s,
        between_s=between_s,
    )


@pytest.mark.parametrize(
    ("first_in_s", "second_in_s", "is_later"),
    [
        (0.081, 0.5, False),  # both are in time in one step
        (0.079, 0.5, True),  # the first one would be late, and neither is apart
        (0.031, 0.081, True),
        (0.029, 0.5, False),  # the first one is late in any case
        (0.05, 0.079, True),  # the second one is
    ],
)
def test_who_would_make_another_late_starts_a_step_later(first_in_s, second_in_s, is_later):
    assert waits(first_in_s, second_in_s) is is_later


def test_nobody_is_made_late_for_another():
    """Online decodes go between the two steps: 10 ms of 95, and of 85 that are too few."""
    assert waits(0.05, 0.095, between_s=0.01)
    assert not waits(0.05, 0.085, between_s=0.01)


@given(st.lists(tokens, min_size=1, max_size=4), tokens, seconds, seconds, st.floats(0.0, 0.1))
def test_whoever_waits_saves_a_first_token_and_loses_none(
    prompts, new_tokens, first_in_s, own_in_s, between_s
):
    shape = step(*prompts)
    before = shape.row()
    joining = Joining(new_tokens, 0, NOW_S + own_in_s)
    is_later = starts_later(
        Clockwork(),
        shape,
        joining,
        now_s=NOW_S,
        first_due_s=NOW_S + first_in_s,
        between_s=between_s,
    )
    assert shape.row() == before
    if is_later:
        apart_s, own_s = 0.001 * sum(prompts), 0.001 * new_tokens
        assert NOW_S + apart_s <= NOW_S + first_in_s < NOW_S + apart_s + own_s + 1e-9
        in_time_together = NOW_S + apart_s + own_s <= joining.due_s
        assert NOW_S + apart_s + between_s + own_s <= joining.due_s or not in_time_together


def asked(
    estimator=None, *, places=0, slo=None, due_in_s=50.0, first_due_in_s=0.05, **steps
) -> bool:
    """What a planner says of two that wait beside `places` online decodes, with 80 ms for both."""
    plan = planner(estimator, slo=slo, **steps)
    begin(plan, decodes=places, due_in_s=due_in_s, first_due_in_s=first_due_in_s, waiting=2)
    joining = Joining(SECOND_TOKENS, 0, NOW_S + 5.0)
    first_due_s = NOW_S + first_due_in_s
    return plan.online_starts_later(step(FIRST_TOKENS), joining, first_due_s=first_due_s)


@pytest.mark.parametrize(
    ("steps", "is_later"),
    [
        ({}, True),
        ({"split_online": False}, False),
        ({"ttft_margin": 0.0}, False),  # all as in Echo
        ({"limit": "relative"}, False),
        ({"limit": "budget"}, False),
        ({"limit": "off"}, False),
        ({"estimator": Unknown()}, False),
        ({"places": 20, "place_share": 0.5}, True),
        # Without offline work there is nothing to make up for, and places are what lacks.
        ({"places": 30, "place_share": 0.5}, False),
        ({"places": 30, "place_share": 0.0}, True),
    ],
)
def test_it_is_a_matter_of_slack_and_of_places(steps, is_later):
    assert asked(**{"place_trend_s": 0.0, **steps}) is is_later


@pytest.mark.parametrize("split_online", [True, False])
@pytest.mark.parametrize("pack", [True, False])
def test_for_a_decode_that_is_due_they_start_apart_only_where_they_are_packed(pack, split_online):
    due = {"places": 2, "due_in_s": 0.05, "first_due_in_s": 0.5}
    assert asked(pack=pack, split_online=split_online, **due) is pack


def test_where_nobody_is_promised_a_first_token_all_start_together():
    plan = begin(planner(slo=SloConfig(tpot_s=0.1)), waiting=2)
    joining = Joining(SECOND_TOKENS, 0, NOW_S)
    assert not plan.online_starts_later(step(FIRST_TOKENS), joining, first_due_s=math.inf)


@pytest.mark.parametrize(
    ("shared_tokens", "between_s", "waits"),
    [
        (20, 0.0199, True),  # 30 and 30 ms apart, 80 together
        (20, 0.0201, False),  # decodes between the two take what it saves
        (49, 0.0489, True),
    ],
)
def test_who_begins_like_another_waits_where_it_ends_no_later(shared_tokens, between_s, waits):
    shape = step(FIRST_TOKENS)
    before = shape.row()
    asked_s = {"shared_tokens": shared_tokens, "between_s": between_s}
    joining = Joining(SECOND_TOKENS, 0, NOW_S)
    assert waits_for_prefix(Clockwork(), shape, joining, **asked_s) is waits
    assert shape.row() == before


class Attentive(Clockwork):
    """10 ms a step, and 10 us for each pair of a new token and one before it."""

    def predict_s(self, step):
        return 0.010 + 1e-5 * step.prefill_area


def test_what_is_shared_is_still_attended_to():
    """A hundred tokens behind 900: 190,000 pairs, 1.9 s, of the million that they are together."""
    shape, joining = step(1000), Joining(1000, 0, NOW_S)
    alone_s, together_s, own_s = 10.01, 20.01, 1.91
    spare_s = together_s - alone_s - own_s
    for between_s, waits in ((spare_s - 0.001, True), (spare_s + 0.001, False)):
        asked_s = {"shared_tokens": 900, "between_s": between_s}
        assert waits_for_prefix(Attentive(), shape, joining, **asked_s) is waits


@pytest.mark.parametrize(
    ("steps", "waits"),
    [
        ({}, True),
        ({"shared_tokens": 0}, False),
        ({"places": 3}, False),  # they decode between the two, for 30 ms
        ({"places": 1}, True),
        ({"split_online": False}, False),
        ({"ttft_margin": 0.0}, False),
        ({"slo": SloConfig(), "limit": "relative"}, True),
        ({"slo": SloConfig(), "limit": "relative", "split_online": False}, False),
        ({"limit": "budget"}, False),
        ({"limit": "off"}, False),
        ({"estimator": Unknown()}, False),
    ],
)
def test_echo_computes_what_online_requests_share_once(steps, waits):
    steps = {"shared_tokens": 20, "places": 0, "estimator": None, "slo": None, **steps}
    shared_tokens, places = steps.pop("shared_tokens"), steps.pop("places")
    plan = planner(steps.pop("estimator"), slo=steps.pop("slo"), **steps)
    begin(plan, decodes=places, due_in_s=50.0, waiting=2)
    joining = Joining(SECOND_TOKENS, 0, NOW_S + 5.0)
    assert plan.online_waits_for_prefix(step(FIRST_TOKENS), joining, shared_tokens) is waits
