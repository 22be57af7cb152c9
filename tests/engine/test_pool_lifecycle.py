"""Pooled requests and the rest of the server: limits, timeouts, health, load, shutdown."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from eval.servers.server import LOCAL, Server
from tests.engine.traffic import (
    FLEX,
    completion,
    is_idle,
    metric,
    pooled,
    post,
    send_all,
    until,
    wait_until,
)
from tests.servers import COMMON_ARGS, STRICT

pytestmark = pytest.mark.server
POOL_LIMIT = 5
ARGS = (*COMMON_ARGS, "--max-total-tokens", "16000")


@pytest.fixture
def small_pool(server_for, write_config) -> Server:
    """One offline request runs, five may wait."""
    config = write_config(max_pool_requests=POOL_LIMIT, max_running_requests=1)
    return server_for(ARGS, config=config, env=STRICT)


def endless(number: int) -> dict[str, object]:
    """Runs for half a minute unless it is aborted; nothing here waits for its end."""
    return completion(f"endless {number}", 15_000, rid=f"endless-{number}", **FLEX)


async def fill(server: Server, count: int) -> list[asyncio.Task]:
    async with httpx.AsyncClient(verify=False, timeout=600) as client:
        await client.post(f"{server.url}/flush_cache")
    tasks = [asyncio.create_task(send_all(server, [endless(0)]))]
    await until(lambda: metric(server, "echo_sgl_pool_requests") == 0 and _runs(server), "it runs")
    tasks += [asyncio.create_task(send_all(server, [endless(n)])) for n in range(1, count)]
    await until(lambda: pooled(server) == count - 1, f"{count - 1} requests are pooled")
    return tasks


def abort_all(server: Server) -> None:
    assert post(server, "/abort_request", {"abort_all": True}).status_code == 200
    wait_until(lambda: is_idle(server) and pooled(server) == 0, "all are aborted")


def is_known(server: Server, rid: str) -> bool:
    return LOCAL.get(f"{server.url}/echo/requests/{rid}", timeout=30).status_code == 200


def test_an_abort_ends_one_request_and_none_whose_id_only_begins_alike(small_pool):
    """Ids are the clients' to choose, and a closed connection aborts its own."""

    async def run() -> list[httpx.Response]:
        tasks = await fill(small_pool, 4)
        online = completion("talk", 2000, rid="endless-30")
        tasks.append(asyncio.create_task(send_all(small_pool, [online])))
        await until(lambda: is_known(small_pool, "endless-30"), "an online one has come")
        for rid in ("endless-3", "endless-0"):
            await send_all(small_pool, [{"rid": rid}], "/abort_request")
            await until(lambda rid=rid: not is_known(small_pool, rid), "that one is gone")
        left = [f"endless-{number}" for number in (1, 2, 30)]
        assert all(is_known(small_pool, rid) for rid in left)
        await send_all(small_pool, [{"abort_all": True}], "/abort_request")
        return [answer for task in tasks for answer in await task]

    answers = asyncio.run(run())
    assert len(answers) == 5
    abort_all(small_pool)


def test_a_full_pool_answers_503_with_its_limit_and_online_goes_on(small_pool):
    async def run() -> tuple[httpx.Response, httpx.Response]:
        tasks = await fill(small_pool, POOL_LIMIT + 1)
        [refused, online] = [
            (await send_all(small_pool, [body]))[0]
            for body in (completion("one too many", 2, **FLEX), completion("online", 2))
        ]
        await asyncio.to_thread(abort_all, small_pool)
        await asyncio.gather(*tasks)
        return refused, online

    refused, online = asyncio.run(run())
    assert refused.status_code == 503
    assert "holds 5 requests, its limit is 5 (offline.max_pool_requests)" in refused.text
    assert online.status_code == 200


def test_health_and_load_see_pooled_requests(small_pool):
    async def run() -> tuple[httpx.Response, dict[str, object]]:
        tasks = await fill(small_pool, 4)
        async with httpx.AsyncClient(verify=False, timeout=60) as client:
            health = await client.get(f"{small_pool.url}/health_generate")
            loads = (await client.get(f"{small_pool.url}/v1/loads")).json()["loads"][0]
        await asyncio.to_thread(abort_all, small_pool)
        await asyncio.gather(*tasks)
        return health, loads

    health, loads = asyncio.run(run())
    assert health.status_code == 200
    assert loads["num_running_reqs"] == 1
    assert loads["num_waiting_reqs"] == 3
    assert loads["queues"]["waiting"] == 3
    assert loads["num_total_tokens"] > loads["num_used_tokens"]


def test_pausing_keeps_pooled_requests_and_continuing_finishes_them(small_pool):
    short = [completion(f"short {n}", 5, **FLEX) for n in range(4)]

    async def run() -> list[httpx.Response]:
        [blocker] = await fill(small_pool, 1)
        waiting = asyncio.create_task(send_all(small_pool, short))
        await until(lambda: pooled(small_pool) == 4, "all four wait")
        assert post(small_pool, "/pause_generation", {"mode": "retract"}).status_code == 200
        assert post(small_pool, "/continue_generation", {}).status_code == 200
        assert post(small_pool, "/abort_request", {"rid": "endless-0"}).status_code == 200
        await blocker
        return await waiting

    assert [a.json()["usage"]["completion_tokens"] for a in asyncio.run(run())] == [5] * 4


def test_a_pooled_request_expires_as_a_queued_one_would(server_for, write_config):
    config = write_config(max_running_requests=1)
    timeout = {"SGLANG_REQ_WAITING_TIMEOUT": "2"}
    server = server_for(ARGS, config=config, env=STRICT | timeout)

    async def run() -> httpx.Response:
        [blocker] = await fill(server, 1)
        expired = (await send_all(server, [endless(1)]))[0]
        await asyncio.to_thread(abort_all, server)
        await blocker
        return expired

    expired = asyncio.run(run())
    assert expired.status_code == 503
    assert "waiting timeout" in expired.text
    assert metric(server, "echo_sgl_requests_total", outcome="expired", task="offline") == 1


def test_a_shutdown_ends_pooled_requests_with_503_instead_of_draining_them(small_pool):
    """The last test here: it ends the server."""
    server = small_pool

    async def run() -> list[httpx.Response]:
        tasks = await fill(server, 4)
        os.kill(server.process.pid, signal.SIGTERM)
        return [answers[0] for answers in await asyncio.gather(*tasks)]

    answers = asyncio.run(run())
    assert {answer.status_code for answer in answers} == {503}
    assert all("shutting down" in answer.text for answer in answers)
    assert server.process.wait(timeout=120) is not None


def _load(server: Server) -> dict[str, int]:
    return LOCAL.get(f"{server.url}/v1/loads", timeout=30).json()["loads"][0]


def _runs(server: Server) -> bool:
    return _load(server)["num_running_reqs"] > 0
