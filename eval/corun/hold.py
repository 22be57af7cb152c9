"""Make a server begin with a job only when it has all of the lines that it is to begin with.

Lines that are sent at once reach the scheduler in an order that nobody sees, while the first of
them run already, and which are done next follows from that. Here requests of our own take every
place until the lines wait in Echo's pool; then the server pauses, and goes on when all of them are
aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from echo_sgl.types import OFFLINE_SERVICE_TIER
from eval.servers.server import LOCAL, Server, ServerStartError

LIMIT_S = 120.0
LOOK_S = 0.05
PLUG = "plug-"
# They decode until they are aborted. What is left of the pool is kept free by the burst reserve.
PLUGS_SHARE = 0.6


class PlugsEnded(ServerStartError):
    """Lines came more slowly than plugs could keep their places: the first of them run already."""


@asynccontextmanager
async def held(server: Server, num_lines: int) -> AsyncIterator[None]:
    """Send `num_lines` in the block: it ends when they wait and the server may begin.

    Errors: `ServerStartError` when they do not come to wait in `LIMIT_S`; `PlugsEnded`.
    """
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
        facts = await asyncio.to_thread(_facts, server)
        num_places = int(facts["max_running_requests"])
        plug_tokens = int(PLUGS_SHARE * facts["max_total_tokens"]) // num_places
        names = [f"{PLUG}{number}" for number in range(num_places)]
        plugs = asyncio.create_task(_send_plugs(client, names, plug_tokens))
        try:
            await _until(server, plugs, lambda load: load["num_running_reqs"] == num_places)
            yield
            await _until(server, plugs, lambda load: load["num_waiting_reqs"] >= num_lines)
        finally:
            await _pull_plugs(client, names)
            reasons = await plugs
        if set(reasons) != {"abort"}:
            raise PlugsEnded(f"plugs of a held server ended by {sorted(set(reasons))}")


async def _pull_plugs(client: httpx.AsyncClient, names: Sequence[str]) -> None:
    pause = {"mode": "in_place"}
    (await client.post("/pause_generation", json=pause)).raise_for_status()
    for name in names:
        (await client.post("/abort_request", json={"rid": name})).raise_for_status()
    (await client.post("/continue_generation", json={})).raise_for_status()


async def _send_plugs(
    client: httpx.AsyncClient, names: Sequence[str], max_new_tokens: int
) -> list[str]:
    """Why each of them ended."""
    body = {
        "input_ids": [[100 + number] for number in range(len(names))],
        "rid": list(names),
        "sampling_params": {
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
            "custom_params": {"service_tier": OFFLINE_SERVICE_TIER},
        },
    }
    answers = (await client.post("/generate", json=body)).raise_for_status().json()
    return [answer["meta_info"]["finish_reason"]["type"] for answer in answers]


def _facts(server: Server) -> dict[str, Any]:
    replicas = LOCAL.get(f"{server.url}/echo/steps", timeout=LIMIT_S).json()["replicas"]
    facts: dict[str, Any] = replicas[0]["server"]
    return facts


async def _until(
    server: Server, plugs: asyncio.Task[list[str]], condition: Callable[[dict[str, Any]], bool]
) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition(load := await asyncio.to_thread(_load, server)):
        if plugs.done():
            raise PlugsEnded(f"plugs of a held server ended by {sorted(set(plugs.result()))}")
        if time.monotonic() > deadline_s:
            raise ServerStartError(
                f"after {LIMIT_S:.0f} s a held server runs {load['num_running_reqs']} and lets "
                f"{load['num_waiting_reqs']} wait"
            )
        await asyncio.sleep(LOOK_S)


def _load(server: Server) -> dict[str, Any]:
    answer = LOCAL.get(f"{server.url}/v1/loads", timeout=LIMIT_S).json()
    load: dict[str, Any] = answer["loads"][0]
    return load
