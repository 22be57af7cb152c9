"""Who is told that a request ended when its KV is released, or stays with its session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from echo_sgl.engine.radix_cache import EchoRadixCache


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
