"""Requests that end at every stage of their life leave nothing behind; strict memory check on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx
import pytest

from eval.servers.server import LOCAL, Server
from tests.engine.tight import learn, num_running, offline_bodies, online_bodies
from tests.engine.traffic import (
    FLEX,
    completion,
    documents,
    is_idle,
    metric,
    pooled,
    post,
    send_all,
    until,
    wait_until,
)

pytestmark = pytest.mark.server
VICTIM = "victim"
# Many times as long as any step and as most waits.
STANDSTILL_S = 3.0


def state(server: Server) -> str | None:
    """Where the victim is; None when the scheduler does not know it."""
    answer = LOCAL.get(f"{server.url}/echo/requests/{VICTIM}", timeout=30)
    return str(answer.json()["state"]) if answer.status_code == 200 else None


async def _stream(server: Server, body: dict[str, object]) -> None:
    """Read an answer as it comes; cancelling this closes the connection."""
    async with (
        httpx.AsyncClient(verify=False, timeout=600) as client,
        client.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}) as got,
    ):
        async for _ in got.aiter_bytes():
            pass


async def _pooled(server: Server) -> list[asyncio.Task]:
    """More wait than there are slots for when the victim comes, which is served in its turn."""
    crowd = asyncio.create_task(
        send_all(server, [completion(f"crowd {number}", 300, **FLEX) for number in range(48)])
    )
    await until(lambda: crowd.done() or pooled(server) > 16, "the slots are taken")
    return [crowd]


async def _queued(server: Server) -> list[asyncio.Task]:
    """Online requests have all slots; all that they may write fits into the 8,000 tokens."""
    crowd = asyncio.create_task(
        send_all(server, [completion(f"crowd {number}", 400) for number in range(16)])
    )
    await until(lambda: crowd.done() or num_running(server) == 16, "the slots are taken")
    return [crowd]


async def _parked(server: Server) -> list[asyncio.Task]:
    """Online requests decode, which leave no time for an offline one."""
    online = [{**body, "max_tokens": 600} for body in online_bodies()]
    return [asyncio.create_task(send_all(server, online))]


async def _alone(server: Server) -> list[asyncio.Task]:
    return []


KINDS_OF_STEPS = [(), pytest.param(("--enable-mixed-chunk",), marks=pytest.mark.slow)]
LONG = documents(1, 1500, seed=51)[0]
# Stage, what runs beside the victim, the victim's prompt and class.
STAGES: list[tuple[str, Callable[[Server], Awaitable[list[asyncio.Task]]], str, dict]] = [
    ("pooled", _pooled, "victim", FLEX),
    ("prefilling", _alone, LONG, FLEX),
    ("decoding", _alone, "victim", FLEX),
    ("parked", _parked, "victim", FLEX),
    ("waiting", _queued, "victim", {}),
    ("prefilling", _alone, LONG, {}),
    ("decoding", _parked, "victim", {}),
]
STAGE_IDS = [f"{'offline' if tier else 'online'}-{stage}" for stage, _, _, tier in STAGES]


@pytest.mark.parametrize("tight_server", KINDS_OF_STEPS, indirect=True, ids=["", "mixed"])
@pytest.mark.parametrize("leaves", ["abort", "disconnect"])
@pytest.mark.parametrize(("stage", "company", "prompt", "tier"), STAGES, ids=STAGE_IDS)
def test_a_request_that_ends_at_any_stage_leaves_nothing(
    tight_server, stage, company, prompt, tier, leaves
):
    learn(tight_server)
    body = completion(prompt, 2000, rid=VICTIM, **tier)
    first_is_victim = stage == "parked"
    behind = {"decoding"} if stage in ("pooled", "prefilling", "waiting") else set()

    async def attempt() -> bool:
        """Whether the victim was caught at that stage and made to leave there."""
        if first_is_victim:
            victim = asyncio.create_task(_stream(tight_server, body))
            await until(lambda: victim.done() or state(tight_server) == "decoding", "it runs")
            others = await company(tight_server)
        else:
            others = await company(tight_server)
            victim = asyncio.create_task(_stream(tight_server, body))
        seen = None
        while seen != stage and seen not in behind and not victim.done():
            seen = await asyncio.to_thread(state, tight_server)
        if leaves == "abort":
            await asyncio.to_thread(post, tight_server, "/abort_request", {"rid": VICTIM})
        else:
            victim.cancel()
        with suppress(asyncio.CancelledError):
            await victim
        await until(lambda: state(tight_server) is None, "the scheduler has forgotten it")
        await asyncio.to_thread(post, tight_server, "/abort_request", {"abort_all": True})
        await asyncio.gather(*others)
        return seen == stage

    # A stage may be over before it is seen.
    caught = [asyncio.run(attempt())]
    while not caught[-1] and len(caught) < 20:
        LOCAL.post(f"{tight_server.url}/flush_cache", timeout=60)
        caught.append(asyncio.run(attempt()))
    assert caught[-1], f"never seen while {stage}"
    wait_until(lambda: is_idle(tight_server) and pooled(tight_server) == 0, "all have ended")
    wait_until(
        lambda: LOCAL.post(f"{tight_server.url}/flush_cache").status_code == 200,
        "nothing is held any more",
    )
    assert metric(tight_server, "echo_sgl_parked_requests", task="offline") == 0
    answer = post(tight_server, "/v1/completions", completion("and it goes on", 2))
    assert answer.status_code == 200


def test_requests_larger_than_memory_fail_at_once_and_are_not_retried(tight_server):
    """The KV pool has 8,000 tokens."""
    huge = [" ".join(["word"] * 9000) + f" {number}" for number in range(3)]
    answers = asyncio.run(send_all(tight_server, [completion(text, 4, **FLEX) for text in huge]))
    assert {answer.status_code for answer in answers} == {400}
    assert "tokens" in answers[0].text
    assert pooled(tight_server) == 0
    assert post(tight_server, "/v1/completions", completion("small", 2, **FLEX)).status_code == 200


@pytest.mark.parametrize("terms", [{}, FLEX])
def test_an_empty_prompt_is_refused_and_ends_no_scheduler(tight_server, terms):
    for prompts in ([""], ["word", ""], [[5], []]):
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        params = {"max_new_tokens": 2, "custom_params": terms}
        answer = post(tight_server, "/generate", {key: prompts, "sampling_params": params})
        assert answer.status_code == 400
        assert "no tokens" in answer.text
    assert post(tight_server, "/v1/completions", completion("word", 2)).status_code == 200


@pytest.mark.parametrize("terms", [{}, FLEX])
def test_a_token_that_the_model_does_not_have_is_refused_and_ends_no_scheduler(tight_server, terms):
    for token in (-1, 999_999):
        for path in ("/v1/completions", "/generate"):
            body = {"model": "tiny", "prompt": [5, token], **terms}
            if path == "/generate":
                body = {"input_ids": [5, token], "sampling_params": {"custom_params": terms}}
            answer = post(tight_server, path, body)
            assert answer.status_code == 400
            assert f"holds token {token}" in answer.text
    assert post(tight_server, "/v1/completions", completion("word", 2)).status_code == 200


def test_a_server_that_stood_still_goes_on_where_it_was(tight_server):
    """To its clock, which goes on meanwhile, everything is late all at once."""
    learn(tight_server)
    bodies = [{**body, "max_tokens": 300} for body in (*offline_bodies(), *online_bodies())]

    async def run() -> list[httpx.Response]:
        calls = asyncio.create_task(send_all(tight_server, bodies))
        await until(lambda: calls.done() or num_running(tight_server) >= 6, "they run")
        os.killpg(tight_server.process.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STANDSTILL_S)
        finally:
            os.killpg(tight_server.process.pid, signal.SIGCONT)
        return await calls

    answers = asyncio.run(run())
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [300] * 12
    wait_until(lambda: is_idle(tight_server) and pooled(tight_server) == 0, "all have ended")
    assert metric(tight_server, "echo_sgl_parked_requests", task="offline") == 0
    wait_until(
        lambda: LOCAL.post(f"{tight_server.url}/flush_cache").status_code == 200,
        "nothing is held any more",
    )
