"""What simulated jobs have left, by the answers that ended so far."""

from __future__ import annotations

import math
from array import array

from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.offline_order import FcfsOrder
from echo_sgl.sim.offline_pool import SimOfflinePool
from echo_sgl.sim.workload import SimRequest
from echo_sgl.types import Task

DEADLINE_S = 1000.0


def line(number: int, *, num_outputs: int = 0) -> SimRequest:
    """100 tokens of prompt, an answer of at most 4,000."""
    request = SimRequest(
        number,
        Task.OFFLINE,
        0.0,
        prompt_tokens=100,
        blocks=array("q", [number]),
        sizes=array("q", [100]),
        max_new_tokens=4000,
        deadline_s=DEADLINE_S,
    )
    request.outputs_at_join = num_outputs
    return request


def test_what_waits_follows_the_answers_that_end_after_it_came() -> None:
    order = DeadlineOrder(FcfsOrder())
    pool = SimOfflinePool(order)
    lines = [line(number) for number in range(6)]
    for one in lines:
        pool.add(one, resumed=False)
    assert order.book.work_until(DEADLINE_S, 0.0) == 6 * 4100
    for one, num_outputs in zip(lines[:3], (1, 40, 19), strict=True):
        pool.take(one)
        one.outputs_at_join = num_outputs
        pool.end(one)
    pool.advance(0.0, list)
    assert order.book.work_until(DEADLINE_S, 0.0) == 3 * (100 + 20)


def test_a_job_of_short_answers_is_not_late_by_what_it_was_allowed() -> None:
    """100 tokens a second: 50 lines of 110 tokens take 55 seconds, not 2,050."""
    pool = SimOfflinePool(DeadlineOrder(FcfsOrder()))
    lines = [line(number) for number in range(60)]
    for one in lines:
        pool.add(one, resumed=False)
    was_late = []
    for second, one in enumerate(lines[:10], start=1):
        pool.take(one)
        one.outputs_at_join = 10
        one.computed_tokens = 100
        pool.end(one)
        pool.advance(1.1 * second, list)
        was_late.append(pool.is_late)
    assert not any(was_late)
    assert 900.0 < pool.laxity_s(lines[-1], 11.0) < math.inf
