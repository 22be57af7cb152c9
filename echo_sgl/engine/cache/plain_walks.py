"""The tree's operations for the plain layout: full attention, one tier, no KV events.

SGLang's Python core runs every layout it knows through one general algorithm. Most servers
run the plain one, where a node matches when its tokens equal a slice of the prompt and every
node holds KV; there these give the same tree, results and actions in less than half the time.
Everything else takes SGLang's own path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import get_and_increase_time_counter
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceLeafResult,
    InsertStepResult,
)

from echo_sgl.engine.cache.plain_node import PlainNode

# SGLang's own spacing between the access times of a path's nodes.
_ANCESTOR_AGE = 0.00001
_FULL = ComponentType.FULL


class PlainWalks(UnifiedTreeCore):
    """`UnifiedTreeCore` with a short way through plain trees."""

    # ---- match and insert ------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key = params.key
        if not self._is_plain or key.is_bigram:
            return super().match_prefix(params)
        node, num_matched, partial = self._descend(key, self._end_of(key))
        if partial is not None:
            common = partial.key.match_at(key, num_matched, page_size=self.page_size)
            if common:
                node, _ = self._split_node(partial.key, partial, common)
                num_matched += common
        if node is self.root_node:
            return self._empty_match_result
        self._touch_path(node)
        node_id = node.id
        return MatchResult(
            num_matched,
            node_id,
            node_id,
            node_id,
            last_visited_node_id=node_id,
            full_kv_hit_length=num_matched,
            cache_actions=[],
        )

    def begin_insert(self, params: InsertParams) -> InsertStepResult:
        key, value = params.key, params.value
        is_special = params.track_adopted_ranges or params.rotation_base is not None
        if not self._is_plain or key.is_bigram or value is None or is_special:
            return super().begin_insert(params)
        self.root_node.last_access_time = get_and_increase_time_counter()
        end = self._end_of(key)
        node, num_matched, partial = self._descend(key, end, inserting=params)
        if partial is not None:
            common = partial.key.match_at(key, num_matched, page_size=self.page_size)
            node, _ = self._split_node(partial.key, partial, common)
            num_matched += common
            self._visit(node, num_matched, params)
        actions = []
        if params.prev_prefix_len < num_matched:
            actions.append(FreeDeviceKV([value[params.prev_prefix_len : num_matched]]))
        if num_matched < end:
            leaf = self._new_node(params.priority or 0)
            self._attach(node, leaf, _part(key, num_matched, end), value[num_matched:end])
            self._visit(leaf, end, params)
            node = leaf
        self._inserted(node)
        result = InsertResult(
            prefix_len=num_matched, last_device_node=node.id, mamba_exist=end == 0
        )
        return InsertStepResult(actions=actions, result=result)

    def _inserted(self, node: UnifiedTreeNode) -> None:
        """An insert ended on this node."""

    def _end_of(self, key: RadixKey) -> int:
        """Tokens of a key in whole pages."""
        return len(key) // self.page_size * self.page_size

    def _descend(
        self, key: RadixKey, end: int, *, inserting: InsertParams | None = None
    ) -> tuple[UnifiedTreeNode, int, UnifiedTreeNode | None]:
        """Walk down over whole nodes: the last one, tokens passed, and a child that begins alike.

        An insert visits each node on the way.
        """
        tokens, page_size = key.token_ids, self.page_size
        # One token without a namespace is its own child key.
        is_bare = page_size == 1 and key.extra_key is None and key.cache_salt is None
        node, offset = self.root_node, 0
        while offset < end:
            child_key = tokens[offset] if is_bare else key.child_key_at(offset, page_size)
            child = node.children.get(child_key)
            if child is None:
                break
            child_tokens = child.key.token_ids
            behind = offset + len(child_tokens)
            if behind > end or tokens[offset:behind] != child_tokens:
                return node, offset, child
            node, offset = child, behind
            if inserting is not None:
                self._visit(node, offset, inserting)
        return node, offset, None

    def _visit(self, node: UnifiedTreeNode, end: int, params: InsertParams) -> None:
        """Note an insert's way through a node; a request counts each one once."""
        node.last_access_time = get_and_increase_time_counter()
        priority = params.priority or 0
        node.priority = max(node.priority, priority)
        if end > params.inserted_len and not self.is_write_back:
            node.hit_count += 1

    def _touch_path(self, node: UnifiedTreeNode | None) -> None:
        access_time = get_and_increase_time_counter()
        while node is not None:
            node.last_access_time = access_time
            access_time -= _ANCESTOR_AGE
            node = node.parent

    # ---- nodes -----------------------------------------------------------------------------

    def _new_node(self, priority: int = 0) -> UnifiedTreeNode:
        if not self._has_full_only:
            return super()._new_node(priority)
        node = PlainNode(priority)
        self._node_arena[node.id] = node
        return node

    def _attach(
        self, parent: UnifiedTreeNode, leaf: UnifiedTreeNode, key: RadixKey, value: Any
    ) -> None:
        leaf.parent, leaf.key = parent, key
        leaf.component_data[_FULL].value = value.clone()
        parent.children[key.child_key_at(0, self.page_size)] = leaf
        self.component_evictable_size_[_FULL] += len(key.token_ids)
        self.evictable_device_leaves.add(leaf)
        self.evictable_device_leaves.discard(parent)

    def _split_node(
        self, key: RadixKey, child: UnifiedTreeNode, split_len: int
    ) -> tuple[UnifiedTreeNode, Any]:
        if not self._is_plain:
            upper, action = super()._split_node(key, child, split_len)
            return upper, action
        upper, lower_data = self._new_node(child.priority), child.component_data[_FULL]
        upper.parent, upper.hit_count = child.parent, child.hit_count
        upper.creation_time = child.creation_time
        upper.key, child.key = _part(key, 0, split_len), _part(key, split_len, None)
        upper.parent.children[upper.key.child_key_at(0, self.page_size)] = upper
        upper.children[child.key.child_key_at(0, self.page_size)] = child
        child.parent = upper
        upper_data, value = upper.component_data[_FULL], lower_data.value
        upper_data.lock_ref, upper_data.value = lower_data.lock_ref, value[:split_len].clone()
        # A view: the rest of what it holds on to belongs to the upper node, which outlives it.
        lower_data.value = value[split_len:]
        child.last_access_time = get_and_increase_time_counter()
        return upper, None

    def _remove_leaf_from_parent(self, node: UnifiedTreeNode) -> None:
        if not self._is_plain:
            super()._remove_leaf_from_parent(node)
            return
        del node.parent.children[node.key.child_key_at(0, self.page_size)]
        del self._node_arena[node.id]

    def _update_evictable_leaf_sets(self, node: UnifiedTreeNode) -> None:
        if not self._is_plain:
            super()._update_evictable_leaf_sets(node)
        elif node.children or node.component_data[_FULL].lock_ref or node is self.root_node:
            self.evictable_device_leaves.discard(node)
        else:
            self.evictable_device_leaves.add(node)

    # ---- locks and eviction ----------------------------------------------------------------

    def inc_lock_ref(
        self, node_id: int, skip_lock_components: Sequence[ComponentType] = ()
    ) -> IncLockRefResult:
        if not self._is_plain or skip_lock_components:
            return super().inc_lock_ref(node_id, skip_lock_components)
        node, num_locked = self._node_arena[node_id], 0
        self.evictable_device_leaves.discard(node)
        while node is not self.root_node:
            data = node.component_data[_FULL]
            if not data.lock_ref:
                num_locked += len(node.key.token_ids)
            data.lock_ref += 1
            node = node.parent
        self.component_evictable_size_[_FULL] -= num_locked
        self.component_protected_size_[_FULL] += num_locked
        return IncLockRefResult(num_locked, node_id)

    def dec_lock_ref(
        self, node_id: int, params: DecLockRefParams, skip_swa: bool = False
    ) -> DecLockRefResult:
        if not self._is_plain or params.skipped_lock_components:
            return super().dec_lock_ref(node_id, params, skip_swa)
        leaf = node = self._node_arena[node_id]
        self._assert_receipt_anchor(node, params)
        num_unlocked = 0
        while node is not self.root_node:
            data = node.component_data[_FULL]
            assert data.lock_ref > 0, f"node {node.id} is released more often than locked"
            data.lock_ref -= 1
            if not data.lock_ref:
                num_unlocked += len(node.key.token_ids)
            node = node.parent
        self.component_evictable_size_[_FULL] += num_unlocked
        self.component_protected_size_[_FULL] -= num_unlocked
        self._update_evictable_leaf_sets(leaf)
        return DecLockRefResult()

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> EvictDeviceLeafResult:
        if not self._is_plain or is_write_back:
            return super().evict_device_leaf(node_id, is_write_back)
        node = self._node_arena[node_id]
        assert node in self.evictable_device_leaves, f"node {node_id} is not a D-leaf"
        num_tokens = len(node.key.token_ids)
        result = EvictDeviceLeafResult()
        result.device_frees[_FULL].append(node.component_data[_FULL].value)
        result.tracker[_FULL] += num_tokens
        result.unbacked_tokens = num_tokens
        self.component_evictable_size_[_FULL] -= num_tokens
        self.evictable_device_leaves.discard(node)
        self._remove_leaf_from_parent(node)
        self._update_evictable_leaf_sets(node.parent)
        return result

    # ---- which layout this is --------------------------------------------------------------

    @property
    def _is_plain(self) -> bool:
        # The tiers may be attached after the tree was made.
        return self._is_plain_layout and not (
            self.enable_hicache or self.enable_external_cache_linker
        )

    @cached_property
    def _is_plain_layout(self) -> bool:
        return (
            self._has_full_only
            and type(self.components[0]) is FullComponent
            and not self.kv_events.enabled
            and not self.tlru_bookkeeping
            and not self.is_eagle
            and not self.enable_session_radix_cache
        )

    @cached_property
    def _has_full_only(self) -> bool:
        return self.component_types == (_FULL,)


def _part(key: RadixKey, start: int, end: int | None) -> RadixKey:
    """A key of some of the tokens, in the same namespace."""
    return RadixKey(key.token_ids[start:end], key.extra_key, cache_salt=key.cache_salt)
