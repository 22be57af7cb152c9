"""The phases of a co-run on one running server: online alone, offline alone, both together."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import Protocol

import httpx

from eval.arms import Arm
from eval.corun.hold import held
from eval.load.client import Phase, Request
from eval.load.mix import Mix
from eval.load.records import Record
from eval.servers.server import LOCAL, Server, ServerStartError

IDLE_TIMEOUT_S = 120.0
WARM_UP_REQUESTS = 4
# A server takes a request in faster than this, so they stay in order.
HELD_GAP_S = 0.02


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

    @property
    def phases_apart(self) -> bool: ...


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
    job = await begin_job(server, phase, lines, window=options.window, on_hold=options.phases_apart)
    await end_job(job, within_s=limit_s)
    return phase.records


async def together(
    server: Server, arm: Arm, mix: Mix, options: PhaseOptions
) -> tuple[list[Record], tuple[float, float]]:
    """Offline first, then online joins; offline stays until the last online answer, and as long as
    online requests might have come.

    The second value is when online requests came, in seconds of the phase.
    """
    phase = Phase(server.url)
    lines, schedule = mix.lines(arm, stream=options.stream_offline), mix.schedule(arm)
    limit_s = options.duration_s + options.drain_s
    job = await begin_job(server, phase, lines, window=options.window, on_hold=options.phases_apart)
    await asyncio.sleep(options.lead_s)
    start_s = phase.now_s()
    await phase.open_loop(schedule, limit_s=limit_s)
    # Else an arm that answers the last one sooner has less time for its job than another one.
    end_s = start_s + options.duration_s
    await end_job(job, within_s=max(0.0, end_s - phase.now_s()))
    return phase.records, (start_s, end_s)


async def begin_job(
    server: Server, phase: Phase, lines: list[Request], *, window: int, on_hold: bool
) -> asyncio.Task[None]:
    """Send the offline lines, a window of them at a time; the server has begun with them.

    `on_hold`: it begins when it has all of the first window, and has it in the job's order.
    Then nothing else may be in the phase yet.
    """
    window = min(window, len(lines))
    if not on_hold:
        return asyncio.create_task(phase.closed_loop(lines, window=window, limit_s=math.inf))
    jobs: list[asyncio.Task[None]] = []
    try:
        async with held(server, window):
            sending = phase.closed_loop(lines, window=window, limit_s=math.inf, gap_s=HELD_GAP_S)
            jobs.append(asyncio.create_task(sending))
    except ServerStartError:
        for job in jobs:
            await end_job(job, within_s=0.0)
        raise
    begun_s = phase.now_s()
    for record in phase.records:
        record.sent_s = begun_s  # as far as the server's scheduler can tell
    return jobs[0]


async def end_job(job: asyncio.Task[None], *, within_s: float) -> None:
    """Give up what is not answered by then."""
    await asyncio.wait([job], timeout=within_s)
    job.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await job
