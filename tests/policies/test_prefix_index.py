"""Ranges of prompts behind a prefix, and prefixes lost too early, against brute force."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.cache.lost_prefixes import LostPrefixes
from echo_sgl.policies.prefix_index import PrefixIndex, PrefixKey, prefix_key
from echo_sgl.types import PendingRequest

prompts = st.lists(st.integers(0, 3), max_size=5).map(lambda tokens: array("q", tokens))
paths = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(lambda tokens: array("q", tokens))
namespaces = st.sampled_from(["", "adapter"])


def request(number: int, prompt: array[int], namespace: str = "") -> PendingRequest:
    return PendingRequest(f"r{number}", prompt, number, namespace)


def keys(requests: Iterable[PendingRequest]) -> list[PrefixKey]:
    return list(map(prefix_key, requests))


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


@given(st.lists(st.tuples(namespaces, prompts), max_size=30), namespaces, prompts, st.data())
def test_what_a_path_shares_with_some_prompt_is_exact(entries, namespace, path, data):
    index = PrefixIndex()
    for number, (name, prompt) in enumerate(entries):
        index.add(request(number, prompt, name))
    lengths = range(len(path), 0, -1)
    prompts_here = [prompt for name, prompt in entries if name == namespace]
    shares = (n for n in lengths if any(one[:n] == path[:n] for one in prompts_here))
    num_shared = next(shares, 0)
    assert index.shared_tokens(namespace, path) == num_shared
    at_least = data.draw(st.integers(0, len(path)))
    enough = num_shared if num_shared >= at_least else 0
    assert index.shared_tokens(namespace, path, at_least=at_least) == enough


histories = st.lists(st.tuples(st.booleans(), namespaces, prompts), max_size=40)


@given(histories, namespaces, prompts, st.integers(0, 40))
def test_every_walk_is_that_of_a_sorted_list_at_any_time(history, namespace, prompt, sequence):
    index, here = PrefixIndex(), {}
    for number, (comes, name, tokens) in enumerate(history):
        if comes or not here:
            here[number] = request(number, tokens, name)
            index.add(here[number])
        else:
            index.remove(here.pop(min(here, key=lambda other: (other * 7) % 5)))
    expected = sorted(map(prefix_key, here.values()))
    assert keys(index) == expected
    for key in [(namespace, prompt, sequence), *expected]:
        assert keys(index.after(key)) == [other for other in expected if other > key]
        assert keys(index.up_to(key)) == [other for other in expected if other <= key]


@given(st.lists(prompts, max_size=20), prompts)
def test_a_removed_request_leaves_no_trace(before, prompt):
    index = PrefixIndex()
    for number, tokens in enumerate(before):
        index.add(request(number, tokens))
    shape = nodes_of(index)
    passing = request(100, prompt)
    index.add(passing)
    index.remove(passing)
    assert nodes_of(index) == shape
    assert len(shape) <= 2 * len(before) + 1


def nodes_of(index: PrefixIndex) -> list[tuple[int, int, int]]:
    """(start, end, prompts) of every node, in walking order."""
    found, stack = [], list(index._roots.values())
    while stack:
        node = stack.pop()
        found.append((node.start, node.end, node.num_prompts))
        stack.extend(node.children[token] for token in reversed(node.first_tokens))
    return found


def test_who_is_removed_has_the_same_prompt_and_number():
    index, here = PrefixIndex(), request(0, array("q", [1, 2, 3]))
    index.add(here)
    with pytest.raises(ValueError, match="'r0' is not in the index"):
        index.remove(request(0, array("q", [1, 9, 3])))
    assert list(index) == [here]
    index.remove(request(0, array("q", [1, 2, 3])))
    assert not len(index)


@pytest.mark.parametrize("prompt", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 9, 3]])
def test_removing_what_is_not_here_is_refused_and_changes_nothing(prompt):
    index = PrefixIndex()
    for number, tokens in ((0, [1, 2, 3]), (1, [1, 2])):
        index.add(request(number, array("q", tokens)))
    before = list(index)
    with pytest.raises(ValueError, match="'r7' is not in the index"):
        index.remove(request(7, array("q", prompt)))
    assert list(index) == before


def test_a_chain_of_prompts_deeper_than_the_recursion_limit_is_walked():
    index, longest = PrefixIndex(), array("q", [1] * 1200)
    for length in range(1, 1201):
        index.add(request(length, longest[:length]))
    assert [one.sequence for one in index] == list(range(1, 1201))
    assert index.last_and_count("", longest[:1000]) == (("", longest, 1200), 201)


def test_walking_from_a_key_and_up_to_it_meets_every_other_key_once():
    index = PrefixIndex()
    requests = [request(number, array("q", [number % 3, number])) for number in range(9)]
    for one in requests:
        index.add(one)
    middle = prefix_key(requests[4])
    behind, before = list(index.after(middle)), list(index.up_to(middle))
    assert before + behind == list(index)
    assert before[-1] is requests[4]
    assert list(index.around(middle)) == behind + before
    assert list(index.around(None)) == list(index)


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


def test_the_oldest_are_forgotten_beyond_so_many_tokens():
    lost = LostPrefixes(capacity_tokens=100)
    for number in range(4):
        lost.add("", array("q", [number, *range(39)]), start=0)
    assert len(lost) == 2
    lost.add("", array("q", range(200)), start=0)
    assert len(lost) == 0, "one that alone is too long"
    lost.add("", LONG, start=0)
    assert lost.charge("", LONG, num_cached=0) == 40
    assert len(lost) == 0, "charged entries take up no room"


def test_what_a_job_loses_costs_no_more_because_its_prompts_begin_alike():
    """Beyond the capacity each one that is added has an older one forgotten."""

    def add_s(paths: list[array[int]]) -> float:
        lost = LostPrefixes(capacity=len(paths) // 2)
        start_s = time.thread_time()
        for path in paths:
            lost.add("", path, start=0)
        return time.thread_time() - start_s

    alike = [array("q", [*range(16), number]) for number in range(8000)]
    apart = [array("q", [number, *range(16)]) for number in range(8000)]
    assert min(add_s(alike) for _ in range(3)) < 3 * min(add_s(apart) for _ in range(3))


class Counting(array):
    """An array that counts how often a part of it is copied."""

    num_copies = 0

    def __getitem__(self, index):
        Counting.num_copies += isinstance(index, slice)
        return super().__getitem__(index)


def test_paths_that_only_begin_alike_cost_no_copy():
    lost = LostPrefixes()
    for number in range(100):
        lost.add("", array("q", [*range(30), number]), start=0)
    prompt = Counting("q", [*range(30), 7, 8])
    assert lost.charge("", prompt, num_cached=0) == 31
    assert Counting.num_copies == 2, "one to look it up, one to compare"
