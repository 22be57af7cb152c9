"""The mean of answers, and sums that follow it, against brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.order.answer_lengths import LEAST_WEIGHT, AnswerLengths, ExpectedAnswers

lengths = st.integers(0, 1000) | st.sampled_from([1, 10**6, 2**30])


def mean_of(*answers: int) -> AnswerLengths:
    mean = AnswerLengths()
    for num_tokens in answers:
        mean.note(num_tokens)
    return mean


def test_nothing_is_expected_before_an_answer_has_ended():
    assert mean_of().expected_tokens is None
    assert mean_of(0).expected_tokens == 0


@given(st.lists(lengths, min_size=1, max_size=round(1 / LEAST_WEIGHT)))
def test_the_first_answers_weigh_alike_in_whatever_order_they_end(answers):
    mean = sum(answers) / len(answers)
    for order in (answers, answers[::-1]):
        assert mean_of(*order).expected_tokens == pytest.approx(mean, rel=1e-9, abs=1.001)


def test_one_odd_answer_at_the_start_is_soon_one_of_many():
    for odd in (1, 2000):
        assert 100 <= mean_of(odd, *[200] * 49).expected_tokens <= 240


def test_after_many_answers_it_follows_the_newer_ones():
    mean = mean_of(*[100] * 5000)
    assert mean.expected_tokens == 100
    for _ in range(150):
        mean.note(300)
    assert 285 <= mean.expected_tokens <= 300


@given(st.lists(lengths, max_size=300))
def test_it_is_never_outside_of_what_was_seen(answers):
    mean = AnswerLengths()
    for number, num_tokens in enumerate(answers, start=1):
        mean.note(num_tokens)
        seen = answers[:number]
        assert min(seen) <= mean.expected_tokens <= max(seen) + 1


actions = st.lists(st.tuples(st.sampled_from(["add", "remove", "total"]), lengths), max_size=60)


@given(actions)
def test_the_sum_is_that_of_each_answer_whatever_came_before(actions):
    answers, limits = ExpectedAnswers(), []
    for action, number in actions:
        if action == "add":
            answers.add(number)
            limits.append(number)
        elif action == "remove" and limits:
            answers.remove(limits.pop(number % len(limits)))
        assert answers.total(number) == sum(min(number, limit) for limit in limits)
        assert answers.total(None) == sum(limits)


def test_a_limit_that_nobody_has_is_not_removed():
    answers = ExpectedAnswers()
    answers.add(5)
    with pytest.raises(KeyError):
        answers.remove(6)
    answers.remove(5)
    with pytest.raises(KeyError):
        answers.remove(5)
    assert answers.total(9) == 0


def test_50_000_answers_cost_only_the_limits_that_are_passed():
    """As many as have no `max_tokens`: each may be as long as its context allows."""
    answers, passed = ExpectedAnswers(), []
    limits_between = answers._num_by_limit.irange

    def noted(*bounds, **options):
        for limit_tokens in limits_between(*bounds, **options):
            passed.append(limit_tokens)
            yield limit_tokens

    answers._num_by_limit.irange = noted
    for number in range(50_000):
        answers.add(100_000 + number)
    for expected_tokens in (300, 290, 5_000, 301, 302):
        assert answers.total(expected_tokens) == 50_000 * expected_tokens
    assert not passed
    assert answers.total(100_002) == 100_000 + 100_001 + 49_998 * 100_002
    assert passed == [100_000, 100_001, 100_002]
    assert answers.total(math.floor(1e9)) == sum(range(100_000, 150_000))
