"""SGLang's host tier (HiCache) under Echo's eviction; its copies are kernels of an accelerator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from echo_sgl.cpu import activate
from eval.server import Server
from tests.engine.test_cache_manager import cached_tokens, flush, prompt_tokens
from tests.engine.traffic import FLEX, completion, documents, is_idle, send_all, texts, wait_until
from tests.servers import COMMON_ARGS, NAMED, STRICT

pytestmark = [
    pytest.mark.server,
    pytest.mark.gpu,
    pytest.mark.skipif(activate() is not None, reason="the host tier needs an accelerator"),
]

POOL_TOKENS = 8000
HOST_TIER = ("--enable-hierarchical-cache", "--hicache-ratio", "4")
ARGS = (*COMMON_ARGS, *NAMED, *HOST_TIER)


def one_by_one(server: Server, bodies: list[dict[str, Any]]) -> list[Any]:
    return [asyncio.run(send_all(server, [body]))[0] for body in bodies]


def bodies_beyond_the_pool() -> list[dict[str, Any]]:
    """Chats and job requests in turn, each about a document of its own."""
    return [
        completion(text, 4, **(FLEX if number % 2 else {}))
        for number, text in enumerate(documents(14, 450, seed=21))
    ]


@pytest.mark.parametrize("order", ["lru", "echo", "next-use"])
def test_what_the_pool_cannot_hold_comes_back_from_the_host(order, server_for, write_config):
    bodies = bodies_beyond_the_pool()
    stock = server_for(ARGS)
    expected = texts(one_by_one(stock, bodies))
    server = server_for(ARGS, config=write_config(cache={"order": order}), env=STRICT)
    first = one_by_one(server, bodies)
    assert prompt_tokens(first) > 1.5 * POOL_TOKENS
    again = one_by_one(server, bodies)
    assert texts(first) == texts(again) == expected
    found = sum(map(cached_tokens, again))
    assert found > POOL_TOKENS  # more than the device ever held
    assert found >= 0.95 * prompt_tokens(again)
    wait_until(lambda: is_idle(server), "nothing is left running")


def test_a_flush_empties_both_tiers(server_for):
    server = server_for(ARGS, config="echo", env=STRICT)
    bodies = bodies_beyond_the_pool()
    one_by_one(server, bodies)
    flush(server)
    assert sum(map(cached_tokens, one_by_one(server, bodies[:3]))) == 0
