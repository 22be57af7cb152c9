"""What a retraction of several requests would free, on SGLang's own tree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.session.streaming_session import _VirtualNode
from sglang.test.kits.unified_radix_cache.config import CacheConfig as KitConfig

from echo_sgl.config import ReserveConfig
from echo_sgl.engine.cache.held_tokens import held_tokens
from echo_sgl.engine.cache.kv_limits import KvLimits
from tests.engine.kit_cores import build, insert, match

DOCUMENT = list(range(100))


class Requests:
    """Requests that decode: their prompts are in the tree and held, their answers are their own."""

    def __init__(self) -> None:
        self.cache, self.allocator, _ = build(KitConfig(page_size=1, kv_size=512))

    def start(self, prompt: list[int], num_outputs: int) -> Any:
        insert(self.cache, self.allocator, prompt)
        node = match(self.cache, prompt).last_device_node
        self.cache.inc_lock_ref(node)
        return SimpleNamespace(last_node=node, seqlen=len(prompt) + num_outputs)

    def held(self, *reqs: Any) -> int:
        return held_tokens(self.cache.tree_core, reqs)


@pytest.fixture
def requests() -> Requests:
    return Requests()


def test_a_prefix_that_several_share_is_counted_once(requests: Requests) -> None:
    one = requests.start([*DOCUMENT, 901], 7)
    other = requests.start([*DOCUMENT, 902, 903], 5)
    assert requests.held(one, other) == 100 + (1 + 7) + (2 + 5)
    assert held_tokens(None, [one, other]) == (101 + 7) + (102 + 5)


def test_a_prefix_that_others_hold_is_not_freed(requests: Requests) -> None:
    one = requests.start([*DOCUMENT, 901], 7)
    stays = requests.start([*DOCUMENT, 902], 5)
    assert requests.held(one) == 1 + 7
    assert requests.held(stays, one) == 100 + (1 + 7) + (1 + 5)


def test_without_a_cached_prompt_all_is_its_own(requests: Requests) -> None:
    root = match(requests.cache, [5]).last_device_node
    assert requests.held(SimpleNamespace(last_node=root, seqlen=30)) == 30
    assert requests.held() == 0


def test_what_a_session_holds_is_neither_freed_nor_new(requests: Requests) -> None:
    """Its turns stand at a node of the session's own, which is not in the tree."""
    one = requests.start([*DOCUMENT, 901], 7)
    turn = SimpleNamespace(last_node=_VirtualNode(), seqlen=50, prefix_len=40)
    assert requests.held(turn, one) == 100 + (1 + 7)
    core = requests.cache.tree_core
    cache = SimpleNamespace(evictable_size=lambda: 0, echo_core=core)
    limits = KvLimits(ReserveConfig(predictor="off"), cache, requests.allocator)
    assert limits.new_tokens(turn) == 10
