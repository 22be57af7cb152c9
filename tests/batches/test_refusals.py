"""Which refusals are the line's own: those that no other line meets, not those of a full server."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque

import pytest

from echo_sgl.batches.refusals import (
    FIRST_TRIES_PER_LATER_ONE,
    MAX_OWN_REFUSALS,
    RefusalJudge,
    Tries,
)

ENOUGH = FIRST_TRIES_PER_LATER_ONE


def answered(judge: RefusalJudge, num_lines: int, *, num_refused: int = 0) -> None:
    """So many other lines are sent and answered, each after so many refusals."""
    for _ in range(num_lines):
        line = Tries(num_refused=num_refused)
        judge.send(line)
        judge.answer(line)


def refused(judge: RefusalJudge, line: Tries) -> bool:
    judge.send(line)
    return judge.refuse(line)


def test_a_line_that_is_refused_each_time_while_others_are_answered_is_to_blame() -> None:
    judge, line = RefusalJudge(), Tries()
    assert not refused(judge, line)
    for _ in range(MAX_OWN_REFUSALS + 1):
        assert not line.is_to_blame
        answered(judge, ENOUGH - 1)
        assert not refused(judge, line)
        answered(judge, 1)
        assert refused(judge, line)
    assert line.is_to_blame


def test_a_line_that_is_given_up_while_later_ones_are_answered_is_refused_on_its_own() -> None:
    judge, line = RefusalJudge(), Tries()
    judge.send(line)
    answered(judge, 1000)
    assert judge.refuse(line)


def test_no_line_is_to_blame_while_all_are_refused() -> None:
    judge, lines = RefusalJudge(), [Tries() for _ in range(20)]
    answered(judge, 1000)
    for _ in range(100):
        assert not any(refused(judge, line) for line in lines)


def test_answers_to_what_a_server_had_before_it_filled_up_say_nothing() -> None:
    judge, line = RefusalJudge(), Tries()
    inside = [Tries() for _ in range(1000)]
    for one in inside:
        judge.send(one)
    for one in inside:
        assert not refused(judge, line)
        judge.answer(one)


def test_lines_that_are_taken_later_show_that_the_server_is_full_for_a_while() -> None:
    judge, line = RefusalJudge(), Tries()
    refused(judge, line)
    for _ in range(100):
        answered(judge, 1, num_refused=3)
        answered(judge, ENOUGH)
        assert not refused(judge, line)


def test_a_line_that_has_waited_for_too_long_is_never_to_blame() -> None:
    judge, line = RefusalJudge(), Tries()
    for _ in range(100):
        judge.send(line)
        answered(judge, 100)
        assert not judge.refuse(line, says_full=True)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("num_together", [1, 3, 50])
def test_lines_of_a_server_that_refuses_some_at_random_are_never_to_blame(
    share: float, num_together: int
) -> None:
    judge, rng, lines = RefusalJudge(), random.Random(7), [Tries() for _ in range(2000)]
    waiting, inside = deque(range(len(lines))), deque[int]()
    later: list[tuple[int, int]] = []  # when each comes again, a heap
    for step in itertools.count():
        while later and later[0][0] <= step:
            waiting.appendleft(heapq.heappop(later)[1])
        if waiting and len(inside) < num_together:
            number = waiting.popleft()
            judge.send(lines[number])
            if rng.random() >= share:
                inside.append(number)
                continue
            judge.refuse(lines[number])
            heapq.heappush(later, (step + 2 ** min(lines[number].num_refused, 6), number))
        elif inside:
            judge.answer(lines[inside.popleft()])
        elif not later:
            break
    assert not any(line.is_to_blame for line in lines)
