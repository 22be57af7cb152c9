"""Urgent work ahead of another order; the order contract itself is in `test_offline_order`."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.cache.eviction_order import LeafFacts, create_eviction_order
from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.offline_order import FcfsOrder, OfflineOrder, PsmOrder
from echo_sgl.types import PendingRequest, Work


def pending(
    sequence: int, prompt: str, deadline_s: float | None = None, work: int = 10
) -> PendingRequest:
    return PendingRequest(f"r{sequence}", tokens(prompt), sequence, "", deadline_s, Work(work))


def tokens(prompt: str) -> array[int]:
    return array("q", map(ord, prompt))


def order_of(*requests: PendingRequest, other: OfflineOrder | None = None) -> DeadlineOrder:
    order = DeadlineOrder(other or PsmOrder())
    for request in requests:
        order.add(request)
    return order


def listed(order: OfflineOrder) -> list[int]:
    return [request.sequence for request in order.upcoming()]


def take_next(order: OfflineOrder) -> PendingRequest:
    request = next(order.upcoming())
    order.take(request)
    return request


any_requests = st.lists(
    st.tuples(st.text("abc", max_size=4), st.sampled_from([None, 10.0, 20.0, 30.0])), max_size=20
).map(lambda facts: [pending(number, *one) for number, one in enumerate(facts)])
others = st.sampled_from([FcfsOrder, PsmOrder, lambda: PsmOrder(utility_ratio=0.5, seed=3)])
clocks = st.sampled_from([0.0, 5.0, 15.0, 25.0, 99.0])


@given(any_requests, others, clocks, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 19))))
def test_every_request_is_listed_once_whatever_is_urgent(requests, other, now_s, actions):
    order = order_of(*requests, other=other())
    waiting = {request.sequence: request for request in requests}
    gone: list[PendingRequest] = []
    resumed: set[int] = set()
    for action, choice in actions:
        order.escalate(now_s + choice, rate_tokens_per_s=1.0)
        assert sorted(listed(order)) == sorted(waiting)
        assert len(order) == len(waiting)
        if action == 2 and gone:
            order.add(request := gone.pop(), resumed=True)
            waiting[request.sequence] = request
            resumed.add(request.sequence)
        elif waiting:
            request = waiting.pop(listed(order)[choice % len(waiting)])
            if action:
                order.take(request)
                order.end(request)
            else:
                order.remove(request)
            gone.append(request)
    due = [number for number, one in waiting.items() if one.deadline_s is not None]
    assert len(order.book) == len(set(due) - resumed)


@given(any_requests, clocks)
def test_urgent_comes_first_then_overdue_then_the_other_order(requests, now_s):
    order, other = order_of(*requests), PsmOrder()
    for request in requests:
        other.add(request)
    urgent_s = order.escalate(now_s, rate_tokens_per_s=1.0)
    rank = {None: 2, urgent_s: 0} if urgent_s else {}
    by_number = {request.sequence: request for request in requests}

    def rank_of(sequence: int) -> int:
        deadline_s = by_number[sequence].deadline_s
        overdue = 1 if deadline_s is not None and deadline_s <= now_s else 2
        return rank.get(deadline_s, overdue)

    ranks = [rank_of(sequence) for sequence in listed(order)]
    assert ranks == sorted(ranks)
    behind = [sequence for sequence in listed(order) if rank_of(sequence) == 2]
    assert behind == [sequence for sequence in listed(other) if rank_of(sequence) == 2]


@given(any_requests, clocks, st.text("abc", min_size=1, max_size=4), st.integers(0, 3))
def test_need_is_exact_when_it_is_asked(requests, now_s, prefix, num_resumed):
    order, plain = order_of(*requests), PsmOrder()
    for request in requests:
        plain.add(request)
    resumed = requests[:num_resumed]
    for request, one in itertools.product(resumed, (order, plain)):
        one.take(request)
        one.end(request)
        one.add(request, resumed=True)
    urgent_s = order.escalate(now_s, rate_tokens_per_s=1.0)
    need, plain_need = (one.need("", tokens(prefix)) for one in (order, plain))
    assert (need.num_pending, need.walk_key) == (plain_need.num_pending, plain_need.walk_key)
    through = [one for one in requests if one.prompt[: len(prefix)] == tokens(prefix)]
    ahead = [
        one
        for one in through
        if one not in resumed and one.deadline_s is not None
        if one.deadline_s == urgent_s or one.deadline_s <= now_s
    ]
    assert need.is_next == (bool(ahead) or any(one in resumed for one in through))


def test_urgent_work_is_taken_in_prefix_order_from_where_the_walk_stands():
    order = order_of(pending(0, "m"), pending(1, "z"))
    take_next(order)
    for number, prompt in enumerate(["p2", "a", "p1", "n"], start=2):
        order.add(pending(number, prompt, deadline_s=30.0))
    order.escalate(0.0, rate_tokens_per_s=1.0)
    assert listed(order) == [5, 4, 2, 3, 1]


def test_the_urgent_walk_goes_on_from_its_own_last_pick_and_starts_anew_the_next_time():
    order = order_of(pending(0, "m"))
    for number, prompt in enumerate(["p", "q"], start=1):
        order.add(pending(number, prompt, deadline_s=30.0))
    order.escalate(20.0, rate_tokens_per_s=1.0)
    assert take_next(order).sequence == 1
    order.add(pending(3, "a", deadline_s=30.0))
    assert listed(order) == [2, 3, 0]
    order.escalate(20.0, rate_tokens_per_s=1000.0)
    order.escalate(20.0, rate_tokens_per_s=1.0)
    assert listed(order) == [3, 2, 0]


def test_urgent_work_that_was_passed_over_is_next_in_line():
    order = order_of(pending(0, "m"))
    for number, prompt in enumerate(["p", "q", "r"], start=1):
        order.add(pending(number, prompt, deadline_s=30.0))
    order.escalate(20.0, rate_tokens_per_s=1.0)
    first, second, *_ = order.upcoming()
    order.take(second)
    assert listed(order) == [1, 3, 0]
    order.take(first)
    order.add(pending(4, "a", deadline_s=30.0))
    assert listed(order) == [3, 4, 0]


def test_the_walk_goes_on_where_it_was_when_nothing_is_urgent_any_more():
    order = order_of(pending(0, "m1"), pending(1, "m2"), pending(2, "a"))
    assert take_next(order).sequence == 2 and take_next(order).sequence == 0
    cursor = order.cursor
    order.add(pending(3, "zz", deadline_s=5.0))
    assert order.escalate(0.0, rate_tokens_per_s=1.0) == 5.0
    assert take_next(order).sequence == 3
    assert order.cursor == cursor
    assert order.escalate(0.0, rate_tokens_per_s=1.0) == 5.0, "it runs, and would be late"
    order.book.set_running({})
    assert order.escalate(0.0, rate_tokens_per_s=1.0) is None
    order.add(pending(4, "b"))
    assert listed(order) == [1, 4]


def test_a_deadline_is_urgent_though_all_that_is_due_runs_or_is_to_go_on():
    order = order_of(late := pending(0, "a", deadline_s=5.0))
    order.take(late)
    assert order.escalate(0.0, rate_tokens_per_s=1.0) == 5.0
    other = order_of(late)
    other.take(late)
    other.add(late, resumed=True)
    assert other.escalate(0.0, rate_tokens_per_s=1.0) == 5.0


def test_what_was_urgent_and_next_anyway_leaves_the_walk_where_it_was():
    """Who comes between the two is next, and not a whole walk later."""
    order = order_of(pending(0, "m1"), pending(1, "m5", deadline_s=5.0), pending(2, "z"))
    order.escalate(0.0, rate_tokens_per_s=1000.0)
    assert listed(order) == [0, 1, 2] and take_next(order).sequence == 0
    assert order.escalate(0.0, rate_tokens_per_s=1.0) == 5.0
    assert take_next(order).sequence == 1
    order.book.set_running({})
    assert order.escalate(0.0, rate_tokens_per_s=1.0) is None
    order.add(pending(3, "m3"))
    assert listed(order) == [3, 2]


def test_what_came_back_is_resumed_before_urgent_work():
    order = order_of(pending(0, "a"), pending(1, "b", deadline_s=5.0))
    order.take(back := pending(0, "a"))
    order.add(back, resumed=True)
    order.escalate(0.0, rate_tokens_per_s=1.0)
    assert listed(order) == [0, 1]


def test_urgent_work_goes_before_overdue_work_and_that_before_the_rest():
    order = order_of(
        pending(0, "a"),
        pending(1, "b", deadline_s=10.0),
        pending(2, "c", deadline_s=60.0, work=45),
        pending(3, "d", deadline_s=900.0),
    )
    order.escalate(0.0, rate_tokens_per_s=5.0)
    assert listed(order) == [0, 1, 2, 3]
    order.escalate(20.0, rate_tokens_per_s=5.0)
    assert listed(order) == [1, 0, 2, 3]
    order.escalate(20.0, rate_tokens_per_s=1.0)
    assert listed(order) == [2, 1, 0, 3]


def test_what_is_urgent_stays_so_until_there_is_some_more_time():
    order = order_of(*(pending(number, f"u{number}", deadline_s=100.0) for number in range(5)))
    at_the_limit_s = 100.0 - 50 * 1.2
    assert order.escalate(at_the_limit_s - 1, rate_tokens_per_s=1.0) is None
    assert order.escalate(at_the_limit_s + 1, rate_tokens_per_s=1.0) == 100.0
    assert order.escalate(at_the_limit_s - 1, rate_tokens_per_s=1.0) == 100.0
    assert order.escalate(at_the_limit_s - 6, rate_tokens_per_s=1.0) is None


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 25)), min_size=1, max_size=4),
    st.integers(0, 30),
)
def test_jobs_that_leave_enough_time_are_in_time_whatever_else_waits(jobs, num_overdue):
    """One request a second; each job leaves a fifth more time than all work until then needs."""
    requests = [pending(number, f"x{number:03}") for number in range(100)]
    requests += [pending(100 + one, f"w{one}", deadline_s=-1.0) for one in range(num_overdue)]
    deadline_s, num_due = 0.0, 0
    for num_requests, spare_s in jobs:
        numbers = range(1000 + num_due, 1000 + num_due + num_requests)
        num_due += num_requests
        deadline_s = max(deadline_s, num_due * 1.2) + 1 + spare_s
        requests += [pending(number, f"a{number}", deadline_s) for number in numbers]
    order, now_s = order_of(*requests), 0.0
    while len(order):
        order.book.set_running({})
        order.escalate(now_s, rate_tokens_per_s=10.0)
        request = take_next(order)
        now_s += 1.0
        if request.deadline_s is not None and request.deadline_s > 0:
            # A request is not interrupted, so one that had just begun may be in the way.
            assert now_s <= request.deadline_s + 1.0


def test_next_use_eviction_keeps_what_urgent_work_needs_longest():
    order = order_of(pending(0, "a"), pending(1, "b"), pending(2, "z", deadline_s=5.0))
    eviction = create_eviction_order("next-use", cursor=lambda: order.cursor)

    def put(leaf: int, prompt: str) -> None:
        need = order.need("", tokens(prompt))
        eviction.put(
            LeafFacts(
                leaf,
                last_access=0.0,
                num_pending=need.num_pending,
                walk_key=need.walk_key,
                is_next=need.is_next,
            )
        )

    for leaf, prompt in enumerate("abz"):
        put(leaf, prompt)
    assert list(eviction.victims()) == [2, 1, 0]
    order.escalate(0.0, rate_tokens_per_s=1.0)
    put(2, "z")
    assert list(eviction.victims()) == [1, 0, 2]


def test_a_deadline_that_never_comes_is_none():
    order = order_of(pending(0, "a", deadline_s=float("inf")))
    assert len(order.book) == 0
    order.remove(take := next(order.upcoming()))
    assert take.sequence == 0 and len(order) == 0


def test_less_safety_than_one_is_refused():
    with pytest.raises(ValueError, match=r"safety is 0.9"):
        DeadlineOrder(FcfsOrder(), safety=0.9)
