"""New weights on a server whose pool is full: nobody waits until it is empty."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from echo_sgl.engine.http.weights import UPDATING
from eval.servers.models import demo_model
from eval.servers.server import Server
from tests.engine.traffic import (
    FLEX,
    completion,
    is_idle,
    pooled,
    post,
    send_all,
    texts,
    until,
    wait_until,
)

pytestmark = pytest.mark.server


async def update(server: Server) -> httpx.Response:
    body = {"model_path": str(demo_model("tiny"))}
    [answer] = await send_all(server, [body], "/update_weights_from_disk")
    return answer


def test_offline_requests_are_handed_back_and_online_ones_end(echo_server: Server) -> None:
    async def play() -> tuple[list[httpx.Response], list[httpx.Response], httpx.Response]:
        job = [completion(f"line {number}", 400, **FLEX) for number in range(60)]
        lines = asyncio.create_task(send_all(echo_server, job))
        await until(lambda: lines.done() or pooled(echo_server) > 30, "the pool is full")
        users = asyncio.create_task(
            send_all(echo_server, [completion(f"user {number}", 30) for number in range(4)])
        )
        answer = await update(echo_server)
        return await lines, await users, answer

    before = texts([post(echo_server, "/v1/completions", completion("the same", 8))])
    lines, users, answer = asyncio.run(play())
    assert answer.status_code == 200 and answer.json()["success"], answer.text
    assert {one.status_code for one in users} == {200}
    handed_back = [one for one in lines if one.status_code != 200]
    assert len(handed_back) > 30
    assert {one.status_code for one in handed_back} == {503}
    assert all(UPDATING in one.text for one in handed_back)
    wait_until(lambda: is_idle(echo_server) and pooled(echo_server) == 0, "all have ended")
    [after] = asyncio.run(send_all(echo_server, [completion("the same", 8, **FLEX)]))
    assert texts([after]) == before
