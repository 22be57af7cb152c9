"""When the tokens of a request are due, and whether what was promised was kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.limits.step_limit import Promise

seconds = st.floats(0.001, 10.0)


def test_the_first_token_is_due_after_the_ttft():
    assert Promise(ttft_s=1.0, tpot_s=0.1).due_s(0, arrival_s=5.0, first_token_s=None) == 6.0


def test_later_tokens_are_due_a_tpot_apart():
    promise = Promise(ttft_s=1.0, tpot_s=0.1)
    assert promise.due_s(3, arrival_s=5.0, first_token_s=None) == pytest.approx(6.3)


def test_an_early_first_token_is_not_time_to_give_away():
    promise = Promise(ttft_s=1.0, tpot_s=0.1)
    assert promise.due_s(3, arrival_s=5.0, first_token_s=5.2) == pytest.approx(5.5)


def test_a_late_first_token_does_not_move_what_was_promised():
    promise = Promise(ttft_s=1.0, tpot_s=0.1)
    assert promise.due_s(3, arrival_s=5.0, first_token_s=9.0) == pytest.approx(6.3)


def test_without_promises_nothing_is_ever_due():
    for num_tokens in (0, 1, 1000):
        assert math.isinf(Promise().due_s(num_tokens, arrival_s=5.0, first_token_s=6.0))


@given(ttft_s=seconds, tpot_s=seconds, tokens=st.integers(1, 1000), early=st.floats(0, 1))
def test_a_request_whose_tokens_all_come_in_time_keeps_its_tpot(ttft_s, tpot_s, tokens, early):
    """The mean of the gaps, which is what users measure, is then at most what was promised."""
    promise, first_s = Promise(ttft_s, tpot_s), early * ttft_s
    last_s = promise.due_s(tokens, arrival_s=0.0, first_token_s=first_s)
    assert (last_s - first_s) / tokens <= tpot_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("num_tokens", "first_token_s", "end_s", "is_kept"),
    [
        (5, 6.0, 6.4, True),  # four gaps of a TPOT
        (5, 6.0, 6.41, False),
        (5, 5.1, 5.5, True),
        (5, 5.1, 5.9, False),  # an early first token is no time for the others
        (5, 6.01, 6.02, False),  # a late one is not made up for
        (2, 6.0, 6.1, True),
        (2, 6.0, 6.11, False),
        (1, 6.0, 9.0, True),  # one token has no gap
        (1, 6.01, 6.01, False),
    ],
)
def test_a_promise_is_kept_by_the_first_token_and_the_mean_gap(
    num_tokens, first_token_s, end_s, is_kept
):
    promise = Promise(ttft_s=1.0, tpot_s=0.1000001)
    facts = {"arrival_s": 5.0, "first_token_s": first_token_s, "end_s": end_s}
    assert promise.is_kept(num_tokens, **facts) is is_kept
    assert Promise().is_kept(num_tokens, **facts), "nothing was promised"


@given(ttft_s=seconds, tpot_s=seconds, tokens=st.integers(2, 1000), early=st.floats(0, 0.99))
def test_an_answer_whose_last_token_comes_when_it_is_due_has_kept_its_promise(
    ttft_s, tpot_s, tokens, early
):
    promise, first_s = Promise(ttft_s, tpot_s), early * ttft_s
    due_s = promise.due_s(tokens - 1, arrival_s=0.0, first_token_s=first_s)
    for share, is_kept in ((0.999, True), (1.001, False)):
        end_s = first_s + share * (due_s - first_s)
        facts = {"arrival_s": 0.0, "first_token_s": first_s, "end_s": end_s}
        assert promise.is_kept(tokens, **facts) is is_kept


def test_one_of_the_two_is_a_promise():
    assert Promise(ttft_s=1.0).is_any and Promise(tpot_s=0.1).is_any
    assert not Promise().is_any
