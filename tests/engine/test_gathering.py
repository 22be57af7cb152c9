"""A job of short prompts and answers on a real server: its requests start in lots."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from eval.servers.server import LOCAL
from tests.engine.traffic import FLEX, completion, is_idle, send_all, wait_until
from tests.servers import COMMON_ARGS, NAMED, STRICT

pytestmark = pytest.mark.server

NUM_REQUESTS = 120
ONE = "def one(self): return self.value and self.index or not self.value"


def bodies(name: str = "lot", **fields: object) -> list[dict[str, object]]:
    """More than there are places, with answers that end one after the other."""
    rng = random.Random(5)
    return [
        completion(f"{ONE} {number}", rng.randint(4, 60), rid=f"{name}-{number}", **fields)
        for number in range(NUM_REQUESTS)
    ]


def knows_step_times(server) -> bool:
    """Whether a step was predicted; if not, another job is done to learn from."""
    if any(step["predicted_s"] is not None for step in trace(server)):
        return True
    asyncio.run(send_all(server, bodies("learn", **FLEX)))
    return False


def trace(server) -> list[dict[str, Any]]:
    answer = LOCAL.get(f"{server.url}/echo/trace", params={"seconds": 600}, timeout=60).json()
    [replica] = answer["replicas"]
    return [dict(zip(replica["columns"], row, strict=True)) for row in replica["rows"]]


def last_reason(server) -> str | None:
    """What the last of them waits for, or the one that the last one waits for."""
    answer = LOCAL.get(f"{server.url}/echo/requests/lot-{NUM_REQUESTS - 1}", timeout=60)
    held_back = answer.json().get("held_back") or {} if answer.status_code == 200 else {}
    return (held_back.get("first") or held_back).get("reason")


async def answers_and_reasons(
    server, sent: list[dict[str, object]]
) -> tuple[list[httpx.Response], set[str | None]]:
    answers = asyncio.create_task(send_all(server, sent))
    reasons = set()
    while not answers.done():
        reasons.add(await asyncio.to_thread(last_reason, server))
    return await answers, reasons


def mean_starts(server, sent: list[dict[str, object]], *, reason: str) -> float:
    """How many of the later ones start in a prefill step; all are answered in full.

    One of them waits for `reason` meanwhile. Who asks on a machine that has much else to do may
    come when it does not: then they are sent again.
    """
    wait_until(lambda: knows_step_times(server), "the server knows what steps take")
    wait_until(lambda: is_idle(server), "the server is idle")
    before_s = max((step["start_s"] for step in trace(server)), default=0.0)
    wait_until(lambda: reason in reasons_met(server, sent), f"one of them waits for {reason}")
    steps = [step for step in trace(server) if step["start_s"] > before_s]
    starts = [step["num_prefills"] for step in steps if step["num_prefills"]]
    later = starts[len(starts) // 2 :]
    return sum(later) / len(later)


def reasons_met(server, sent: list[dict[str, object]]) -> set[str | None]:
    answers, reasons = asyncio.run(answers_and_reasons(server, sent))
    lengths = [answer.json()["usage"]["completion_tokens"] for answer in answers]
    assert lengths == [body["max_tokens"] for body in sent]
    return reasons


# At once it would be 1.3: whenever one has ended, one starts.
def test_requests_of_a_job_start_in_lots(echo_server):
    assert mean_starts(echo_server, bodies(**FLEX), reason="gather") > 2


def test_online_requests_of_a_long_queue_start_in_lots(server_for, write_config):
    """As far as first tokens allow: here they may come as late as they like."""
    config = write_config(slo={"ttft_s": 600.0, "tpot_s": 60.0})
    server = server_for((*COMMON_ARGS, *NAMED), config=str(config), env=STRICT)
    assert mean_starts(server, bodies(), reason="queue") > 2
