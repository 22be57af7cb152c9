"""Prefill steps of a job on a real server: starts in lots, chunks that are worth a step."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from eval.server import LOCAL
from tests.engine.traffic import FLEX, completion, is_idle, post, send_all, until, wait_until

pytestmark = pytest.mark.server

NUM_REQUESTS, MOST_TRIES = 120, 20
NUM_WORDS = 600  # several chunks: each is waited for
ONE = "def one(self): return self.value and self.index or not self.value"


def job() -> list[dict[str, object]]:
    """More than there are places, with answers that end one after the other."""
    rng = random.Random(5)
    return [
        completion(f"{ONE} {number}", rng.randint(4, 60), rid=f"lot-{number}", **FLEX)
        for number in range(NUM_REQUESTS)
    ]


def trace(server) -> list[dict[str, Any]]:
    answer = LOCAL.get(f"{server.url}/echo/trace", params={"seconds": 600}, timeout=60).json()
    [replica] = answer["replicas"]
    return [dict(zip(replica["columns"], row, strict=True)) for row in replica["rows"]]


def pooled_reason(server) -> str | None:
    """What the last of the job waits for, or the one that the last one waits for."""
    answer = LOCAL.get(f"{server.url}/echo/requests/lot-{NUM_REQUESTS - 1}", timeout=60)
    held_back = answer.json().get("held_back") or {} if answer.status_code == 200 else {}
    return (held_back.get("first") or held_back).get("reason")


async def answers_and_reasons(server) -> tuple[list[httpx.Response], set[str | None]]:
    answers = asyncio.create_task(send_all(server, job()))
    reasons = set()
    while not answers.done():
        reasons.add(await asyncio.to_thread(pooled_reason, server))
    return await answers, reasons


def test_requests_of_a_job_start_in_lots(echo_server):
    wait_until(lambda: is_idle(echo_server), "the server is idle")
    before_s = max((step["start_s"] for step in trace(echo_server)), default=0.0)
    answers, reasons = asyncio.run(answers_and_reasons(echo_server))
    lengths = [answer.json()["usage"]["completion_tokens"] for answer in answers]
    assert lengths == [body["max_tokens"] for body in job()]
    steps = [step for step in trace(echo_server) if step["start_s"] > before_s]
    starts = [step["num_prefills"] for step in steps if step["num_prefills"]]
    later = starts[len(starts) // 2 :]
    # At once it would be 1.3: whenever one has ended, one starts.
    assert sum(later) / len(later) > 2
    assert "gather" in reasons


def explained(server, rid: str) -> dict[str, Any]:
    answer = LOCAL.get(f"{server.url}/echo/requests/{rid}", timeout=60)
    document: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
    return document


async def waits_for_a_longer_chunk(server, name: str) -> dict[str, Any]:
    """What holds an offline request back, when it awaits a chunk beside an online decode."""
    prompt = " ".join(f"{name}{number}" for number in range(NUM_WORDS))
    told: dict[str, Any] = {}
    long = asyncio.create_task(send_all(server, [completion("long", 3000, rid=f"long-{name}")]))
    await until(
        lambda: explained(server, f"long-{name}").get("state") == "decoding", "the long one decodes"
    )
    offline = asyncio.create_task(send_all(server, [completion(prompt, 2, rid=name, **FLEX)]))
    while not offline.done() and "worth_chunk_s" not in told:
        told = (await asyncio.to_thread(explained, server, name)).get("held_back") or {}
    [answer] = await offline
    assert answer.status_code == 200
    await asyncio.to_thread(post, server, "/abort_request", {"abort_all": True})
    await long
    return told


def test_a_prefill_waits_beside_online_decodes_for_a_chunk_that_is_worth_a_step(echo_server):
    wait_until(lambda: is_idle(echo_server), "the server is idle")
    told: dict[str, Any] = {}
    for number in range(MOST_TRIES):  # it may wait between two looks
        told = asyncio.run(waits_for_a_longer_chunk(echo_server, f"chunk-{number}-"))
        if "worth_chunk_s" in told:
            break
    assert told["reason"] == "limit"
    assert told["worth_chunk_s"] > told["room_s"] >= told["smallest_chunk_s"]
