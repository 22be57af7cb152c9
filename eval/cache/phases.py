"""The phases of the cache experiments on one running server, each from an empty cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from eval.arms import Arm
from eval.cache.load import CacheLoad
from eval.cache.options import CacheOptions
from eval.corun.phases import empty_cache
from eval.load.client import Phase, Request, load_client
from eval.load.records import Record
from eval.servers.server import LOCAL, Server

# The server counts just after it has answered.
COUNTED_AFTER_S = 0.5
WARM_UP_REQUESTS = 2
# Labels that tell one process or server from another, not one kind of event.
_PLACE_LABELS = {"model_name", "engine_type", "pid", "pp_rank", "moe_ep_rank", "attn_dp_rank"}
_PLACE_LABELS |= {"tp_rank", "dp_rank", "hostname"}

Counters = dict[str, float]
Talk = list[tuple[float, Request]]


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """All that one phase sent, and by how much the server's counters grew in it."""

    records: list[Record]
    counters: Counters = field(default_factory=dict)


class TalkPhase(Phase):
    """A phase that can also hold conversations: a turn waits for the answer before it."""

    async def converse(self, talks: Iterable[Talk], *, at_once: int) -> None:
        """Hold `at_once` of the conversations at a time, in their order, until all are over."""
        queue = iter(talks)
        async with load_client(self._url) as client, asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(self._talk(client, queue))

    async def _talk(self, client: aiohttp.ClientSession, queue: Iterator[Talk]) -> None:
        for talk in queue:
            for wait_s, request in talk:
                await asyncio.sleep(wait_s)
                await self._send(client, request, self._record(request, self.now_s()))


def run_phases(
    server: Server, arm: Arm, load: CacheLoad, options: CacheOptions
) -> dict[str, PhaseResult]:
    """What the experiment asks of one server, by phase."""
    asyncio.run(_warm_up(server, arm, load))
    makers = PHASES[options.experiment]
    return {name: _run(server, make(arm, load, options)) for name, make in makers.items()}


def parse_counters(text: str) -> Counters:
    """Every counter of a `/metrics` text by its name and labels, summed over ranks.

    Labels that say where something was counted are left out, those that say what stay.
    """
    totals: Counters = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith(("_total", "_tokens_sum")):
                continue
            kept = {key: text for key, text in sample.labels.items() if key not in _PLACE_LABELS}
            labels = ",".join(f"{key}={kept[key]}" for key in sorted(kept))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            totals[name] = totals.get(name, 0.0) + float(sample.value)
    return totals


Work = Callable[[TalkPhase], Coroutine[Any, Any, None]]


def _run(server: Server, work: Work) -> PhaseResult:
    empty_cache(server)
    before = _counters(server)

    async def phase() -> list[Record]:
        phase = TalkPhase(server.url)
        await work(phase)
        return phase.records

    records = asyncio.run(phase())
    time.sleep(COUNTED_AFTER_S)
    after = _counters(server)
    return PhaseResult(records, {key: after[key] - before.get(key, 0.0) for key in after})


def _counters(server: Server) -> Counters:
    return parse_counters(LOCAL.get(f"{server.url}/metrics", timeout=30).text)


async def _warm_up(server: Server, arm: Arm, load: CacheLoad) -> None:
    """The first requests pay for imports and thread pools; no phase shall."""
    first = load.lines(arm)[:WARM_UP_REQUESTS]
    first += [request for _, request in load.schedule(arm)[:WARM_UP_REQUESTS]]
    first += [talk[0][1] for talk in load.talks(arm)[:WARM_UP_REQUESTS]]
    await Phase(server.url).closed_loop(first, window=len(first), limit_s=60)


def _offline_alone(arm: Arm, load: CacheLoad, options: CacheOptions) -> Work:
    lines = load.lines(arm)
    window = min(options.window, len(lines))
    return lambda phase: phase.closed_loop(lines, window=window, limit_s=options.limit_s)


def _online_alone(arm: Arm, load: CacheLoad, options: CacheOptions) -> Work:
    talks, at_once = load.talks(arm), options.sessions_at_once
    return lambda phase: _end_with(
        [phase.converse(talks, at_once=at_once)], limit_s=options.limit_s
    )


def _together(arm: Arm, load: CacheLoad, options: CacheOptions) -> Work:
    """Both begin at once and end with the first that is through: what is left would be alone."""
    offline, talks = _offline_alone(arm, load, options), load.talks(arm)
    at_once = options.sessions_at_once
    return lambda phase: _end_with(
        [offline(phase), phase.converse(talks, at_once=at_once)], limit_s=options.limit_s
    )


def _burst(arm: Arm, load: CacheLoad, options: CacheOptions) -> Work:
    """Offline runs from the start until the last online answer."""
    offline, schedule = _offline_alone(arm, load, options), load.schedule(arm)
    limit_s = options.limit_s
    return lambda phase: _end_with(
        [phase.open_loop(schedule, limit_s=limit_s)], [offline(phase)], limit_s=limit_s
    )


async def _end_with(
    enders: Sequence[Coroutine[Any, Any, None]],
    others: Sequence[Coroutine[Any, Any, None]] = (),
    *,
    limit_s: float,
) -> None:
    """Run all until the first of `enders` is through, or `limit_s`; cancel the rest."""
    first = [asyncio.create_task(work) for work in enders]
    tasks = [*first, *(asyncio.create_task(work) for work in others)]
    try:
        await asyncio.wait(first, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        # Our own cancelling is expected; anything else is a defect of this client.
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


PHASES: dict[str, dict[str, Callable[[Arm, CacheLoad, CacheOptions], Work]]] = {
    "offline": {"offline-alone": _offline_alone},
    "control": {"offline-alone": _offline_alone},
    "overlap": {
        "online-alone": _online_alone,
        "offline-alone": _offline_alone,
        "together": _together,
    },
    "burst": {"together": _burst},
}
