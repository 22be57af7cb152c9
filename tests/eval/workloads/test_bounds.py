"""The cache bounds against exhaustive search, and on cases worked by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.workloads.bounds import (
    belady_hits,
    distinct_tokens,
    infinite_hits,
    shared_tokens,
    tree_paths,
)

prompts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6
)
long_prompts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=30
)
Nodes = frozenset[int]


def prefixes(prompt: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {prompt[:length] for length in range(1, len(prompt) + 1)}


def subsets(nodes: Nodes, size: int) -> Iterator[Nodes]:
    """What may stay: as much as fits, for keeping more never hurts."""
    return map(frozenset, itertools.combinations(sorted(nodes), min(size, len(nodes))))


def best_hits(given: list[tuple[int, ...]], capacity: int, answer_tokens: int) -> int:
    """The most hits over all choices of what to keep at each request, prefix-closed or not."""
    paths = [frozenset(path) for path in tree_paths(given)]

    @cache
    def search(index: int, cached: Nodes) -> int:
        if index == len(paths):
            return 0
        path = paths[index]
        room = capacity - answer_tokens - len(path)
        rest = (search(index + 1, kept | path) for kept in subsets(cached - path, room))
        return len(cached & path) + max(rest)

    return search(0, frozenset())


def lru_hits(given: list[tuple[int, ...]], capacity: int) -> int:
    """Plain LRU, a child before its parent: what a bound must never fall below."""
    used: dict[int, tuple[int, int]] = {}
    hits = 0
    for now, path in enumerate(tree_paths(given)):
        hits += sum(node in used for node in path)
        used.update({node: (now, -depth) for depth, node in enumerate(path)})
        while len(used) > capacity:
            del used[min(used, key=lambda node: used[node])]
    return hits


@settings(max_examples=300)
@given(prompts, st.integers(0, 8), st.integers(0, 2))
def test_belady_finds_as_much_as_the_best_of_all_choices(
    given: list[tuple[int, ...]], spare: int, answer_tokens: int
) -> None:
    capacity = max(map(len, given)) + answer_tokens + spare
    best = best_hits(given, capacity, answer_tokens)
    assert belady_hits(given, capacity, answer_tokens=answer_tokens) == best


@given(prompts)
def test_the_infinite_cache_finds_every_prefix_that_was_seen(given: list[tuple[int, ...]]) -> None:
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for prompt in given:
        hits += len(prefixes(prompt) & seen)
        seen |= prefixes(prompt)
    assert infinite_hits(given) == hits
    assert distinct_tokens(given) == len(seen)


@given(long_prompts)
def test_the_order_of_the_prompts_does_not_matter_to_an_infinite_cache(
    given: list[tuple[int, ...]],
) -> None:
    assert infinite_hits(given) == infinite_hits(sorted(given)) == infinite_hits(given[::-1])


@given(long_prompts, st.integers(0, 40))
def test_belady_lies_between_lru_and_the_infinite_cache(
    given: list[tuple[int, ...]], spare: int
) -> None:
    capacity = max(map(len, given)) + spare
    found = belady_hits(given, capacity)
    assert lru_hits(given, capacity) <= found <= infinite_hits(given)
    assert belady_hits(given, capacity + 1) >= found


@given(long_prompts)
def test_a_cache_that_holds_everything_is_an_infinite_one(given: list[tuple[int, ...]]) -> None:
    assert belady_hits(given, distinct_tokens(given)) == infinite_hits(given)


@given(long_prompts)
def test_the_working_set_is_what_two_prompts_share(given: list[tuple[int, ...]]) -> None:
    pairs = itertools.combinations(given, 2)
    shared = set().union(*(prefixes(one) & prefixes(other) for one, other in pairs))
    assert shared_tokens(given) == len(shared)


def test_nodes_are_numbered_by_first_use_and_shared_along_common_starts() -> None:
    assert tree_paths([(7, 8), (7, 9), (9,)]) == [[1, 2], [1, 3], [4]]


def test_the_page_that_is_needed_last_goes_first() -> None:
    # Two of three documents fit: keeping the first costs the second a miss, and so on.
    a, b, c = (1, 1), (2, 2), (3, 3)
    assert belady_hits([a, b, c, a, b, c], 4) == 4
    assert lru_hits([a, b, c, a, b, c], 4) == 0
    assert belady_hits(sorted([a, b, c, a, b, c]), 2) == 6


def test_a_running_answer_takes_room_from_the_cache() -> None:
    given = [(1, 1), (2, 2), (1, 1)]
    assert belady_hits(given, 4) == 2
    assert belady_hits(given, 4, answer_tokens=1) == 1
    assert belady_hits(given, 4, answer_tokens=2) == 0


def test_a_request_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 tokens of a cache of 3"):
        belady_hits([(1, 2, 3)], 3, answer_tokens=1)


def test_no_prompts_give_no_hits() -> None:
    assert infinite_hits([]) == belady_hits([], 0) == shared_tokens([]) == 0
