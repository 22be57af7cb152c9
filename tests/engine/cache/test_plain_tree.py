"""The lean nodes and tensors of plain trees hold what SGLang's code expects of them."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
from sglang.test.kits.unified_radix_cache.config import CacheConfig as KitConfig

from echo_sgl.engine.cache.plain_node import PlainNode
from tests.engine.kit_cores import build, insert, match

DOCUMENT = list(range(100, 140))
STAMPS = {"id", "last_access_time", "creation_time"}


@pytest.fixture
def cache() -> Any:
    built, allocator, _ = build(KitConfig(page_size=1, kv_size=256), "lru")
    built.tokens = allocator
    return built


def node_of(cache: Any, tokens: list[int]) -> Any:
    return cache.tree_core.node_by_id(match(cache, tokens).last_device_node)


def held_tokens(node: Any) -> int:
    """Tokens whose slots the node's tensor keeps in memory."""
    value = node.component_data[ComponentType.FULL].value
    return int(value.untyped_storage().nbytes() // value.element_size())


def test_a_plain_node_has_every_attribute_that_a_stock_one_starts_with():
    stock, plain = UnifiedTreeNode((ComponentType.FULL,), priority=3), PlainNode(3)
    for name, value in vars(stock).items():
        held = getattr(plain, name)
        if name not in {*STAMPS, "component_data"}:
            assert held == value or list(held) == value, name
    for held, expected in zip(plain.component_data, stock.component_data, strict=True):
        assert {name: getattr(held, name) for name in vars(expected)} == vars(expected)
    assert plain.id == stock.id + 1
    assert plain.last_access_time > stock.creation_time


def test_components_that_a_tree_lacks_cannot_be_written_by_mistake():
    node = PlainNode()
    for component in set(ComponentType) - {ComponentType.FULL}:
        with pytest.raises(AttributeError, match="lock_ref of a component"):
            node.component_data[component].lock_ref = 1
        with pytest.raises(TypeError):
            node.component_data[component].metadata["key"] = 1
    node.component_data[ComponentType.FULL].lock_ref = 1
    assert PlainNode().component_data[ComponentType.FULL].lock_ref == 0


def test_only_full_attention_trees_have_plain_nodes(cache):
    assert isinstance(cache.tree_core.root_node, PlainNode)
    with_swa = (ComponentType.FULL, ComponentType.SWA)
    other, _, _ = build(KitConfig(page_size=1, components=with_swa, sliding_window_size=4))
    assert type(other.tree_core.root_node) is UnifiedTreeNode


def test_a_split_node_keeps_no_more_slots_in_memory_than_its_path_holds(cache):
    insert(cache, cache.tokens, DOCUMENT)
    for end in (30, 20, 10):
        assert held_tokens(node_of(cache, DOCUMENT[:end])) == end
    leaf = node_of(cache, DOCUMENT)
    assert held_tokens(leaf) <= len(DOCUMENT)
    cache.evict(EvictParams(num_tokens=30))
    assert match(cache, DOCUMENT).device_prefix_len == 10
    assert held_tokens(node_of(cache, DOCUMENT)) == 10
    cache.sanity_check()


def test_a_lock_released_twice_is_noticed(cache):
    insert(cache, cache.tokens, DOCUMENT)
    node = match(cache, DOCUMENT).last_device_node
    lock = cache.inc_lock_ref(node)
    assert lock.delta == len(DOCUMENT)
    assert cache.tree_core.protected_size() == len(DOCUMENT)
    cache.dec_lock_ref(node, lock.to_dec_params())
    with pytest.raises(AssertionError, match="released more often"):
        cache.dec_lock_ref(node, lock.to_dec_params())
