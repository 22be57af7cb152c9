"""What the tree core knows of each node is the truth after every change, by brute force."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.kits.unified_radix_cache.config import CacheConfig as KitConfig

from echo_sgl.engine.cache.node_path import namespace_of
from echo_sgl.engine.pool.offline_pool import OfflinePool
from echo_sgl.policies.cache.eviction_order import Worth, echo_key, worth_of
from echo_sgl.policies.order.offline_order import create_offline_order
from echo_sgl.types import Task
from tests.engine.kit_cores import back_up, build, insert, match

POOL_TOKENS = 512
WINDOW_S = 50.0
EXTRA_KEYS = (None, "adapter")

# Few distinct pages, so that prompts share prefixes, split nodes and end inside them.
pages = st.lists(st.integers(1, 3), min_size=1, max_size=5)
extra_keys = st.sampled_from(EXTRA_KEYS)
tasks = st.sampled_from(list(Task))


class TreeFacts(RuleBasedStateMachine):
    """Requests come, start, end, come back and use the cache; every fact is recomputed."""

    requests = Bundle("requests")
    order = "echo"
    page_size = 1

    @initialize()
    def start(self) -> None:
        self.kit_config = KitConfig(page_size=self.page_size, kv_size=POOL_TOKENS)
        self.cache, self.allocator, _ = build(
            self.kit_config, self.order, protected_share=0.1, protected_window_s=WINDOW_S
        )
        self.core = self.cache.tree_core
        self.pool = OfflinePool(create_offline_order("psm", utility_ratio=1.0, seed=0), 1000)
        self.core.pending, self.pool.on_change = self.pool, self.core.prompt_changed
        self.waiting: dict[str, Any] = {}
        self.started: dict[str, Any] = {}
        self.locks: list[tuple[int, Any]] = []
        self.num_requests = 0

    def tokens(self, prompt: list[int]) -> list[int]:
        return [page * 100 + i for page in prompt for i in range(self.page_size)]

    # ---- the offline requests ----

    @rule(target=requests, prompt=pages, extra_key=extra_keys)
    def arrive(self, prompt: list[int], extra_key: str | None) -> Any:
        req = SimpleNamespace(
            rid=f"r{self.num_requests}.",  # none begins like another: `remove` goes by prefix
            origin_input_ids=array("q", self.tokens(prompt)),
            output_ids=array("q"),
            extra_key=extra_key,
            cache_salt=None,
            seqlen=len(prompt),
        )
        self.num_requests += 1
        self.pool.add(req, entry_s=0.0, resumed=False)
        self.waiting[req.rid] = req
        return req

    @rule()
    def start_next(self) -> None:
        for req in self.pool.upcoming(1):
            self.pool.take(req)
            self.started[req.rid] = self.waiting.pop(req.rid)

    @rule(req=consumes(requests))
    def cancel_or_end(self, req: Any) -> None:
        if self.waiting.pop(req.rid, None):
            self.pool.remove(req.rid)
        elif self.started.pop(req.rid, None):
            self.pool.end(req)

    @rule(req=consumes(requests), output=pages, num_computed=st.integers(0, 10))
    def finish(self, req: Any, output: list[int], num_computed: int) -> None:
        """Its KV is put into the tree just before it ends; an aborted one has less of it."""
        if not self.started.pop(req.rid, None):
            return
        tokens = list(self.known_tokens(req)) + self.tokens(output)
        tokens = tokens[: (1 + num_computed) * self.page_size]
        self.core.user = Task.OFFLINE
        has_room = self.allocator.available_size() >= len(tokens)
        if has_room:
            insert(self.cache, self.allocator, tokens, req.extra_key)
        self.pool.end(req, num_cached_tokens=len(tokens) if has_room else 0)

    @rule(req=requests, output=pages)
    def retract(self, req: Any, output: list[int]) -> None:
        if self.started.pop(req.rid, None):
            req.output_ids.extend(self.tokens(output))
            self.pool.add(req, entry_s=0.0, resumed=True)
            self.waiting[req.rid] = req

    # ---- the cache ----

    @rule(prompt=pages, extra_key=extra_keys, user=tasks)
    def insert(self, prompt: list[int], extra_key: str | None, user: Task) -> None:
        tokens = self.tokens(prompt)
        if self.allocator.available_size() < len(tokens):
            return
        self.core.user = user
        self.check_last_user(insert(self.cache, self.allocator, tokens, extra_key), user)

    @rule(prompt=pages, extra_key=extra_keys, user=tasks)
    def match(self, prompt: list[int], extra_key: str | None, user: Task) -> None:
        self.core.user = user
        req = SimpleNamespace(extra_key=extra_key, cache_salt=None)
        expected = self.core.cached_tokens(req, array("q", self.tokens(prompt)))
        result = match(self.cache, self.tokens(prompt), extra_key)
        assert result.device_prefix_len + result.host_hit_length == expected
        self.check_last_user(result, user)

    @rule(prompt=pages)
    def lock(self, prompt: list[int]) -> None:
        node = match(self.cache, self.tokens(prompt)).last_device_node
        if not self.core.is_root(node):
            self.locks.append((node, self.cache.inc_lock_ref(node)))

    @rule()
    def unlock(self) -> None:
        if self.locks:
            node, receipt = self.locks.pop()
            self.cache.dec_lock_ref(node, receipt.to_dec_params())

    @rule(num_tokens=st.sampled_from([1, 2, 20]))
    def evict(self, num_tokens: int) -> None:
        paths, found = [path_key(node) for node in self.nodes()], self.found_by_waiting()
        num_unneeded = self.unneeded_tokens()
        self.cache.evict(EvictParams(num_tokens=num_tokens))
        for left in map(path_key, self.nodes()):
            assert any(path[: len(left)] == left for path in paths)
        assert num_tokens > num_unneeded or self.found_by_waiting() == found

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.core.now_s += seconds

    def check_last_user(self, result: Any, user: Task) -> None:
        node = self.core.node_by_id(result.last_device_node)
        while node.parent is not None:
            assert self.core.facts_of(node).task is user
            node = node.parent

    # ---- the truth ----

    def nodes(self) -> list[Any]:
        return [node for node in self.core._collect_all_nodes() if node.parent is not None]

    def nodes_left(self) -> list[Any]:
        """What holds KV of the device."""
        return self.nodes()

    def pending(self) -> list[Any]:
        return [*self.waiting.values(), *self.started.values()]

    def pending_through(self, node: Any) -> list[Any]:
        path, namespace = path_of(node), namespace_of(node.key)
        return [
            req
            for req in self.pending()
            if namespace_of(req) == namespace and self.known_tokens(req)[: len(path)] == path
        ]

    def found_by_waiting(self) -> list[int]:
        """How much of each waiting prompt is in the cache, in part of a node, too."""
        waiting = self.waiting.values()
        return [self.core.cached_tokens(req, self.known_tokens(req)) for req in waiting]

    def unneeded_tokens(self) -> int:
        """What evictable leaves hold behind the point where the last pending prompt leaves them."""
        self.core.settle_all()
        num_tokens = 0
        for leaf in self.core.evictable_device_leaves:
            if worth_of(self.core.facts_of(leaf)) < Worth.PENDING:
                path = path_of(leaf)
                here = [r for r in self.pending() if namespace_of(r) == namespace_of(leaf.key)]
                known = [self.known_tokens(req) for req in here]
                ends = range(len(path), len(path) - len(leaf.key), -self.page_size)
                shared = (end for end in ends if any(one[:end] == path[:end] for one in known))
                num_tokens += len(path) - next(shared, len(path) - len(leaf.key))
        return num_tokens

    def known_tokens(self, req: Any) -> array[int]:
        return req.origin_input_ids + req.output_ids

    @invariant()
    def reference_counts_are_exact(self) -> None:
        for node in self.nodes():
            facts = self.core.facts_of(node)
            assert facts.num_pending == len(self.pending_through(node))
            assert facts.last_access == node.last_access_time

    @invariant()
    def protected_tokens_are_those_of_live_nodes(self) -> None:
        working = self.core.working_set
        held = sum(len(node.key) for node in self.nodes() if node.id in working)
        assert working.num_tokens == held
        assert len(working) == sum(node.id in working for node in self.nodes())

    @invariant()
    def every_evictable_leaf_stands_in_its_place(self) -> None:
        self.core.settle_all()
        leaves = {node.id: node for node in self.core.evictable_device_leaves}
        assert [tokens for tokens, _ in self.core.next_victims()] == [
            len(leaves[victim].key) for victim in self.core.order.victims()
        ]
        victims = list(self.core.order.victims())
        assert sorted(victims) == sorted(leaves)
        assert all(not node.component_data[ComponentType.FULL].lock_ref for node in leaves.values())
        self.check_order([leaves[victim] for victim in victims])

    def check_order(self, victims: list[Any]) -> None:
        keys = [echo_key(self.core.facts_of(node)) for node in victims]
        assert keys == sorted(keys)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            while self.locks:
                self.unlock()
            self.cache.sanity_check()
            self.cache.evict(EvictParams(num_tokens=10**6))
            assert not self.nodes_left()
            assert self.allocator.available_size() == POOL_TOKENS


class NextUseFacts(TreeFacts):
    """The same, where victims must come farthest next use first."""

    order = "next-use"

    def check_order(self, victims: list[Any]) -> None:
        facts = {node.id: self.core.facts_of(node) for node in victims}
        upcoming = [req.rid for req in self.pool.upcoming(10_000)]
        uses = []
        for node in victims:
            # What one that runs goes through is locked on a server, unless another computed it.
            rids = [req.rid for req in self.pending_through(node)]
            if rids and not facts[node.id].is_protected and not self.started.keys() & rids:
                uses.append(min(map(upcoming.index, rids)))
        assert uses == sorted(uses, reverse=True)
        idle = [node for node in victims if not facts[node.id].num_pending]
        keys = [echo_key(facts[node.id]) for node in idle]
        assert keys == sorted(keys)
        worths = [worth_of(facts[node.id]) for node in victims]
        assert worths == sorted(worths)


class PagedFacts(TreeFacts):
    page_size = 16


class HostTierFacts(TreeFacts):
    """The same with a second tier: evicted nodes may stay in the tree, below those that did not."""

    @initialize()
    def start(self) -> None:
        super().start()
        self.core.set_hicache_enabled()

    @rule(num_tokens=st.integers(1, 20))
    def demote(self, num_tokens: int) -> None:
        back_up(self.cache, self.kit_config)
        self.cache.evict(EvictParams(num_tokens=num_tokens))

    def nodes_left(self) -> list[Any]:
        return [node for node in self.nodes() if not node.evicted]


class NextUseHostTierFacts(HostTierFacts, NextUseFacts):
    """Both."""


def path_key(node: Any) -> tuple[Any, ...]:
    return namespace_of(node.key), *path_of(node)


@pytest.mark.parametrize(
    "machine", [TreeFacts, NextUseFacts, PagedFacts, HostTierFacts, NextUseHostTierFacts]
)
def test_facts_and_places_are_exact_after_every_change(machine: type[TreeFacts]) -> None:
    case = machine.TestCase()
    case.settings = settings(
        max_examples=40,
        stateful_step_count=30,
        suppress_health_check=list(HealthCheck),
    )
    case.runTest()


def path_of(node: Any) -> array[int]:
    """The tokens from the root to the end of a node."""
    before = path_of(node.parent) if node.parent is not None else array("q")
    return before + node.key.token_ids if node.parent is not None else before
