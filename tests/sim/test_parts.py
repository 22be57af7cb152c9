"""The simulator's parts one by one: events, the prefix tree, sums of decodes."""

from __future__ import annotations

import math
from array import array
from collections.abc import MutableSequence, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.policies.cache.working_set import WorkingSet
from echo_sgl.policies.limits.step_limit import ENDING_TOKENS
from echo_sgl.policies.order.offline_order import PrefixNeed
from echo_sgl.sim.decode_group import MAX_OUTDATED, DecodeGroup
from echo_sgl.sim.events import EventQueue, Priority
from echo_sgl.sim.prefix_tree import PrefixTree
from echo_sgl.sim.workload import SimRequest
from echo_sgl.types import Task

ALLOWED_TOKENS = 24


def test_events_come_by_time_then_priority_then_order_of_arrival() -> None:
    events = EventQueue()
    for at_s, priority, name in (
        (2.0, Priority.ARRIVAL, "late"),
        (1.0, Priority.STEP, "step"),
        (1.0, Priority.ARRIVAL, "first"),
        (1.0, Priority.ARRIVAL, "second"),
    ):
        events.push(at_s, priority, name)
    assert [events.pop()[2] for _ in range(4)] == ["first", "second", "step", "late"]


def test_an_event_in_the_past_is_refused() -> None:
    events = EventQueue()
    events.push(2.0, Priority.STEP, None)
    events.pop()
    with pytest.raises(ValueError, match=r"event at 1\.0 s is before 2\.0 s"):
        events.push(1.0, Priority.STEP, None)


class Nobody:
    cursor = None

    def need(self, namespace: str, path: MutableSequence[int]) -> PrefixNeed:
        return PrefixNeed(num_pending=0, walk_key=None, is_next=False)

    def shared_blocks(self, path: Sequence[int], *, at_least: int) -> int:
        return 0


def tree_of(*paths: str, order: str = "lru") -> PrefixTree:
    tree = PrefixTree(order, Nobody(), WorkingSet(limit_tokens=0, window_s=1.0))
    for path in paths:
        tree.insert(ids(path), sizes(path), Task.OFFLINE)
    return tree


def ids(path: str) -> array[int]:
    return array("q", map(ord, path))


def sizes(path: str) -> array[int]:
    return array("q", (16,)) * len(path)


def test_a_path_that_leaves_another_splits_it() -> None:
    tree = tree_of("abcd", "abxy")
    assert sorted("".join(map(chr, node.blocks)) for node in tree.nodes()) == ["ab", "cd", "xy"]
    assert tree.num_tokens == 6 * 16


def test_looking_changes_nothing_and_finds_what_a_match_finds() -> None:
    tree = tree_of("abcd")
    assert tree.cached_tokens(ids("abz")) == 32
    assert len(list(tree.nodes())) == 1
    node, num_tokens = tree.match(ids("abz"), Task.OFFLINE)
    assert (num_tokens, node.num_tokens, len(list(tree.nodes()))) == (32, 32, 2)


def test_what_is_locked_stays_and_the_least_recent_goes_first() -> None:
    tree = tree_of("ab", "cd", "ef")
    node, _ = tree.match(ids("ab"), Task.OFFLINE)
    tree.lock(node)
    assert tree.evict(1) == 32
    assert tree.cached_tokens(ids("cd")) == 0
    assert tree.evict(1000) == 32
    assert tree.cached_tokens(ids("ab")) == 32
    tree.unlock(node)
    assert tree.evict(1000) == 32
    assert tree.num_tokens == tree.locked_tokens == 0


def test_a_parent_can_go_when_its_last_child_has_gone() -> None:
    tree = tree_of("abcd", "abxy")
    assert tree.num_leaves == 2
    assert tree.evict(33) == 64
    assert tree.evict(1) == 32
    assert tree.num_tokens == 0


class WaitsForTwoBlocks(Nobody):
    def shared_blocks(self, path: Sequence[int], *, at_least: int) -> int:
        return 2


def test_of_a_leaf_only_what_nobody_waits_for_goes() -> None:
    tree = PrefixTree("echo", WaitsForTwoBlocks(), WorkingSet(limit_tokens=0, window_s=1.0))
    tree.insert(ids("abcd"), sizes("abcd"), Task.OFFLINE)
    assert tree.evict(1) == 32
    assert tree.cached_tokens(ids("abcd")) == 32
    assert tree.evict(1) == 32
    assert tree.num_tokens == 0


def test_a_split_under_lock_keeps_both_parts_locked() -> None:
    tree = tree_of("abcd")
    node, _ = tree.match(ids("abcd"), Task.OFFLINE)
    tree.lock(node)
    tree.insert(ids("abx"), sizes("abx"), Task.OFFLINE)
    assert tree.locked_tokens == 64
    tree.unlock(node)
    assert tree.locked_tokens == 0


def test_a_prefix_inside_a_locked_node_is_held_already() -> None:
    tree = tree_of("abcd")
    assert tree.locked_prefix_tokens(ids("abx")) == 0
    tree.lock(tree.match(ids("abcd"), Task.OFFLINE)[0])
    assert tree.locked_prefix_tokens(ids("abx")) == 32
    assert tree.locked_prefix_tokens(ids("abcdx")) == 64


def request(number: int, prompt_tokens: int) -> SimRequest:
    one = SimRequest(
        number,
        Task.ONLINE,
        0.1 * number,
        prompt_tokens=prompt_tokens,
        blocks=array("q", (number,)),
        sizes=array("q", (prompt_tokens,)),
        max_new_tokens=ALLOWED_TOKENS,
    )
    one.outputs_at_join, one.first_token_s = 1, 0.1 * number + 0.5
    return one


def due_after(one: SimRequest, num_outputs: int) -> float:
    return min(one.arrival_s + 1.0, one.first_token_s or 0.0) + num_outputs * 0.05


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=12),
    st.lists(st.integers(0, 30), max_size=40),
    st.sampled_from([1, 16]),
)
def test_sums_of_a_group_are_those_of_its_requests(
    requests: list[tuple[int, int]], moves: list[int], page_tokens: int
) -> None:
    group = DecodeGroup(page_tokens, ttft_s=1.0, tpot_s=0.05)
    all_of_them = [request(number, prompt) for number, (prompt, _) in enumerate(requests)]
    left = {one.rid: steps for one, (_, steps) in zip(all_of_them, requests, strict=True)}
    ended: list[str] = []
    for move in moves:
        if move < len(all_of_them) and (one := all_of_them[move]).rid not in ended:
            if one.group is None:
                group.add(one, tokens_left=left[one.rid] + 1 - one.num_outputs)
            else:
                group.remove(one)
        else:
            before = sum(-(-(one.seq_tokens - 1) // page_tokens) for one in group)
            after = sum(-(-one.seq_tokens // page_tokens) for one in group)
            assert group.growth_tokens == (after - before) * page_tokens
            group.advance()
            for one in group.take_ended():
                assert one.num_outputs == left[one.rid] + 1
                ended.append(one.rid)
                group.remove(one)
        assert group.seq_tokens == sum(one.seq_tokens for one in group)
        assert group.left_tokens == sum(ALLOWED_TOKENS - one.num_outputs for one in group)
        assert group.longest_tokens == max((one.seq_tokens for one in group), default=0)
        assert group.shortest_tokens == min((one.seq_tokens for one in group), default=0)
        due_s = min((due_after(one, one.num_outputs) for one in group), default=math.inf)
        assert group.due_s == pytest.approx(due_s)
        endings = sorted(
            (due_after(one, ALLOWED_TOKENS - 1), ALLOWED_TOKENS - one.num_outputs)
            for one in group
            if ALLOWED_TOKENS - one.num_outputs <= ENDING_TOKENS
        )
        assert sorted(group.endings) == [pytest.approx(one) for one in endings]
    assert len(ended) == len(set(ended))


def test_a_group_forgets_those_that_left() -> None:
    group = DecodeGroup(1, ttft_s=1.0, tpot_s=0.05)
    for number in range(5000):
        one = request(number, 100 + number % 7)
        group.add(one, tokens_left=9)
        group.advance()
        group.remove(one)
    heaps = (group._longest, group._shortest, group._due, group._ends, group._allowed)
    assert all(len(heap) <= MAX_OUTDATED + 3 for heap in heaps)
