"""The cache manager on a real server: who is evicted, what the reserve holds back."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from eval.servers.server import LOCAL, Server, ServerStartError
from tests.engine.test_scheduler import mixed_bodies
from tests.engine.tight import num_running
from tests.engine.traffic import (
    FLEX,
    completion,
    documents,
    is_idle,
    metric,
    post,
    send_all,
    texts,
    until,
    wait_until,
)
from tests.servers import COMMON_ARGS, NAMED, STRICT

pytestmark = pytest.mark.server

ARGS = (*COMMON_ARGS, *NAMED)
POOL_TOKENS = 8000
# Leaves offline work a quarter of the pool, or less. What it sees counts after 2.5 s, and not 15.
RESERVE = {"min_tokens": 6000, "max_share": 0.9, "window_s": 600.0, "horizon_s": 50.0}


def cached_tokens(answer: httpx.Response) -> int:
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def prompt_tokens(answers: list[httpx.Response]) -> int:
    return sum(answer.json()["usage"]["prompt_tokens"] for answer in answers)


def run(server: Server, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    return asyncio.run(send_all(server, bodies))


def flush(server: Server) -> None:
    wait_until(lambda: is_idle(server), "the server is idle")
    LOCAL.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()


def test_a_batch_sweep_does_not_flush_what_online_users_work_with(echo_server):
    flush(echo_server)
    chats = [completion(text, 2) for text in documents(3, 120, seed=11)]
    first = run(echo_server, chats)
    sweep = [completion(text, 2, **FLEX) for text in documents(60, 150, seed=12)]
    before = metric(echo_server, "echo_sgl_evicted_tokens_total", task="offline")
    swept = prompt_tokens(run(echo_server, sweep))
    assert swept > 2 * POOL_TOKENS
    again = run(echo_server, chats)
    assert sum(map(cached_tokens, again)) == prompt_tokens(first) - len(chats)
    assert metric(echo_server, "echo_sgl_evicted_tokens_total", task="offline") > before
    assert metric(echo_server, "echo_sgl_evicted_tokens_total", worth="protected") == 0
    wait_until(
        lambda: metric(echo_server, "echo_sgl_protected_tokens") >= prompt_tokens(first) - 3,
        "the working set is shown",
    )


def test_prefixes_that_wait_for_requests_outlive_finished_ones(echo_server):
    flush(echo_server)
    shared = documents(6, 150, seed=13)
    bodies = [
        completion(f"{text} question {number}", 2, **FLEX) for text in shared for number in range(8)
    ]
    bodies = [bodies[index * 7 % len(bodies)] for index in range(len(bodies))]
    punished = metric(echo_server, "echo_sgl_punished_tokens_total")
    answers = run(echo_server, bodies)
    hits, total = sum(map(cached_tokens, answers)), prompt_tokens(answers)
    assert hits / total > 0.8
    assert metric(echo_server, "echo_sgl_punished_tokens_total") == punished
    assert metric(echo_server, "echo_sgl_recomputed_tokens_count", task="offline") >= len(bodies)


@pytest.fixture
def reserving_server(server_for, write_config) -> Server:
    config = write_config(cache={"order": "echo"}, reserve=RESERVE)
    return server_for(ARGS, config=config, env=STRICT)


def test_outputs_depend_neither_on_the_order_of_eviction_nor_on_the_reserve(
    reserving_server, stock_texts
):
    assert texts(run(reserving_server, mixed_bodies())) == stock_texts(mixed_bodies())
    wait_until(lambda: is_idle(reserving_server), "the server is idle")
    wait_until(
        lambda: metric(reserving_server, "echo_sgl_cached_tokens", task="offline") > 0,
        "what offline requests left in the cache is shown",
    )


def test_a_request_that_the_reserve_never_lets_in_fails_at_once_and_says_why(reserving_server):
    """2,000 of 8,000 tokens are left to offline work, whatever else runs."""
    server = reserving_server
    huge, other = documents(2, 900, seed=14)
    bodies = [completion(huge, 2, **FLEX), completion("short", 2, **FLEX), completion(other, 2)]
    refused, *served = run(server, bodies)
    assert refused.status_code == 400
    assert "(reserve.min_tokens)" in refused.text and "hold 2000 of the 8000" in refused.text
    assert [answer.status_code for answer in served] == [200, 200]


def test_a_request_without_room_beside_online_ones_waits_and_that_is_said_once(reserving_server):
    server = reserving_server
    flush(server)
    long, *offline = documents(3, 500, seed=17)
    before = metric(server, "echo_sgl_held_back_total")

    async def scenario() -> list[httpx.Response]:
        async with httpx.AsyncClient(verify=False, timeout=600) as client:
            url = f"{server.url}/v1/completions"
            online = asyncio.create_task(client.post(url, json=completion(long, 1500)))
            await until(lambda: num_running(server) > 0, "it runs")
            held = [
                asyncio.create_task(client.post(url, json=completion(text, 2, **FLEX)))
                for text in offline
            ]
            await until(
                lambda: metric(server, "echo_sgl_held_back_total") > before or online.done(),
                "they are held back",
            )
            return [await one for one in (online, *held)]

    answers = asyncio.run(scenario())
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert metric(server, "echo_sgl_held_back_total") > before
    assert server.log().count("the rest is kept for online bursts") == 1


def test_after_a_burst_a_job_of_large_requests_goes_on_one_at_a_time(reserving_server, stock_texts):
    """The reserve remembers the burst and leaves less than one request needs."""
    server = reserving_server
    flush(server)
    run(server, [completion(text, 40) for text in documents(5, 500, seed=15)])
    wait_until(
        lambda: metric(server, "echo_sgl_reserve_tokens", task="online") > 7000,
        "the burst fills the reserve",
    )
    job = [completion(text, 4, **FLEX) for text in documents(6, 500, seed=16)]
    before = metric(server, "echo_sgl_held_back_total")
    answers = run(server, job)
    assert texts(answers) == stock_texts(job)
    assert min(answer.json()["usage"]["prompt_tokens"] for answer in answers) > POOL_TOKENS / 8
    wait_until(
        lambda: metric(server, "echo_sgl_held_back_total") > before, "the others waited for the one"
    )
    assert metric(server, "echo_sgl_reserve_tokens", task="online") > 6000
    assert post(server, "/echo/forget-traffic", {}).status_code == 200
    wait_until(
        lambda: metric(server, "echo_sgl_reserve_tokens", task="online") <= 6000,
        "forgotten traffic leaves the smallest reserve",
    )


def test_a_reserve_above_the_pool_stops_the_server_with_the_reason(server_for, write_config):
    config = write_config(reserve={"min_tokens": POOL_TOKENS * 2})
    with pytest.raises(ServerStartError, match=r"reserve\.min_tokens is 16000"):
        server_for(ARGS, config=config)
