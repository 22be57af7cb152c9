"""The phases of a co-run on one running server: online alone, offline alone, both together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

import httpx

from eval.arms import Arm
from eval.load import Phase
from eval.mix import Mix
from eval.records import Record
from eval.server import LOCAL, Server, ServerStartError

IDLE_TIMEOUT_S = 120.0
WARM_UP_REQUESTS = 4


class PhaseOptions(Protocol):
    """How long phases last and how many offline lines are in flight."""

    @property
    def duration_s(self) -> float: ...

    @property
    def lead_s(self) -> float: ...

    @property
    def drain_s(self) -> float: ...

    @property
    def window(self) -> int: ...

    @property
    def stream_offline(self) -> bool: ...


def empty_cache(server: Server) -> None:
    """Wait until the server is idle and flush its cache: it refuses while requests are there."""
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        answer = LOCAL.post(f"{server.url}/flush_cache", timeout=IDLE_TIMEOUT_S)
        if answer.status_code == httpx.codes.OK:
            return
        if time.monotonic() > deadline_s:
            raise ServerStartError(
                f"the server was not idle after {IDLE_TIMEOUT_S:.0f} s: {answer.text.strip()}"
            )
        time.sleep(0.2)


async def warm_up(server: Server, arm: Arm, mix: Mix) -> None:
    """The first requests pay for imports and thread pools; no phase shall."""
    phase = Phase(server.url)
    first = [request for _, request in mix.schedule(arm)[:WARM_UP_REQUESTS]]
    first += mix.lines(arm, stream=False)[:WARM_UP_REQUESTS]
    await phase.closed_loop(first, window=len(first), limit_s=IDLE_TIMEOUT_S)


async def online_alone(server: Server, arm: Arm, mix: Mix, options: PhaseOptions) -> list[Record]:
    phase = Phase(server.url)
    limit_s = options.duration_s + options.drain_s
    await phase.open_loop(mix.schedule(arm), limit_s=limit_s)
    return phase.records


async def offline_alone(
    server: Server, arm: Arm, mix: Mix, options: PhaseOptions, *, limit_s: float
) -> list[Record]:
    phase = Phase(server.url)
    lines = mix.lines(arm, stream=options.stream_offline)
    await phase.closed_loop(lines, window=min(options.window, len(lines)), limit_s=limit_s)
    return phase.records


async def together(
    server: Server, arm: Arm, mix: Mix, options: PhaseOptions
) -> tuple[list[Record], tuple[float, float]]:
    """Offline first, then online joins; offline stays until the last online answer.

    The second value is when online requests came, in seconds of the phase.
    """
    phase = Phase(server.url)
    lines, schedule = mix.lines(arm, stream=options.stream_offline), mix.schedule(arm)
    limit_s, window = options.duration_s + options.drain_s, min(options.window, len(lines))
    offline = asyncio.create_task(
        phase.closed_loop(lines, window=window, limit_s=options.lead_s + limit_s)
    )
    await asyncio.sleep(options.lead_s)
    start_s = phase.now_s()
    await phase.open_loop(schedule, limit_s=limit_s)
    offline.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await offline
    return phase.records, (start_s, start_s + options.duration_s)
