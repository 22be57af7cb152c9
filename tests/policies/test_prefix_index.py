"""Ranges of prompts behind a prefix, and prefixes lost too early, against brute force."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.lost_prefixes import LostPrefixes
from echo_sgl.policies.prefix_index import PrefixIndex, prefix_key
from echo_sgl.types import PendingRequest

prompts = st.lists(st.integers(0, 3), max_size=5).map(lambda tokens: array("q", tokens))
paths = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(lambda tokens: array("q", tokens))
namespaces = st.sampled_from(["", "adapter"])


def request(number: int, prompt: array[int], namespace: str = "") -> PendingRequest:
    return PendingRequest(f"r{number}", prompt, number, namespace)


@given(st.lists(st.tuples(namespaces, prompts), max_size=30), namespaces, paths, st.data())
def test_counts_and_the_last_one_are_exact_after_removals(entries, namespace, path, data):
    index = PrefixIndex()
    requests = [request(number, prompt, name) for number, (name, prompt) in enumerate(entries)]
    for one in requests:
        index.add(one)
    gone = data.draw(st.sets(st.sampled_from(range(len(requests))))) if requests else set()
    for number in gone:
        index.remove(requests[number])
    through = [
        prefix_key(one)
        for one in requests
        if one.sequence not in gone
        and one.namespace == namespace
        and one.prompt[: len(path)] == path
    ]
    assert index.count_through(namespace, path) == len(through)
    last = max(through, default=None)
    assert index.last_and_count(namespace, path) == (last, len(through))
    assert len(index) == len(requests) - len(gone)


def test_walking_from_a_key_and_up_to_it_meets_every_other_key_once():
    index = PrefixIndex()
    requests = [request(number, array("q", [number % 3, number])) for number in range(9)]
    for one in requests:
        index.add(one)
    middle = prefix_key(requests[4])
    behind, before = list(index.after(middle)), list(index.up_to(middle))
    assert before + behind == list(index)
    assert before[-1] == middle


LONG = array("q", range(40))


def test_what_was_evicted_too_early_is_charged_once_to_who_computes_it():
    lost = LostPrefixes()
    lost.add("", LONG[:30], start=20)
    assert lost.charge("", LONG, num_cached=20) == 10
    assert lost.charge("", LONG, num_cached=20) == 0


def test_only_the_part_behind_the_cached_prefix_is_charged():
    lost = LostPrefixes()
    lost.add("", LONG[:30], start=10)
    lost.add("", LONG[:40], start=25)
    assert lost.charge("", LONG, num_cached=20) == 20


def test_other_prompts_and_namespaces_are_not_charged():
    lost = LostPrefixes()
    lost.add("", LONG[:30], start=20)
    assert lost.charge("adapter", LONG, num_cached=0) == 0
    assert lost.charge("", array("q", [*range(16), *range(100, 130)]), num_cached=0) == 0
    assert lost.charge("", LONG[:29], num_cached=0) == 0
    assert lost.charge("", LONG, num_cached=30) == 0


def test_the_oldest_are_forgotten_beyond_the_capacity():
    lost = LostPrefixes(capacity=2)
    for number in range(3):
        lost.add("", array("q", [number, *range(30)]), start=0)
    assert len(lost) == 2
    assert lost.charge("", array("q", [0, *range(30)]), num_cached=0) == 0
    assert lost.charge("", array("q", [2, *range(30)]), num_cached=0) == 31
