"""Turns of a streaming session, whose KV stays with the session and not in the tree."""

from __future__ import annotations

import asyncio

import pytest

from eval.servers.server import Server
from tests.engine.traffic import FLEX, completion, is_idle, pooled, post, send_all, wait_until
from tests.servers import COMMON_ARGS, NAMED, STRICT

pytestmark = [pytest.mark.server, pytest.mark.slow]


def turn(session: str, number: int, tier: dict[str, str]) -> dict[str, object]:
    return {
        "text": f"and this is what is said in turn {number}",
        "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "custom_params": tier},
        "session_params": {"id": session},
    }


@pytest.mark.parametrize("tier", [FLEX, {}], ids=["offline", "online"])
def test_turns_of_either_class_are_answered_beside_other_work(server_for, tier) -> None:
    args = (*COMMON_ARGS, *NAMED, "--enable-streaming-session")
    server: Server = server_for(args, config="echo", env=STRICT)
    opened = post(server, "/open_session", {"capacity_of_str_len": 1000, "streaming": True})
    session = opened.json()

    async def talk() -> list[int]:
        job = [completion(f"line {number}", 60, **FLEX) for number in range(20)]
        others = asyncio.create_task(send_all(server, job))
        statuses = []
        for number in range(4):
            answers = await send_all(server, [turn(session, number, tier)], "/generate")
            statuses += [answer.status_code for answer in answers]
        return statuses + [answer.status_code for answer in await others]

    assert set(asyncio.run(talk())) == {200}
    assert post(server, "/close_session", {"session_id": session}).status_code == 200
    wait_until(lambda: is_idle(server) and pooled(server) == 0, "all have ended")
    assert post(server, "/v1/completions", completion("and it goes on", 2)).status_code == 200
