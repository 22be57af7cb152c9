"""SGLang's tree core with an eviction order that is kept, not rebuilt.

The structure, locks, splits, events and the host tier are SGLang's own. Ours are the facts
about each node and the index over the evictable leaves: one call that frees a leaf costs
O(log n) instead of a heap over all of them.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    DemoteResult,
    DropSubtreeNoHostResult,
    EvictDeviceLeafResult,
    EvictDeviceNextNodeResult,
)

from echo_sgl.config import CacheConfig
from echo_sgl.engine.cache.node_path import NodePath, namespace_of
from echo_sgl.engine.cache.plain_walks import PlainWalks
from echo_sgl.engine.requests.tasks import task_of
from echo_sgl.policies.cache.eviction_order import LeafFacts, Worth, create_eviction_order, worth_of
from echo_sgl.policies.cache.lost_prefixes import LostPrefixes
from echo_sgl.policies.cache.working_set import WorkingSet
from echo_sgl.policies.order.offline_order import PrefixNeed
from echo_sgl.policies.prefix_index import PrefixKey
from echo_sgl.types import Task

_FULL = ComponentType.FULL
_NO_NEED = PrefixNeed(num_pending=0, walk_key=None, is_next=False)
_WORTH_NAMES = {worth: worth.name.lower() for worth in Worth}
# Leaves wait for their place until an eviction asks, but not more than this many: beyond it
# each new one settles an old one, so that no single eviction pays for all of them.
_MAX_UNSETTLED = 64


class PendingPrefixes(Protocol):
    """What the tree core asks about the offline requests: `OfflinePool`, or nobody."""

    @property
    def cursor(self) -> PrefixKey | None: ...

    def need(self, namespace: str, path: Sequence[int]) -> PrefixNeed:
        """Reference count of a prefix (waiting, parked and running), and who waits for it."""
        ...

    def shared_tokens(self, namespace: str, path: Sequence[int], *, at_least: int) -> int:
        """How much of a path is the start of a pending prompt; 0 if fewer than `at_least`."""
        ...


class NobodyWaits:
    """`PendingPrefixes` of a cache without a pool."""

    cursor: PrefixKey | None = None

    def need(self, namespace: str, path: Sequence[int]) -> PrefixNeed:
        return _NO_NEED

    def shared_tokens(self, namespace: str, path: Sequence[int], *, at_least: int) -> int:
        return 0


@dataclass(slots=True)
class CacheCounts:
    """Tokens since the start, and those in the tree now by class of their last user.

    `evicted_tokens` by (class of the last user, what they were worth); `punished_tokens`
    were evicted while requests waited for them, and computed again.
    """

    evicted_tokens: defaultdict[tuple[Task, str], int] = field(
        default_factory=lambda: defaultdict(int)
    )
    punished_tokens: int = 0
    cached_tokens: dict[Task, int] = field(default_factory=lambda: dict.fromkeys(Task, 0))

    @property
    def num_evicted_tokens(self) -> int:
        return sum(self.evicted_tokens.values())


class _LeafSet(set[UnifiedTreeNode]):
    """SGLang's set of evictable leaves, which tells us when one comes or goes."""

    def __init__(self, came: Callable[[Any], None], went: Callable[[Any], None]) -> None:
        super().__init__()
        self._came, self._went = came, went

    def add(self, node: UnifiedTreeNode) -> None:
        if node not in self:
            set.add(self, node)
            self._came(node)

    def discard(self, node: UnifiedTreeNode) -> None:
        if node in self:
            set.discard(self, node)
            self._went(node)


class EchoTreeCore(PlainWalks):
    """`UnifiedTreeCore` whose victims come from `policies/cache/eviction_order.py`.

    `now_s` (the scheduler's broadcast clock) and `user` (the class on whose behalf the tree
    changes) are set by the engine. Source: Echo 4.2, DESIGN 4.
    """

    evictable_device_leaves: set[UnifiedTreeNode]

    def __init__(self, params: Any, components: Any, config: CacheConfig) -> None:
        allocator = params.token_to_kv_pool_allocator
        capacity_tokens = allocator.size if allocator else 0
        self.now_s = 0.0
        self.user = Task.ONLINE
        self.pending: PendingPrefixes = NobodyWaits()
        self.counts = CacheCounts()
        self.lost = LostPrefixes()
        self.working_set = WorkingSet(
            limit_tokens=int(config.protected_share * capacity_tokens),
            window_s=config.protected_window_s,
        )
        self._order_name = config.order
        super().__init__(params, components)

    def reset(self) -> None:
        super().reset()
        self.order = create_eviction_order(self._order_name, cursor=lambda: self.pending.cursor)
        self._unsettled: dict[UnifiedTreeNode, None] = {}
        self.evictable_device_leaves = _LeafSet(self._unsettle, self._leaf_went)
        self.working_set.clear()
        self.lost.clear()
        self.counts.cached_tokens = dict.fromkeys(Task, 0)

    # ---- facts -----------------------------------------------------------------------------

    def facts_of(self, node: UnifiedTreeNode) -> LeafFacts:
        """What an eviction order may know of a node; exact at any time."""
        need = _NO_NEED
        if self.order.needs_pending:
            need = self.pending.need(namespace_of(node.key), NodePath(node))
        return LeafFacts(
            leaf=node.id,
            last_access=node.last_access_time,
            task=getattr(node, "echo_user", Task.ONLINE),
            is_protected=node.id in self.working_set,
            num_pending=need.num_pending,
            walk_key=need.walk_key,
            is_next=need.is_next,
        )

    def prompt_changed(self, req: Any, prompt: array[int]) -> None:
        """A pending request with this prompt came, went or was resumed: its leaf moves."""
        key = RadixKey(prompt, req.extra_key, cache_salt=req.cache_salt)
        node, _, _ = self._descend(key, self._end_of(key))
        self._unsettle_leaf_of(node)

    def locked_tokens(self, node_id: int) -> int:
        """Tokens on the path to a node that running requests hold."""
        node, num_tokens = self.node_by_id(node_id), 0
        while node is not self.root_node:
            if node.component_data[_FULL].lock_ref:
                num_tokens += len(node.key)
            node = node.parent
        return num_tokens

    def cached_tokens(self, req: Any, prompt: array[int]) -> int:
        """How much of a prompt is in the tree now; looks, and changes nothing."""
        key = RadixKey(prompt, req.extra_key, cache_salt=req.cache_salt)
        _, num_tokens, child = self._descend(key, self._end_of(key))
        if child is not None:
            alike = _num_alike(prompt[num_tokens:], child.key.token_ids)
            num_tokens += alike // self.page_size * self.page_size
        return num_tokens

    def next_victims(self) -> Iterator[tuple[int, LeafFacts]]:
        """Tokens and facts of the leaves that would be evicted next."""
        self.settle_all()
        for leaf in self.order.victims():
            node = self.node_by_id(leaf)
            yield len(node.key), node.echo_facts

    # ---- use -------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result: MatchResult = super().match_prefix(params)
        user = task_of(params.req) if params.req is not None else self.user
        self._used(self.node_by_id(result.best_match_node), user)
        return result

    def _insert_tail_step(self, state: Any) -> None:
        super()._insert_tail_step(state)
        self._inserted(state.target_node)

    def _inserted(self, node: UnifiedTreeNode) -> None:
        self._used(node, self.user)

    def _used(self, node: UnifiedTreeNode, user: Task) -> None:
        """Note the class that used a path; its leaf, if it is evictable, moves."""
        self._unsettle_leaf_of(node)
        root, is_online, use = self.root_node, user is Task.ONLINE, self.working_set.use
        while node is not root:
            num_tokens = len(node.key)
            if (last_user := getattr(node, "echo_user", None)) is not user:
                self.counts.cached_tokens[user] += num_tokens
                if last_user is not None:
                    self.counts.cached_tokens[last_user] -= num_tokens
                node.echo_user = user
            if is_online:
                use(node.id, num_tokens, self.now_s)
            node = node.parent

    def await_return(self, req: Any, num_tokens: int) -> None:
        """An online request that is retracted comes back to the first tokens of its own."""
        tokens = (req.origin_input_ids + req.output_ids)[:num_tokens]
        key = RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
        node, _, _ = self._descend(key, self._end_of(key))
        if node is not self.root_node:
            self.working_set.use(node.id, len(node.key), self.now_s, is_awaited=True)
            self._unsettle_leaf_of(node)

    def _touch_node(self, node: UnifiedTreeNode) -> None:
        # SGLang's general insert; the plain one only touches what it says it used.
        super()._touch_node(node)
        if node in self.evictable_device_leaves:
            self._unsettle(node)

    def _split_node(self, key: Any, child: UnifiedTreeNode, split_len: int) -> Any:
        upper, action = super()._split_node(key, child, split_len)
        if (last_user := getattr(child, "echo_user", None)) is not None:
            upper.echo_user = last_user
        self.working_set.split(child.id, upper=upper.id, upper_tokens=split_len)
        if child in self.evictable_device_leaves:
            self._unsettle(child)
        return upper, action

    def _remove_leaf_from_parent(self, node: UnifiedTreeNode) -> None:
        super()._remove_leaf_from_parent(node)
        self.working_set.forget(node.id)
        if (last_user := getattr(node, "echo_user", None)) is not None:
            self.counts.cached_tokens[last_user] -= len(node.key)

    # ---- the index of leaves -----------------------------------------------------------------

    def _leaf_went(self, node: UnifiedTreeNode) -> None:
        if node in self._unsettled:
            del self._unsettled[node]
        self.order.drop(node.id)

    def _unsettle_leaf_of(self, node: UnifiedTreeNode) -> None:
        """The last node of a path that is on the device; the host tier has what is below."""
        while node.evicted:
            node = node.parent
        if node in self.evictable_device_leaves:
            self._unsettle(node)

    def _unsettle(self, node: UnifiedTreeNode) -> None:
        self._unsettled[node] = None
        if len(self._unsettled) > _MAX_UNSETTLED:
            oldest = next(iter(self._unsettled))
            del self._unsettled[oldest]
            self._settle(oldest)

    def _settle(self, node: UnifiedTreeNode) -> None:
        node.echo_facts = self.facts_of(node)
        self.order.put(node.echo_facts)

    def settle_all(self) -> None:
        """Give every leaf its place; the order is exact from here to the next change."""
        for node_id in self.working_set.expire(self.now_s):
            node = self._node_arena.get(node_id)
            if node in self.evictable_device_leaves:
                self._unsettled[node] = None
        # A dict emptied from its front is searched from there: a new one instead.
        unsettled, self._unsettled = self._unsettled, {}
        for node in unsettled:
            self._settle(node)

    # ---- eviction ----------------------------------------------------------------------------

    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None:
        if component_type is not _FULL:
            super().evict_device_start(component_type, request_cnt)
            return
        self._evict_goal_tokens = request_cnt
        self._evict_tried: set[int] = set()

    def evict_device_next_node(
        self, component_type: ComponentType, tracker: dict[ComponentType, int]
    ) -> EvictDeviceNextNodeResult:
        if component_type is not _FULL:
            return super().evict_device_next_node(component_type, tracker)
        result = EvictDeviceNextNodeResult()
        if tracker.get(_FULL, 0) >= self._evict_goal_tokens:
            return result
        self.settle_all()
        # One whose backup failed stays a leaf; the walk must not offer it again.
        tried = self._evict_tried
        victim = next((leaf for leaf in self.order.victims() if leaf not in tried), None)
        if victim is not None:
            tried.add(victim)
            self._spare_front(self.node_by_id(victim))
            result.node_id, result.made_progress = victim, True
        return result

    def _spare_front(self, leaf: UnifiedTreeNode) -> None:
        """Part a leaf where the last pending prompt leaves it: only what is behind may go.

        Nobody waits for a document with another one's question, but for the document.
        """
        # SGLang would have to be told of the parts of a node whose backup is on its way.
        is_backed_up_now = leaf.write_through_pending_id is not None
        if leaf.echo_facts.num_pending or is_backed_up_now or not self.order.needs_pending:
            return
        path = NodePath(leaf)
        start = len(path) - len(leaf.key)
        num_shared = self.pending.shared_tokens(
            namespace_of(leaf.key), path, at_least=start + self.page_size
        )
        num_tokens = num_shared // self.page_size * self.page_size - start
        if 0 < num_tokens < len(leaf.key):
            self._split_node(leaf.key, leaf, num_tokens)

    def evict_device_end(self, component_type: ComponentType) -> None:
        if component_type is not _FULL:
            super().evict_device_end(component_type)

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> EvictDeviceLeafResult:
        node = self.node_by_id(node_id)
        is_settled = node in self.evictable_device_leaves and node not in self._unsettled
        facts: LeafFacts = node.echo_facts if is_settled else self.facts_of(node)
        # A node with a host copy is read back, not computed again.
        path = NodePath(node) if facts.num_pending and not node.backuped else None
        result = super().evict_device_leaf(node_id, is_write_back)
        self._count_evicted(facts, result.tracker)
        if result.tracker and path is not None:
            self._lose(node, path)
        return result

    def drop_subtree_no_host(self, node_id: int) -> DropSubtreeNoHostResult:
        """A leaf that the host had no room for."""
        node = self.node_by_id(node_id)
        facts, path = self.facts_of(node), NodePath(node)
        result: DropSubtreeNoHostResult = super().drop_subtree_no_host(node_id)
        if result.is_dropped:
            self._count_evicted(facts, result.tracker)
            if facts.num_pending:
                self._lose(node, path)
        return result

    def _evict_host_leaf(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> None:
        """The host tier's own eviction, by recency: what was kept there is gone."""
        if self.facts_of(node).num_pending:
            self._lose(node, NodePath(node))
        super()._evict_host_leaf(node, *args, **kwargs)

    def _lose(self, node: UnifiedTreeNode, path: Sequence[int]) -> None:
        """No tier has this node's tokens, and requests wait for them."""
        self.lost.add(namespace_of(node.key), path, len(path) - len(node.key))

    def demote(self, node_id: int) -> DemoteResult:
        facts = self.facts_of(self.node_by_id(node_id))
        result: DemoteResult = super().demote(node_id)
        self._count_evicted(facts, result.tracker)
        return result

    def _count_evicted(self, facts: LeafFacts, freed: dict[ComponentType, int]) -> None:
        worth = _WORTH_NAMES[worth_of(facts)]
        self.counts.evicted_tokens[facts.task, worth] += freed.get(_FULL, 0)

    def charge_lost(self, req: Any) -> int:
        """Tokens that a starting request computes again because they were evicted."""
        tokens = req.origin_input_ids + req.output_ids
        charged = self.lost.charge(namespace_of(req), tokens, req.prefix_len)
        self.counts.punished_tokens += charged
        return charged


def _num_alike(one: array[int], other: array[int]) -> int:
    """Tokens that two sequences begin with alike, by bisection over slices."""
    alike, longest = 0, min(len(one), len(other))
    while alike < longest:
        half = alike + (longest - alike + 1) // 2
        if one[alike:half] == other[alike:half]:
            alike = half
        else:
            longest = half - 1
    return alike
