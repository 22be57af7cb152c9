"""SGLang's host tier (HiCache) under Echo's eviction: what leaves the pool comes back from it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from eval.servers.server import Server
from tests.engine.cache.test_cache_manager import cached_tokens, flush, prompt_tokens, run
from tests.engine.traffic import FLEX, completion, documents, metric, texts
from tests.servers import COMMON_ARGS, NAMED, STRICT

pytestmark = pytest.mark.server

POOL_TOKENS = 8000
HOST_TIER = ("--enable-hierarchical-cache", "--hicache-ratio", "4")


@pytest.fixture(
    params=[
        ("next-use", "write_through"),
        pytest.param(("echo", "write_back"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def two_tiers(request: pytest.FixtureRequest, server_for, write_config) -> Server:
    order, policy = request.param
    args = (*COMMON_ARGS, *NAMED, *HOST_TIER, "--hicache-write-policy", policy)
    return server_for(args, config=write_config(cache={"order": order}), env=STRICT)


def bodies_beyond_the_pool() -> list[dict[str, Any]]:
    """Chats and job requests in turn, each about a document of its own."""
    return [
        completion(text, 4, **(FLEX if number % 2 else {}))
        for number, text in enumerate(documents(14, 450, seed=21))
    ]


def one_by_one(server: Server, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    return [answer for body in bodies for answer in run(server, [body])]


def test_what_the_pool_cannot_hold_comes_back_from_the_host(two_tiers, stock_texts):
    flush(two_tiers)
    bodies = bodies_beyond_the_pool()
    first = one_by_one(two_tiers, bodies)
    assert prompt_tokens(first) > 1.5 * POOL_TOKENS
    again = one_by_one(two_tiers, bodies)
    assert texts(first) == texts(again) == stock_texts(bodies)
    assert sum(map(cached_tokens, again)) >= 0.95 * prompt_tokens(again)
    assert metric(two_tiers, "echo_sgl_evicted_tokens_total") > POOL_TOKENS / 2


def test_both_classes_at_once_get_what_they_get_one_by_one(two_tiers, stock_texts):
    bodies = bodies_beyond_the_pool()
    one_by_one(two_tiers, bodies)
    answers = run(two_tiers, bodies * 3)
    assert texts(answers) == stock_texts(bodies) * 3
    assert sum(map(cached_tokens, answers)) >= 0.5 * prompt_tokens(answers)


def test_a_flush_empties_both_tiers(two_tiers):
    bodies = bodies_beyond_the_pool()
    one_by_one(two_tiers, bodies)
    flush(two_tiers)
    assert sum(map(cached_tokens, one_by_one(two_tiers, bodies[:3]))) == 0
