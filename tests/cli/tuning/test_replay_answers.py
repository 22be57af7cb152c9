"""What a replay makes of the answers that a server streams, cuts or never gives."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from echo_sgl.cli.connection import open_client
from echo_sgl.cli.tuning.replay import Outcome, _online
from echo_sgl.cli.tuning.replay_load import ReplayError
from eval.servers.server import Server


@pytest.mark.parametrize(
    ("num_tokens", "ttft_s", "tpot_s"),
    [(0, math.inf, math.inf), (1, 0.0, math.inf), (3, 0.0, 0.0)],
)
def test_what_came_of_an_answer_that_was_cut_counts(num_tokens, ttft_s, tpot_s):
    """A long answer goes on when the replay ends; its first token was in time."""

    async def stream() -> AsyncIterator[bytes]:
        for number in range(num_tokens):
            chunk = json.dumps({"meta_info": {"completion_tokens": number + 1}})
            yield f"data: {chunk}\n\n".encode()
        started.set()
        await asyncio.Event().wait()

    async def replay() -> Outcome:
        outcome = Outcome()
        answer = httpx.Response(200, content=stream())
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(lambda request: answer), base_url="http://server"
        ) as client:
            body = {"sampling_params": {"max_new_tokens": 5}}
            task = asyncio.create_task(_online(client, body, time.monotonic(), outcome))
            await started.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return outcome

    started = asyncio.Event()
    outcome = asyncio.run(replay())
    assert outcome.ttfts_s == [pytest.approx(ttft_s, abs=30.0)]
    assert outcome.tpots_s == [pytest.approx(tpot_s, abs=30.0)]


def chunk(num_tokens: int, **reason: object) -> str:
    facts = {"completion_tokens": num_tokens, "finish_reason": reason or None}
    return f"data: {json.dumps({'text': '', 'meta_info': facts})}\n\n"


FULL = {"type": "abort", "status_code": 503, "message": "The request queue is full."}


def replay_one(status: int, text: str) -> Outcome:
    """One request of five tokens to a server that answers that."""

    async def replay() -> Outcome:
        outcome, reply = Outcome(), httpx.Response(status, text=text)
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(lambda request: reply), base_url="http://server"
        ) as client:
            body = {"sampling_params": {"max_new_tokens": 5}}
            await _online(client, body, time.monotonic(), outcome)
        return outcome

    return asyncio.run(replay())


@pytest.mark.parametrize(
    "answer",
    [(429, "too busy"), (503, "too busy"), (200, f"{chunk(0, **FULL)}data: [DONE]\n\n")],
)
def test_whom_an_overloaded_server_turns_away_counts_as_never_answered(answer) -> None:
    """SGLang begins to answer, with 200, before it turns a streamed request away."""
    status, text = answer
    outcome = replay_one(status, text)
    assert outcome.ttfts_s == outcome.tpots_s == [math.inf]


def test_what_a_server_never_takes_ends_the_replay() -> None:
    with pytest.raises(ReplayError, match="answers 400: too busy"):
        replay_one(400, "too busy")
    for reason in (
        chunk(0, type="abort", status_code=400, message="too long"),
        'data: {"error": {"message": "too long", "code": 400}}\n\n',
    ):
        with pytest.raises(ReplayError, match="answers 400: too long"):
            replay_one(200, reason)


def test_an_answer_that_the_server_gives_up_has_its_first_token_and_no_end() -> None:
    whole = replay_one(200, chunk(1) + chunk(5, type="length", length=5))
    given_up = replay_one(200, chunk(1) + chunk(3) + chunk(3, **FULL))
    assert max(*whole.ttfts_s, *given_up.ttfts_s) < 30.0
    assert whole.tpots_s == [pytest.approx(0.0, abs=30.0)]
    assert given_up.tpots_s == [math.inf]


@pytest.mark.server
def test_a_real_server_that_is_full_turns_some_away_who_count_as_never_answered(
    small_server: Server,
) -> None:
    """It has places for two and one more; all nine have status 200."""
    outcome = Outcome()

    async def replay() -> None:
        sampling = {"max_new_tokens": 100, "ignore_eos": True}
        async with open_client(small_server.url, "secret", 9) as client:
            bodies = [
                {"input_ids": [20 + number] * 9, "sampling_params": sampling, "stream": True}
                for number in range(9)
            ]
            now_s = time.monotonic()
            await asyncio.gather(*(_online(client, one, now_s, outcome) for one in bodies))

    asyncio.run(replay())
    answered = [time_s for time_s in outcome.ttfts_s if math.isfinite(time_s)]
    assert 1 <= len(answered) < 9
    assert sorted(map(math.isinf, outcome.ttfts_s)) == sorted(map(math.isinf, outcome.tpots_s))
