"""The order contract on every order, and what only the prefix order promises."""

from __future__ import annotations

import weakref
from array import array
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.offline_order import (
    FcfsOrder,
    OfflineOrder,
    PsmOrder,
    Walk,
    create_offline_order,
    uniform_draw,
)
from echo_sgl.policies.prefix_index import prefix_key
from echo_sgl.types import PendingRequest

ORDERS = {
    "fcfs": FcfsOrder,
    "psm": PsmOrder,
    "psm-fresh": lambda: PsmOrder(utility_ratio=0.5, seed=7),
    "psm-stalest-only": lambda: PsmOrder(utility_ratio=0.0),
    "deadlines-psm": lambda: DeadlineOrder(PsmOrder(utility_ratio=0.5, seed=7)),
    "deadlines-fcfs": lambda: DeadlineOrder(FcfsOrder()),
}


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> OfflineOrder:
    return ORDERS[request.param]()


def pending(sequence: int, prompt: list[int] | str = "", namespace: str = "") -> PendingRequest:
    tokens = [ord(character) for character in prompt] if isinstance(prompt, str) else prompt
    return PendingRequest(f"r{sequence}", array("q", tokens), sequence, namespace)


def drain(order: OfflineOrder) -> list[int]:
    taken = []
    while len(order):
        request = next(order.upcoming())
        order.take(request)
        taken.append(request.sequence)
    return taken


@given(st.permutations(range(6)))
def test_ages_go_by_sequence_in_whichever_order_requests_come(sequences):
    order = FcfsOrder()
    for sequence in sequences:
        order.add(pending(sequence))
    assert order.oldest().sequence == 0
    assert drain(order) == list(range(6))


@given(
    name=st.sampled_from(sorted(ORDERS)),
    prompts=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=40),
    actions=st.lists(st.tuples(st.sampled_from(["remove", "take", "return"]), st.integers(0, 99))),
)
def test_every_request_waits_exactly_once_until_it_is_taken_or_removed(name, prompts, actions):
    order = ORDERS[name]()
    waiting = {number: pending(number, prompt) for number, prompt in enumerate(prompts)}
    started: list[PendingRequest] = []
    removed: list[PendingRequest] = []
    resumed: set[int] = set()
    for request in waiting.values():
        order.add(request)
    for action, choice in actions:
        assert order.need("", array("q")).num_pending == len(waiting) + len(started)
        listed = [request.sequence for request in order.upcoming()]
        assert sorted(listed) == sorted(waiting)
        assert len(order) == len(waiting)
        oldest = order.oldest()
        assert (oldest.sequence if oldest else None) == min(waiting, default=None)
        if action == "return" and (gone := started or removed):
            if gone is started:
                order.end(started[-1])
            request = gone.pop()
            order.add(request, resumed=True)
            resumed.add(request.sequence)
            waiting[request.sequence] = request
        elif waiting and action != "return":
            request = waiting.pop(listed[choice % len(listed)])
            if action == "take":
                assert order.take(request) == (request.sequence in resumed)
                started.append(request)
            else:
                order.remove(request)
                removed.append(request)
    assert sorted(drain(order)) == sorted(waiting)


def test_the_same_request_cannot_wait_twice(order):
    order.add(pending(1, "a"))
    with pytest.raises(ValueError, match="already waiting"):
        order.add(pending(1, "a"))


def test_a_request_that_came_back_is_resumed_before_those_that_never_started(order):
    for number in range(1, 5):
        order.add(pending(number, "abcd"[:number]))
    order.add(pending(0, "z"), resumed=True)
    assert next(order.upcoming()).sequence == 0


def test_a_request_that_does_not_wait_cannot_be_removed(order):
    with pytest.raises(KeyError):
        order.remove(pending(3))


def test_fcfs_takes_requests_as_they_came():
    order = FcfsOrder()
    for number in (2, 0, 1):
        order.add(pending(number))
    assert drain(order) == [0, 1, 2]


def test_psm_groups_the_example_of_the_hygen_paper():
    order = PsmOrder()
    for number, prompt in enumerate(["What is ML", "How to code", "What is AI", "How to debug"]):
        order.add(pending(number, prompt))
    assert drain(order) == [1, 3, 2, 0]


def depth_first(prompts: dict[int, list[int]], depth: int = 0) -> list[int]:
    """Brute force: walk the prefix tree of the prompts, ended ones first, children by token."""
    ended = sorted(number for number, prompt in prompts.items() if len(prompt) == depth)
    walk = list(ended)
    for token in sorted({prompt[depth] for prompt in prompts.values() if len(prompt) > depth}):
        child = {n: p for n, p in prompts.items() if len(p) > depth and p[depth] == token}
        walk += depth_first(child, depth + 1)
    return walk


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=30))
def test_psm_is_the_depth_first_walk_of_the_prefix_tree(prompts):
    order = PsmOrder()
    numbered = dict(enumerate(prompts))
    for number, prompt in numbered.items():
        order.add(pending(number, prompt))
    assert drain(order) == depth_first(numbered)


def test_the_walk_goes_on_from_the_last_pick_when_newcomers_sort_before_it():
    order = PsmOrder()
    order.add(pending(0, "m1"))
    order.add(pending(1, "m2"))
    order.take(next(order.upcoming()))
    order.add(pending(2, "a"))
    order.add(pending(3, "m3"))
    assert drain(order) == [1, 3, 2]


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=2, max_size=20),
    places=st.lists(st.integers(0, 5), min_size=20, max_size=20),
)
def test_who_is_passed_over_is_next_in_line_whatever_was_taken(prompts, places):
    order, taken = PsmOrder(), set()
    for number, prompt in enumerate(prompts):
        order.add(pending(number, prompt))
    line = [one.sequence for one in order.upcoming()]
    for place in places[: len(prompts)]:
        listed = list(islice(order.upcoming(), 6))
        assert [one.sequence for one in listed] == [one for one in line if one not in taken][:6]
        picked = listed[place % len(listed)]
        order.take(picked)
        taken.add(picked.sequence)


def test_the_walk_stands_behind_what_was_taken_without_a_gap():
    order = PsmOrder()
    for number, prompt in enumerate(["m1", "m2", "m3"]):
        order.add(pending(number, prompt))
    first, second, third = list(order.upcoming())
    order.take(third)
    assert order.cursor is None
    order.take(first)
    assert order.cursor == prefix_key(first)
    order.take(second)
    assert order.cursor == prefix_key(third)


def test_a_rank_that_is_asked_who_is_in_line_stands_where_the_others_do():
    ranks, requests = [PsmOrder(), PsmOrder()], [pending(number, [number]) for number in range(40)]
    for rank in ranks:
        for request in requests:
            rank.add(request)
    assert list(ranks[0].upcoming(looks_only=True)) == requests
    for rank in ranks:
        assert next(rank.upcoming()) is requests[0]
        # Farther away than an offer looks: who remembers it goes past it, and others stop before.
        rank.take(requests[Walk.NUM_AHEAD + 4], is_aside=True)
    for expected in requests[: Walk.NUM_AHEAD + 4]:
        for rank in ranks:
            rank.take(next(rank.upcoming()))
            assert rank.cursor == prefix_key(expected)


def test_the_walk_lists_who_comes_between_those_it_had_seen():
    order = PsmOrder()
    for number, prompt in enumerate(["m1", "m3", "m5"]):
        order.add(pending(number, prompt))
    assert [one.sequence for one in order.upcoming()] == [0, 1, 2]
    order.add(pending(3, "m2"))
    assert drain(order) == [0, 3, 1, 2]


class Traced(PendingRequest):
    __slots__ = ("__weakref__",)


def test_who_ended_is_forgotten_even_while_the_first_in_line_is_passed_over():
    order, left = PsmOrder(), []
    for number in range(1000):
        order.add(Traced(f"r{number}", array("q", [number]), number, ""))
    for _ in range(999):
        passed_over, request = islice(order.upcoming(), 2)
        assert passed_over.sequence == 0
        order.take(request)
        order.end(request)
        left.append(weakref.ref(request))
    del request
    assert sum(one() is not None for one in left) <= Walk.MOST_AHEAD + Walk.NUM_AHEAD


def test_namespaces_do_not_interleave():
    order = PsmOrder()
    for number, namespace in enumerate(["b", "a", "b", "a"]):
        order.add(pending(number, "same prompt", namespace))
    assert drain(order) == [1, 3, 0, 2]


def test_a_pick_by_age_leaves_the_walk_where_it_was():
    by_age = [False, True, False]
    seed = next(s for s in range(999) if [uniform_draw(s, i) >= 0.5 for i in range(3)] == by_age)
    order = PsmOrder(utility_ratio=0.5, seed=seed)
    for number, prompt in enumerate(["m", "b1", "b2", "z"]):
        order.add(pending(number, prompt))
    assert drain(order)[:3] == [1, 0, 2]


@given(utility_ratio=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_two_ranks_with_the_same_seed_agree(utility_ratio, seed):
    ranks = [PsmOrder(utility_ratio=utility_ratio, seed=seed) for _ in range(2)]
    for rank in ranks:
        for number in range(30):
            rank.add(pending(number, [number * 7 % 5, number % 3]))
    # One rank looks ahead, the other does not: looking must not change what is picked.
    list(islice(ranks[0].upcoming(), 10))
    assert drain(ranks[0]) == drain(ranks[1])


def test_a_starved_prefix_is_reached_in_proportion_to_the_utility_ratio():
    order = PsmOrder(utility_ratio=0.9, seed=1)
    order.add(pending(0, "zzz"))
    for number in range(1, 200):
        order.add(pending(number, f"a{number:03d}"))
    assert drain(order).index(0) < 60


def test_draws_are_splitmix64s():
    """The first outputs of the published generator with seed 0, as fractions of 2 ** 64."""
    published = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F
    draws = [uniform_draw(0, index) for index in range(3)]
    assert draws == pytest.approx([one / 2**64 for one in published], abs=2**-52)


def test_draws_are_uniform_enough():
    draws = [uniform_draw(3, index) for index in range(10_000)]
    assert 0.48 < sum(draws) / len(draws) < 0.52
    assert all(0.0 <= draw < 1.0 for draw in draws)
    assert 800 < sum(draw < 0.1 for draw in draws) < 1200


def test_an_unknown_order_is_refused_by_name():
    with pytest.raises(ValueError, match="'lifo'; known are psm, fcfs"):
        create_offline_order("lifo", utility_ratio=1.0, seed=0)
