"""Match and insert for the plain layout: full attention, one tier, no KV events.

SGLang's Python core walks every layout it knows with one general algorithm. Most servers run
the plain one, where a node matches when its tokens equal a slice of the prompt; there these
walks give the same tree, results and actions in a third of the time. Everything else takes
SGLang's own path.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (
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
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import InsertStepResult

# SGLang's own spacing between the access times of a path's nodes.
_ANCESTOR_AGE = 0.00001
_FULL = ComponentType.FULL


class PlainWalks(UnifiedTreeCore):
    """`UnifiedTreeCore` with a short way through plain trees."""

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key = params.key
        if not self._is_plain or key.is_bigram:
            return super().match_prefix(params)
        node, num_matched, partial = self._descend(key)
        actions = []
        if partial is not None:
            common = partial.key.match_at(key, num_matched, page_size=self.page_size)
            if common:
                node, action = self._split_node(partial.key, partial, common)
                num_matched += common
                actions = [action] if action is not None else []
        if node is self.root_node:
            return self._empty_match_result
        self._touch_path(node)
        return MatchResult(
            device_prefix_len=num_matched,
            last_device_node=node.id,
            last_host_node=node.id,
            best_match_node=node.id,
            last_visited_node_id=node.id,
            full_kv_hit_length=num_matched,
            cache_actions=actions,
        )

    def begin_insert(self, params: InsertParams) -> InsertStepResult:
        key, value = params.key, params.value
        is_special = params.track_adopted_ranges or params.rotation_base is not None
        if not self._is_plain or key.is_bigram or value is None or is_special:
            return super().begin_insert(params)
        priority = params.priority or 0
        self._touch_node(self.root_node)
        node, num_matched, partial = self._descend(key, priority=priority, params=params)
        end = len(key) // self.page_size * self.page_size
        if partial is not None:
            common = partial.key.match_at(key, num_matched, page_size=self.page_size)
            self._touch_node(partial)
            node, _ = self._split_node(partial.key, partial, common)
            num_matched += common
            self._visit(node, num_matched, priority, params)
        actions = []
        if params.prev_prefix_len < num_matched:
            actions.append(FreeDeviceKV([value[params.prev_prefix_len : num_matched]]))
        if num_matched < end:
            leaf_key = RadixKey(
                key.token_ids[num_matched:end], key.extra_key, cache_salt=key.cache_salt
            )
            node = self._add_new_node(node, leaf_key, value[num_matched:end], priority=priority)
            self._count_hit(node, end, params)
        self._inserted(node)
        return InsertStepResult(
            actions=actions,
            result=InsertResult(
                prefix_len=num_matched, last_device_node=node.id, mamba_exist=end == 0
            ),
        )

    def _update_evictable_leaf_sets(self, node: UnifiedTreeNode) -> None:
        if not self._is_plain:
            super()._update_evictable_leaf_sets(node)
        elif node.children or node.component_data[_FULL].lock_ref or node is self.root_node:
            self.evictable_device_leaves.discard(node)
        elif node.component_data[_FULL].value is not None:
            self.evictable_device_leaves.add(node)
        else:
            self.evictable_device_leaves.discard(node)

    def _inserted(self, node: UnifiedTreeNode) -> None:
        """An insert ended on this node."""

    @property
    def _is_plain(self) -> bool:
        # The tiers may be attached after the tree was made.
        return self._is_plain_layout and not (
            self.enable_hicache or self.enable_external_cache_linker
        )

    @cached_property
    def _is_plain_layout(self) -> bool:
        return (
            len(self.components) == 1
            and type(self.components[0]) is FullComponent
            and not self.kv_events.enabled
            and not self.tlru_bookkeeping
            and not self.is_eagle
        )

    def _descend(
        self, key: RadixKey, *, priority: int | None = None, params: Any = None
    ) -> tuple[UnifiedTreeNode, int, UnifiedTreeNode | None]:
        """Walk down over whole nodes: the last one, tokens passed, and a child that begins alike.

        With `params` each node on the way is visited as an insert does.
        """
        tokens, page_size = key.token_ids, self.page_size
        end = len(key) // page_size * page_size
        node, offset = self.root_node, 0
        while offset < end:
            child = node.children.get(key.child_key_at(offset, page_size))
            if child is None:
                break
            child_tokens = child.key.token_ids
            behind = offset + len(child_tokens)
            if behind > end or tokens[offset:behind] != child_tokens:
                return node, offset, child
            node, offset = child, behind
            if params is not None:
                self._touch_node(node)
                self._visit(node, offset, priority or 0, params)
        return node, offset, None

    def _visit(self, node: UnifiedTreeNode, end: int, priority: int, params: Any) -> None:
        node.priority = max(node.priority, priority)
        self._count_hit(node, end, params)

    def _count_hit(self, node: UnifiedTreeNode, end: int, params: Any) -> None:
        """A request counts each node once, when it inserts it."""
        if end > params.inserted_len and not self.is_write_back:
            node.hit_count += 1

    def _touch_path(self, node: UnifiedTreeNode | None) -> None:
        access_time = get_and_increase_time_counter()
        while node is not None:
            node.last_access_time = access_time
            access_time -= _ANCESTOR_AGE
            node = node.parent
