"""A job of short prompts and answers on a real server: its requests start in lots."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from eval.server import LOCAL
from tests.engine.traffic import FLEX, completion, is_idle, send_all, wait_until

pytestmark = pytest.mark.server

NUM_REQUESTS = 120
ONE = "def one(self): return self.value and self.index or not self.value"


def job(name: str = "lot") -> list[dict[str, object]]:
    """More than there are places, with answers that end one after the other."""
    rng = random.Random(5)
    return [
        completion(f"{ONE} {number}", rng.randint(4, 60), rid=f"{name}-{number}", **FLEX)
        for number in range(NUM_REQUESTS)
    ]


def knows_step_times(server) -> bool:
    """Whether a step was predicted; if not, another job is done to learn from."""
    if any(step["predicted_s"] is not None for step in trace(server)):
        return True
    asyncio.run(send_all(server, job("learn")))
    return False


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
    wait_until(lambda: knows_step_times(echo_server), "the server knows what steps take")
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
