"""Nodes of a tree that keeps full attention only: a quarter of the objects of SGLang's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import (
    ComponentData,
    get_and_increase_time_counter,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

_NUM_COMPONENTS = len(ComponentType)
_FULL_ONLY = (ComponentType.FULL,)
_NO_LRU = (None,) * (2 * _NUM_COMPONENTS)


class _FullData(ComponentData):
    """A component's record that starts as its class's defaults and makes its dict when asked."""

    def __init__(self) -> None:
        """Nothing differs yet."""

    @cached_property
    def metadata(self) -> dict[str, Any]:
        return {}


class _AbsentData(ComponentData):
    """What a node holds of a component that its tree does not have: shared, never written."""

    metadata: Mapping[str, Any] = MappingProxyType({})

    def __init__(self) -> None:
        """Nothing ever differs."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a component that this tree does not have")


_ABSENT = (_AbsentData(),) * (_NUM_COMPONENTS - 1)


class PlainNode(UnifiedTreeNode):
    """A `UnifiedTreeNode` that stores only what differs from a new node's defaults.

    SGLang gives each node a record and two list links for each of its five components, 20
    objects that memory, cache lines and the garbage collector pay for; here the absent ones
    are shared. Attributes that most nodes never change are the class's.
    """

    component_types = _FULL_ONLY
    lru_prev = lru_next = _NO_LRU
    parent = key = hash_value = event_hash_value = None
    hit_count = _tlru_cached_prefix_len = _tlru_history_len = 0
    external_cache_stored = False
    write_through_pending_id = load_back_pending_id = rotation_base = None
    echo_user = None

    def __init__(self, priority: int = 0) -> None:
        self.children: dict[Any, UnifiedTreeNode] = {}
        self.component_data = (_FullData(), *_ABSENT)
        self.last_access_time = self.creation_time = get_and_increase_time_counter()
        self.priority = priority
        self.id = UnifiedTreeNode.counter
        UnifiedTreeNode.counter += 1
