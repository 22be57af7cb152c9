"""One server start of the ablation: its phases, and what the server counted while both ran."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from eval.ablation.options import AblationOptions
from eval.arms import Arm
from eval.cache.phases import COUNTED_AFTER_S, Counters, parse_counters
from eval.corun.phases import empty_cache, offline_alone, online_alone, together, warm_up
from eval.figures.step_shares import Row, step_rows
from eval.load.mix import Mix
from eval.load.records import Record
from eval.servers.machine import probe_s
from eval.servers.server import LOCAL, Server, ServerStartError

# What an Echo server tells of its online requests' waits in the last minute.
WAITS = {
    "longest_wait_s": "echo_sgl_online_wait_seconds",
    "most_offline_steps_waited": "echo_sgl_online_wait_steps",
}
PHASES = ("online-alone", "offline-alone", "together")

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ArmRun:
    """All that was seen on one server; a class that did not run alone is empty there.

    `spans_s`: when each phase began and ended, on the monotonic clock, which steps have too.
    `probe_s`: how long the idle machine took for the same small work before the last phase.
    """

    online: list[Record]
    ceiling: list[Record]
    mixed: list[Record]
    online_window_s: tuple[float, float]
    counters: Counters = field(default_factory=dict)
    waits: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(WAITS))
    steps: list[Row] = field(default_factory=list)
    spans_s: dict[str, Span] = field(default_factory=dict)
    probe_s: float | None = None


def run_reference(server: Server, arm: Arm, mix: Mix, options: AblationOptions) -> list[Record]:
    """Online alone on a stock server, from an empty cache: what the promises are made of."""
    asyncio.run(warm_up(server, arm, mix))
    empty_cache(server)
    return asyncio.run(online_alone(server, arm, mix, options))


def settle(server: Server) -> None:
    """Wait until a server has noticed that nobody waits for what it still does.

    Where several share an accelerator, the next one's phases would begin beside that.
    """
    try:
        empty_cache(server)
    except (ServerStartError, httpx.HTTPError) as error:
        print(f"still busy, and the next arm beside it: {error}", file=sys.stderr)


def run_arm(
    server: Server, arm: Arm, mix: Mix, options: AblationOptions, *, has_ceiling: bool
) -> ArmRun:
    """Online alone and offline alone if asked for, then together; each from an empty cache."""
    asyncio.run(warm_up(server, arm, mix))
    began_s = [time.monotonic()]
    online: list[Record] = []
    if not options.reference_only:
        begin_phase(server, options)
        online = asyncio.run(online_alone(server, arm, mix, options))
    began_s.append(time.monotonic())
    ceiling: list[Record] = []
    if has_ceiling:
        begin_phase(server, options)
        work = offline_alone(server, arm, mix, options, limit_s=options.ceiling_s)
        ceiling = asyncio.run(work)
    begin_phase(server, options)
    before, probed_s = _metrics(server), probe_s()
    began_s.append(time.monotonic())
    mixed, window_s = asyncio.run(together(server, arm, mix, options))
    ended_s = time.monotonic()
    steps = step_rows(server, ended_s - began_s[-1])
    time.sleep(COUNTED_AFTER_S)
    after = _metrics(server)
    settle(server)
    old, new = parse_counters(before), parse_counters(after)
    grown = {key: value - old.get(key, 0.0) for key, value in new.items()}
    spans_s = dict(zip(PHASES, itertools.pairwise([*began_s, ended_s]), strict=True))
    return ArmRun(
        online, ceiling, mixed, window_s, grown, online_waits(after), steps, spans_s, probed_s
    )


def begin_phase(server: Server, options: AblationOptions) -> None:
    """From an empty cache; where phases are to be apart, also without what the last one taught."""
    empty_cache(server)
    if options.phases_apart:
        LOCAL.post(f"{server.url}/echo/forget-traffic", timeout=30).raise_for_status()


def online_waits(page: str) -> dict[str, float | None]:
    """By the keys of `WAITS`, from a `/metrics` page; None where the server does not tell."""
    told = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    return {key: told.get(name) for key, name in WAITS.items()}


def _metrics(server: Server) -> str:
    return LOCAL.get(f"{server.url}/metrics", timeout=30).text
