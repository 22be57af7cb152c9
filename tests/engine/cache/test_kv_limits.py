"""What online requests hold is looked into now and then, and before anybody starts or is shed."""

from __future__ import annotations

from types import SimpleNamespace

from echo_sgl.config import ReserveConfig
from echo_sgl.engine.cache.kv_limits import GROWTH_PARTS, OBSERVE_EVERY_S, KvLimits, needed_tokens

CAPACITY = GROWTH_PARTS * 100


def limits(active_tokens: int, min_tokens: int = 0) -> KvLimits:
    cache = SimpleNamespace(evictable_size=lambda: 0, echo_core=None)
    allocator = SimpleNamespace(size=CAPACITY, available_size=lambda: CAPACITY - active_tokens)
    config = ReserveConfig(predictor="off", min_tokens=min_tokens)
    return KvLimits(config, cache, allocator)


def test_small_changes_wait_and_large_ones_do_not():
    one = limits(active_tokens=CAPACITY)
    one.observe(1.0, 500)
    one.observe(1.0 + OBSERVE_EVERY_S / 2, 599)
    assert one.online_tokens == 500
    one.observe(1.0 + OBSERVE_EVERY_S / 2, 600)
    assert one.online_tokens == 600, "by a part of the pool"
    one.observe(1.0 + OBSERVE_EVERY_S / 2, 400)
    assert one.online_tokens == 400, "less as well as more"
    one.observe(1.0 + OBSERVE_EVERY_S * 2, 401)
    assert one.online_tokens == 401, "in time"


def test_who_is_within_is_told_by_what_is_noted_last_once_it_was_looked_at():
    """With 10 tokens kept and 500 online, offline requests may hold all but 510."""
    one = limits(active_tokens=CAPACITY, min_tokens=10)
    one.observe(1.0, 500)
    assert not one.is_within and one.excess_tokens(2) == 10
    one.observe(1.0, 550)
    assert one.offline_tokens == CAPACITY - 500
    one.look()
    assert one.offline_tokens == CAPACITY - 550
    free = limits(active_tokens=CAPACITY - 10, min_tokens=10)
    free.observe(1.0, 500)
    assert free.is_within and not free.excess_tokens(2)


def test_who_lacks_memory_though_it_is_alone_is_passed_over_until_there_is_enough():
    """15,000 tokens and what they and others are yet to generate do not fit into 18,000."""
    one = limits(active_tokens=CAPACITY - 18_000, min_tokens=100)
    one.observe(1.0, CAPACITY - 18_000)
    req = SimpleNamespace(seqlen=15_000)
    assert one.could_start(req)
    one.note_shortage(req, 4096 + 500)
    assert needed_tokens(req) == 19_596 and not one.could_start(req)
    one.observe(2.0, CAPACITY - 18_000 - 1700)
    assert one.could_start(req)


def test_who_lacks_more_than_there_is_comes_again_when_nobody_else_is_there():
    one = limits(active_tokens=0, min_tokens=100)
    one.observe(1.0, 0)
    req = SimpleNamespace(seqlen=CAPACITY - 200)
    one.note_shortage(req, 4096)
    assert one.could_start(req)


def test_of_a_model_with_sliding_windows_the_layers_without_count():
    """Its allocator speaks of the smaller pool when nobody asks for the other."""
    cache = SimpleNamespace(evictable_size=lambda: 6000, echo_core=None)
    allocator = SimpleNamespace(
        size=1000, size_full=10_000, available_size=lambda: 900, full_available_size=lambda: 1500
    )
    one = KvLimits(ReserveConfig(predictor="off"), cache, allocator)
    one.observe(1.0, 500)
    assert (one.capacity_tokens, one.active_tokens, one.offline_tokens) == (10_000, 2500, 2000)
