"""A server whose steps are so short of time that offline decodes sit out beside online ones."""

from __future__ import annotations

import asyncio

import httpx

from eval.servers.server import LOCAL
from tests.engine.traffic import (
    FLEX,
    completion,
    documents,
    metric,
    pooled,
    send_all,
    until,
    wait_until,
)

# Far less than any step takes: whatever is offline has to sit out beside online decodes.
# The smallest chunk is more than half of SGLang's: two of them never fit one step.
TIGHT = {
    "slo": {"ttft_s": 0.001, "tpot_s": 0.000001},
    "offline": {"order": "fcfs"},
    "steps": {"min_chunk_tokens": 160, "online_chunks": "slack"},
}

# After SGLang's warm-up such promises would be refused.
UNTRIED = ("--skip-server-warmup",)


def offline_bodies() -> list[dict[str, object]]:
    return [completion(text, 60, **FLEX) for text in documents(6, 60, seed=21)]


def online_bodies() -> list[dict[str, object]]:
    return [completion(f"online {number}", 40) for number in range(6)]


def parks(server) -> float:
    return metric(server, "echo_sgl_parks_total", task="offline")


def learn(server) -> None:
    """Let the estimator see enough steps of each kind to be fitted, and batches of all sizes: on a
    quiet machine requests of one length would start and end together."""
    texts_of_job = enumerate(documents(8, 120, seed=22))
    alone = [completion(text, 16 + 4 * number, **FLEX) for number, text in texts_of_job]
    wait_until(
        lambda: (
            {answer.status_code for answer in asyncio.run(send_all(server, alone))} == {200}
            and metric(server, "echo_sgl_step_time_refits_total") > 0
        ),
        "the estimator is fitted",
    )


async def offline_then_online(server, offline_first=None, online_then=None) -> list[httpx.Response]:
    """Online requests that come while offline ones decode."""
    first = offline_first or offline_bodies()
    offline = asyncio.create_task(send_all(server, first))
    await until(
        lambda: offline.done() or (num_running(server) > 0 and pooled(server) < len(first)),
        "offline requests run, or did",
    )
    online = await send_all(server, online_then or online_bodies())
    return [*await offline, *online]


def num_running(server) -> int:
    return _load(server, "num_running_reqs")


def num_waiting(server) -> int:
    return _load(server, "num_waiting_reqs")


def _load(server, what: str) -> int:
    loads = LOCAL.get(f"{server.url}/v1/loads", timeout=30).json()["loads"]
    return sum(load[what] for load in loads)
