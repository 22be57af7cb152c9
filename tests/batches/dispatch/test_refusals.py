"""Which refusals are the line's own: those that no other line meets, not those of a full server."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque

import pytest

from echo_sgl.batches.dispatch.refusals import (
    FIRST_TRIES_PER_LATER_ONE,
    FORGET_S,
    LASTING_S,
    LEAST_LASTING_REFUSALS,
    MAX_OWN_REFUSALS,
    MAX_REASONS,
    LastingReasons,
    RefusalJudge,
    Tries,
)
from echo_sgl.batches.lines.replies import Reply

ENOUGH = FIRST_TRIES_PER_LATER_ONE


def answered(judge: RefusalJudge, num_lines: int, *, num_refused: int = 0) -> None:
    """So many other lines are sent and answered, each after so many refusals."""
    for _ in range(num_lines):
        line = Tries(num_refused=num_refused)
        judge.send(line, 0.0)
        judge.answer(line)


def refusal(message: str = "made up", status_code: int = 503) -> Reply:
    return Reply(status_code, {"error": {"message": message}})


def refused(
    judge: RefusalJudge, line: Tries, now_s: float = 0.0, reply: Reply | None = None
) -> bool:
    judge.send(line, now_s)
    return judge.refuse(line, reply or refusal(), now_s)


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
    judge.send(line, 0.0)
    answered(judge, 1000)
    assert judge.refuse(line, refusal(), 0.0)


def test_no_line_is_to_blame_while_all_are_refused() -> None:
    judge, lines = RefusalJudge(), [Tries() for _ in range(20)]
    answered(judge, 1000)
    for _ in range(100):
        assert not any(refused(judge, line) for line in lines)


def test_answers_to_what_a_server_had_before_it_filled_up_say_nothing() -> None:
    judge, line = RefusalJudge(), Tries()
    inside = [Tries() for _ in range(1000)]
    for one in inside:
        judge.send(one, 0.0)
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
        judge.send(line, 0.0)
        answered(judge, 100)
        assert not judge.refuse(line, refusal("Request waiting timeout reached."), 0.0)


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
            judge.send(lines[number], float(step))
            if rng.random() >= share:
                inside.append(number)
                continue
            judge.refuse(lines[number], refusal(), float(step))
            heapq.heappush(later, (step + 2 ** min(lines[number].num_refused, 6), number))
        elif inside:
            judge.answer(lines[inside.popleft()])
        elif not later:
            break
    assert not any(line.is_to_blame for line in lines)


PRIORITY = "Using priority is disabled for this server."
TRIES_S = [step * LASTING_S / LEAST_LASTING_REFUSALS for step in range(LEAST_LASTING_REFUSALS + 1)]


def test_a_line_alone_is_to_blame_once_its_reason_has_lasted() -> None:
    judge, line = RefusalJudge(), Tries()
    for now_s in TRIES_S[:-1]:
        assert not refused(judge, line, now_s, refusal(PRIORITY))
    assert refused(judge, line, TRIES_S[-1], refusal(PRIORITY))
    assert line.is_to_blame
    another = Tries()  # which is refused for the same need not wait as long
    assert refused(judge, another, TRIES_S[-1], refusal(PRIORITY))
    assert another.is_to_blame


def test_a_reason_lasts_for_the_time_and_for_the_number_of_refusals() -> None:
    judge, line = RefusalJudge(), Tries()
    for _ in range(100):
        assert not refused(judge, line, 0.0)
    judge, line = RefusalJudge(), Tries()
    judge.send(line, 0.0)
    for step in range(1, LEAST_LASTING_REFUSALS):  # as when it may not run for longer
        assert not judge.refuse(line, refusal(), step * LASTING_S)
        judge.send(line, step * LASTING_S)
    assert judge.refuse(line, refusal(), LEAST_LASTING_REFUSALS * LASTING_S)


@pytest.mark.parametrize(
    "reply",
    [
        refusal("Request waiting timeout reached."),
        refusal("The request queue is full."),
        refusal("The offline pool holds 7 requests, its limit is 7 (offline.max_pool_requests)."),
        refusal("The request is aborted by a higher priority request."),
        refusal("Too many requests", 429),
    ],
)
def test_what_passes_by_its_own_words_is_no_lines_fault_however_long_it_takes(reply: Reply) -> None:
    judge, line = RefusalJudge(), Tries()
    assert not any(refused(judge, line, 60.0 * step, reply) for step in range(1000))


def test_a_reason_has_passed_when_a_line_is_answered_that_was_refused_for_it() -> None:
    judge, line, early = RefusalJudge(), Tries(), Tries()
    refused(judge, early, 0.0, refusal("no host 17"))
    refused(judge, early, 0.0, refusal("another"))
    for now_s in TRIES_S[:-1]:
        assert not refused(judge, line, now_s, refusal("no host 4"))
    judge.answer(early)
    assert not refused(judge, line, TRIES_S[-1], refusal("no host 5"))


def test_a_reason_begins_anew_where_nothing_was_sent_for_a_while() -> None:
    judge, line = RefusalJudge(), Tries()
    for now_s in TRIES_S[:-1]:
        assert not refused(judge, line, now_s)
    later_s = TRIES_S[-2] + FORGET_S + 1.0
    assert not any(refused(judge, line, later_s + now_s) for now_s in TRIES_S[:-1])
    assert refused(judge, line, later_s + TRIES_S[-1])


def test_few_reasons_are_kept() -> None:
    reasons = LastingReasons()
    for number in range(10 * MAX_REASONS):
        reasons.meet(Tries(), "x" * number, 0.0)
    assert len(reasons._reasons) == MAX_REASONS
