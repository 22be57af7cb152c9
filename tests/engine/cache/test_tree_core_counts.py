"""What the tree core counts: cached tokens by class, evictions by worth, punished tokens."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.kits.unified_radix_cache.config import CacheConfig as KitConfig

from echo_sgl.engine.pool.offline_pool import OfflinePool
from echo_sgl.policies.order.offline_order import PsmOrder
from echo_sgl.types import Task
from tests.engine.kit_cores import back_up, build, insert, match

DOCUMENT = list(range(100, 140))
OTHER = list(range(500, 530))
KIT = KitConfig(page_size=1, kv_size=256)


@pytest.fixture
def cache() -> Any:
    return cache_of(KIT, "echo", protected_share=0.25)


def cache_of(kit: KitConfig, order: str, *, protected_share: float) -> Any:
    built, allocator, _ = build(kit, order, protected_share=protected_share)
    built.tokens = allocator
    built.pool = OfflinePool(PsmOrder(), capacity=100)
    built.tree_core.pending = built.pool
    built.pool.on_change = built.tree_core.prompt_changed
    return built


def put(cache: Any, tokens: list[int], user: Task) -> None:
    cache.tree_core.user = user
    insert(cache, cache.tokens, tokens)


def wait_for(cache: Any, rid: str, tokens: list[int]) -> Any:
    req = SimpleNamespace(
        rid=rid,
        origin_input_ids=array("q", tokens),
        output_ids=array("q"),
        seqlen=len(tokens),
        prefix_len=0,
        extra_key=None,
        cache_salt=None,
    )
    cache.pool.add(req, entry_s=0.0, resumed=False)
    return req


def test_cached_tokens_follow_the_last_user_and_fall_with_eviction(cache):
    put(cache, DOCUMENT, Task.OFFLINE)
    put(cache, OTHER, Task.OFFLINE)
    assert cache.tree_core.counts.cached_tokens == {Task.ONLINE: 0, Task.OFFLINE: 70}
    cache.tree_core.user = Task.ONLINE
    match(cache, OTHER[:20])
    assert cache.tree_core.counts.cached_tokens == {Task.ONLINE: 20, Task.OFFLINE: 50}
    cache.evict(EvictParams(num_tokens=1000))
    assert cache.tree_core.counts.cached_tokens == {Task.ONLINE: 0, Task.OFFLINE: 0}


@pytest.mark.parametrize("num_computed", [20, 31])
def test_a_leaf_learns_that_a_request_ended_whether_it_was_computed_or_not(cache, num_computed):
    prompt = [*DOCUMENT[:30], 1]
    put(cache, prompt[:30], Task.OFFLINE)
    put(cache, [*prompt[:20], *OTHER], Task.OFFLINE)  # the document's leaf begins at 20
    req = wait_for(cache, "r1", prompt)
    cache.pool.upcoming(1)
    cache.pool.take(req)
    assert leaves(cache) == [(30, 0), (10, 1)]
    put(cache, prompt[:num_computed], Task.OFFLINE)
    cache.pool.end(req, num_cached_tokens=num_computed)
    assert leaves(cache) == [(30, 0), (10 if num_computed == 20 else 1, 0)]


def leaves(cache: Any) -> list[tuple[int, int]]:
    """Tokens of each leaf, and how many pending requests it is known to be needed by."""
    victims = cache.tree_core.next_victims()
    return sorted(((tokens, facts.num_pending) for tokens, facts in victims), reverse=True)


def test_evictions_are_counted_by_what_the_tokens_were_worth(cache):
    put(cache, DOCUMENT, Task.OFFLINE)
    put(cache, OTHER, Task.ONLINE)
    put(cache, list(range(700, 710)), Task.OFFLINE)
    wait_for(cache, "r1", [*DOCUMENT, 1])
    cache.evict(EvictParams(num_tokens=1000))
    assert dict(cache.tree_core.counts.evicted_tokens) == {
        (Task.OFFLINE, "done_offline"): 10,
        (Task.OFFLINE, "pending"): 40,
        (Task.ONLINE, "protected"): 30,
    }


def test_what_is_evicted_from_under_a_pending_request_is_its_punishment(cache):
    req = wait_for(cache, "r1", [*DOCUMENT, 1])
    put(cache, DOCUMENT, Task.OFFLINE)
    cache.evict(EvictParams(num_tokens=1000))
    assert cache.tree_core.charge_lost(req) == len(DOCUMENT)
    assert cache.tree_core.counts.punished_tokens == len(DOCUMENT)
    assert cache.tree_core.charge_lost(req) == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_of_a_leaf_only_what_nobody_waits_for_goes(page_size):
    kit = KitConfig(page_size=page_size, kv_size=256)
    cache = cache_of(kit, "next-use", protected_share=0.0)
    document = list(range(100, 164))
    put(cache, [*document, *range(20, 52)], Task.OFFLINE)
    req = wait_for(cache, "r1", [*document, *range(60, 92)])
    cache.evict(EvictParams(num_tokens=1))
    assert match(cache, document).device_prefix_len == len(document)
    cache.pool.remove(req.rid)
    cache.evict(EvictParams(num_tokens=1))
    assert match(cache, document).device_prefix_len == 0


def test_what_the_host_tier_keeps_is_lost_when_it_goes_from_there_too(cache):
    req = wait_for(cache, "r1", [*DOCUMENT, 1])
    put(cache, DOCUMENT, Task.OFFLINE)
    back_up(cache, KIT)
    cache.evict(EvictParams(num_tokens=1000))
    assert cache.tree_core.counts.evicted_tokens[Task.OFFLINE, "pending"] == len(DOCUMENT)
    assert not cache.tree_core.lost
    cache.tree_core.drive_host_eviction(ComponentType.FULL, 1000)
    assert cache.tree_core.charge_lost(req) == len(DOCUMENT)


def test_a_leaf_above_what_only_the_host_has_moves_when_somebody_waits_for_that(cache):
    put(cache, [*DOCUMENT, 1, 2, 3], Task.OFFLINE)
    put(cache, [*DOCUMENT, 4, 5], Task.OFFLINE)
    put(cache, OTHER, Task.OFFLINE)
    back_up(cache, KIT)
    cache.evict(EvictParams(num_tokens=5))
    victims = cache.tree_core.next_victims
    assert [tokens for tokens, _ in victims()] == [len(DOCUMENT), len(OTHER)]
    wait_for(cache, "r1", [*DOCUMENT, 1, 2, 3, 9])
    assert [tokens for tokens, _ in victims()] == [len(OTHER), len(DOCUMENT)]


def test_a_leaf_that_finds_no_room_on_the_host_is_lost(cache):
    req = wait_for(cache, "r1", [*DOCUMENT, 1])
    put(cache, DOCUMENT, Task.OFFLINE)
    cache.tree_core.set_hicache_enabled()
    leaf = match(cache, DOCUMENT).last_device_node
    assert cache.tree_core.drop_subtree_no_host(leaf).is_dropped
    assert cache.tree_core.counts.evicted_tokens[Task.OFFLINE, "pending"] == len(DOCUMENT)
    assert cache.tree_core.charge_lost(req) == len(DOCUMENT)


def test_online_use_beyond_the_share_protects_the_latest(cache):
    put(cache, DOCUMENT, Task.ONLINE)
    put(cache, OTHER, Task.ONLINE)
    cache.tree_core.settle_all()
    # A quarter of 256 tokens: only the last used fits.
    assert cache.tree_core.working_set.num_tokens == len(OTHER)
    cache.evict(EvictParams(num_tokens=1))
    assert match(cache, OTHER).device_prefix_len == len(OTHER)
    assert match(cache, DOCUMENT).device_prefix_len == 0


def test_what_a_retracted_online_request_comes_back_to_goes_last():
    """Without a share for online requests, and beside a document that an offline one waits for."""
    cache = cache_of(KIT, "next-use", protected_share=0.0)
    wait_for(cache, "r1", [*DOCUMENT, 1])
    put(cache, OTHER, Task.ONLINE)
    put(cache, DOCUMENT, Task.OFFLINE)
    retracted = SimpleNamespace(
        origin_input_ids=array("q", OTHER[:20]),
        output_ids=array("q", [*OTHER[20:], 7]),
        extra_key=None,
        cache_salt=None,
    )
    cache.tree_core.await_return(retracted, len(OTHER))
    cache.evict(EvictParams(num_tokens=1))
    assert match(cache, DOCUMENT).device_prefix_len == 0
    assert match(cache, OTHER).device_prefix_len == len(OTHER)
    # It came back: its next end is that of any other.
    cache.evict(EvictParams(num_tokens=1))
    assert match(cache, OTHER).device_prefix_len == 0


def test_tokens_on_a_locked_path_are_not_new(cache):
    put(cache, DOCUMENT, Task.OFFLINE)
    node = match(cache, DOCUMENT[:25]).last_device_node
    match(cache, DOCUMENT)
    assert cache.tree_core.locked_tokens(node) == 0
    lock = cache.inc_lock_ref(node)
    leaf = match(cache, DOCUMENT).last_device_node
    assert cache.tree_core.locked_tokens(leaf) == 25
    cache.dec_lock_ref(node, lock.to_dec_params())
    assert cache.tree_core.locked_tokens(leaf) == 0
