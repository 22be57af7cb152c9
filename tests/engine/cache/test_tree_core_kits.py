"""SGLang's kits on Echo's tree core: every layout of the cache, against the stock core."""

import random
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig
from sglang.test.kits.unified_radix_cache.insert_walk import SegmentLockFuzzFixtures
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures

from tests.engine.kit_cores import insert, match, on_echo_core

FULL_ONLY = [config for config in CONFIGS if config.components == (ComponentType.FULL,)]
# The kit trims windows token by token, which only pages of one token allow.
WITH_SWA = [
    config
    for config in CONFIGS
    if config.has_swa and not config.has_mamba and config.page_size == 1
]


def label(config: CacheConfig) -> str:
    return config.label


def kit(mixin: type, config: CacheConfig) -> Any:
    """One of the kit's test mixins, outside unittest."""
    instance = mixin()
    instance.cfg = config
    return instance


def shape_of(cache: Any) -> Any:
    """The tree as nested (tokens, lock, on device, on host, children)."""
    core = cache.tree_core

    def describe(node: Any) -> Any:
        data = node.component_data[ComponentType.FULL]
        children = sorted((describe(child) for child in node.children.values()), key=repr)
        held = data.value is not None, data.host_value is not None
        return list(node.key.raw_token_ids()), data.lock_ref, held, children

    return describe(core.root_node)


class Twin(UnifiedRadixCacheFixtures):
    """One random sequence of operations on one cache; run on both cores, it must agree."""

    def __init__(self, config: CacheConfig, seed: int) -> None:
        self.cfg, self.random = config, random.Random(seed)
        self.chains: list[list[int]] = []
        self.locked: list[tuple[int, Any]] = []

    def run(self, built: tuple[Any, Any, Any], steps: int, *, has_host_tier: bool = False) -> Any:
        self.cache, self.allocator, self.pool = built
        if has_host_tier:
            self.cache.tree_core.set_hicache_enabled()
        log = []
        for _ in range(steps):
            if has_host_tier and self.random.random() < 0.3:
                self._simulate_backup_tree(self.cache)
            log.append((self.step(), shape_of(self.cache), self.cache.take_events()))
            self.cache.sanity_check()
        for node, receipt in self.locked:
            self.cache.dec_lock_ref(node, receipt.to_dec_params())
        self.cache.evict(EvictParams(num_tokens=10**9))
        return log, shape_of(self.cache), self.allocator.available_size()

    def step(self) -> Any:
        chance = self.random.random()
        if chance < 0.45 or not self.chains:
            return self.insert_one()
        tokens = self.random.choice(self.chains)
        if chance < 0.6:
            return match(self.cache, tokens).device_prefix_len
        if chance < 0.75:
            return self.lock(match(self.cache, tokens).last_device_node)
        if chance < 0.88 and self.locked:
            node, receipt = self.locked.pop(self.random.randrange(len(self.locked)))
            return self.cache.dec_lock_ref(node, receipt.to_dec_params())
        wanted = self.random.randrange(1, 4) * self.cfg.page_size
        return self.cache.evict(EvictParams(num_tokens=wanted)).num_tokens_evicted

    def lock(self, node: int) -> None:
        if not self.cache.tree_core.is_root(node):
            self.locked.append((node, self.cache.inc_lock_ref(node)))

    def insert_one(self) -> Any:
        tokens = self._make_seq(self.random.randrange(1, 50) * 10_000, self.random.randrange(1, 4))
        if self.chains and self.random.random() < 0.7:
            base = self.random.choice(self.chains)
            pages = self.random.randrange(len(base) // self.cfg.page_size + 1)
            tokens = base[: pages * self.cfg.page_size] + tokens
        if self.allocator.available_size() < len(tokens):
            self.cache.evict(EvictParams(num_tokens=len(tokens)))
        if self.allocator.available_size() < len(tokens):
            return "full"
        self.chains.append(tokens)
        return insert(self.cache, self.allocator, tokens).prefix_len


@pytest.mark.parametrize("config", FULL_ONLY, ids=label)
@pytest.mark.parametrize("seed", range(3))
def test_recency_order_does_exactly_what_the_stock_core_does(
    config: CacheConfig, seed: int
) -> None:
    # With events the tree takes SGLang's general walks, without them our plain ones.
    events = seed == 0
    stock = fixtures.build_fixture(config, enable_kv_cache_events=events)
    with on_echo_core("lru", protected_share=0.0):
        ours = fixtures.build_fixture(config, enable_kv_cache_events=events)
    expected = Twin(config, seed).run(stock, 80)
    assert Twin(config, seed).run(ours, 80) == expected
    assert any(entry[0] not in ("full", None) for entry in expected[0])


@pytest.mark.parametrize("order", ["lru", "echo", "next-use"])
@pytest.mark.parametrize("config", WITH_SWA, ids=label)
def test_segment_lock_fuzz_kit(config: CacheConfig, order: str) -> None:
    with on_echo_core(order):
        for seed in range(3):
            kit(SegmentLockFuzzFixtures, config)._run_seed(seed)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_every_layout_holds_and_frees_what_the_stock_core_does(config: CacheConfig) -> None:
    def story(built: tuple[Any, Any, Any]) -> Any:
        cache, allocator, pool = built
        mixin = kit(UnifiedRadixCacheFixtures, config)
        first, shapes = mixin._make_seq(1, 3), []
        for number, pages in enumerate((3, 1, 2), start=1):
            start = first[: (pages - 1) * config.page_size]
            tokens = start + mixin._make_seq(1000 * number, 2)
            mixin._insert(cache, allocator, pool, first if number == 1 else tokens)
            shapes.append(shape_of(cache))
        evicted = cache.evict(EvictParams(num_tokens=config.page_size))
        cache.sanity_check()
        everything = EvictParams(num_tokens=10**6, swa_num_tokens=10**6, mamba_num=100)
        return shapes, evicted, shape_of(cache), cache.evict(everything), shape_of(cache)

    expected = story(fixtures.build_fixture(config))
    with on_echo_core("lru", protected_share=0.0):
        assert story(fixtures.build_fixture(config)) == expected
    assert expected[1].num_tokens_evicted >= config.page_size and not expected[-1][-1]


@pytest.mark.parametrize("config", [c for c in FULL_ONLY if c.page_size in (1, 16)], ids=label)
def test_nodes_with_a_host_copy_are_demoted_as_the_stock_core_does(config: CacheConfig) -> None:
    stock = fixtures.build_fixture(config)
    with on_echo_core("lru", protected_share=0.0):
        ours = fixtures.build_fixture(config)
    expected = Twin(config, 7).run(stock, 80, has_host_tier=True)
    assert Twin(config, 7).run(ours, 80, has_host_tier=True) == expected
    assert "False, True" in repr(expected), "no node was ever on the host only"
