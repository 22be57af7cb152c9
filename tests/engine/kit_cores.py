"""SGLang's own cache fixtures, built on Echo's tree core."""

from __future__ import annotations

from array import array
from typing import Any
from unittest import mock

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig as KitConfig
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures
from sglang.test.kits.unified_radix_cache.unified_tree_core_inspector import (
    UnifiedTreeCoreInspector,
)

from echo_sgl.config import CacheConfig
from echo_sgl.engine.cache.tree_core import EchoTreeCore


class EchoInspector(EchoTreeCore, UnifiedTreeCoreInspector):
    """Echo's core with the white-box methods that SGLang's kits look through."""


def on_echo_core(order: str = "lru", **settings: Any) -> Any:
    """A context in which the kits' `build_fixture` builds Echo's core."""
    config = CacheConfig(order=order, **settings)
    return mock.patch.object(
        fixtures,
        "UnifiedTreeCoreInspector",
        lambda params, components: EchoInspector(params, components, config),
    )


def build(kit_config: KitConfig, order: str = "lru", **settings: Any) -> tuple[Any, Any, Any]:
    """(cache, allocator, request pool) on Echo's core."""
    with on_echo_core(order, **settings):
        return fixtures.build_fixture(kit_config)


def back_up(cache: Any, kit_config: KitConfig) -> None:
    """Give every node a host copy, as a tier that writes through would have by now."""
    kit = UnifiedRadixCacheFixtures()
    kit.cfg = kit_config
    cache.tree_core.set_hicache_enabled()
    kit._simulate_backup_tree(cache)


def key_of(tokens: list[int], extra_key: str | None = None) -> RadixKey:
    return RadixKey(array("q", tokens), extra_key=extra_key)


def insert(cache: Any, allocator: Any, tokens: list[int], extra_key: str | None = None) -> Any:
    """Insert a prompt whose KV is allocated here; slots that the tree had already are freed."""
    value = allocator.alloc(len(tokens))
    assert value is not None, "the test's pool is too small"
    return cache.insert(InsertParams(key=key_of(tokens, extra_key), value=value))


def match(cache: Any, tokens: list[int], extra_key: str | None = None) -> Any:
    return cache.match_prefix(MatchPrefixParams(key=key_of(tokens, extra_key)))
