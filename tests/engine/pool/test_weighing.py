"""Who of the first in line is prefilled next, on a real tree."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from echo_sgl.engine.pool.deadlines import DeadlineWatch
from echo_sgl.engine.pool.weighing import MAX_PASSED_OVER, Weighing
from echo_sgl.policies.cache.eviction_order import LeafFacts
from echo_sgl.policies.order.candidates import mean_bucket
from echo_sgl.policies.order.deadline_order import DeadlineOrder
from echo_sgl.policies.order.offline_order import FcfsOrder
from tests.policies.plans import Clockwork


class Core:
    """What the tree knows, given."""

    def __init__(self, cached, victims=()):
        self._cached, self._victims = cached, victims

    def cached_tokens(self, req, prompt):
        return self._cached.get(req.rid, 0)

    def next_victims(self):
        return iter(self._victims)


def request(rid, num_tokens=100):
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=array("q", range(num_tokens)),
        output_ids=array("q"),
        seqlen=num_tokens,
        sampling_params=SimpleNamespace(custom_params=None, max_new_tokens=10),
        echo_terms=SimpleNamespace(deadline_s=float("inf")),
    )


def weighing(cached, num_candidates=4, *, victims=(), free_tokens=10_000):
    return Weighing(
        Core(cached, victims),
        SimpleNamespace(available_size=lambda: free_tokens),
        DeadlineWatch(DeadlineOrder(FcfsOrder())),
        num_candidates,
    )


def reordered(requests, cached, *, num_candidates=4, bucket=None, **memory):
    weigher = weighing(cached, num_candidates, **memory)
    return [req.rid for req in weigher.reorder(requests, Clockwork(), bucket, now_s=0.0)]


def test_a_cached_prompt_goes_before_one_that_is_not():
    assert reordered([request("a"), request("b")], {"b": 90}) == ["b", "a"]


def test_equal_ones_keep_their_order():
    requests = [request(rid) for rid in "abcd"]
    assert reordered(requests, {}) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("num_candidates", [1, 2])
def test_only_the_first_few_are_weighed(num_candidates):
    requests = [request("a"), request("b"), request("c")]
    assert reordered(requests, {"c": 99}, num_candidates=num_candidates) == ["a", "b", "c"]


def test_of_equal_gains_one_as_long_as_what_decodes_goes_first():
    requests = [request("long", 1000), request("short", 100)]
    cached = {"long": 0, "short": 0}
    assert reordered(requests, cached) == ["long", "short"]
    assert reordered(requests, cached, bucket=mean_bucket(3, 360)) == ["short", "long"]


def test_nobody_is_passed_over_for_ever():
    first, second = request("a"), request("b")
    weigher = weighing({"b": 90})

    def in_order():
        return list(weigher.reorder([first, second], Clockwork(), None, now_s=0.0))

    for _ in range(2 * MAX_PASSED_OVER):
        assert in_order() == [second, first]
        weigher.note_started([])  # no room for anybody: nobody is passed over
    for _ in range(MAX_PASSED_OVER):
        assert in_order() == [second, first]
        weigher.note_started([second])
    assert in_order() == [first, second]


def test_what_was_generated_before_a_request_came_back_is_computed_again():
    back = request("a")
    back.output_ids = array("q", range(50))
    assert reordered([back, request("b")], {"a": 90, "b": 90}) == ["b", "a"]


@pytest.mark.parametrize(
    ("free_tokens", "num_pending", "order"),
    [(200, 1, ["long", "short"]), (120, 1, ["short", "long"]), (120, 0, ["long", "short"])],
)
def test_who_takes_memory_from_what_others_wait_for_goes_after_who_does_not(
    free_tokens, num_pending, order
):
    """Of 200 and of 100 tokens; what must be evicted for the long one is waited for, or not."""
    requests = [request("long", 200), request("short", 100)]
    victims = [(500, LeafFacts(1, 0.0, num_pending=num_pending))]
    assert reordered(requests, {}, victims=victims, free_tokens=free_tokens) == order


def test_a_prompt_that_is_all_in_the_cache_computes_its_last_token():
    requests = [request("a"), request("b")]
    assert reordered(requests, {"a": 100, "b": 99}) == ["a", "b"]
