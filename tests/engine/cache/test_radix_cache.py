"""Who is told that a request ended when its KV is released, or stays with its session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.kits.unified_radix_cache.config import CacheConfig as KitConfig

from echo_sgl.engine.cache.radix_cache import EchoRadixCache
from echo_sgl.types import Task
from tests.engine.kit_cores import build, insert, key_of, match


@pytest.mark.parametrize(
    ("keeps", "is_over", "is_told"), [(1, 1, True), (1, 0, False), (0, 1, False)]
)
def test_a_turn_whose_kv_stays_with_its_session_ends_when_it_is_finished(
    monkeypatch: pytest.MonkeyPatch, keeps: int, is_over: int, is_told: bool
) -> None:
    """A retracted turn is kept, too, and one that is not kept is released after this."""
    monkeypatch.setattr(UnifiedRadixCache, "claim_kv_row", lambda self, req: bool(keeps))
    cache = EchoRadixCache.__new__(EchoRadixCache)
    told: list[tuple[Any, int]] = []
    cache.on_end = lambda req, num_tokens: told.append((req, num_tokens))
    turn = SimpleNamespace(finished=lambda: bool(is_over))
    assert cache.claim_kv_row(turn) is bool(keeps)
    assert told == ([(turn, 0)] if is_told else [])


def test_what_sglangs_queue_waits_for_is_touched_for_online_requests() -> None:
    """Whoever was served last may be offline."""
    cache, allocator, _ = build(KitConfig(page_size=1, kv_size=64), "echo")
    core = cache.tree_core
    core.user = Task.ONLINE
    insert(cache, allocator, [1, 2, 3])
    node = core.node_by_id(match(cache, [1, 2, 3]).last_device_node)
    core.user = Task.OFFLINE
    cache.__class__ = EchoRadixCache
    cache.touch_prefix(key_of([1, 2, 3]))
    assert node.echo_user is Task.ONLINE
