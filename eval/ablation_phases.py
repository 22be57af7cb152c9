"""One server start of the ablation: its phases, and what the server counted while both ran."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from eval.ablation_options import AblationOptions
from eval.arms import Arm
from eval.cache_phases import COUNTED_AFTER_S, Counters, parse_counters
from eval.corun_phases import empty_cache, offline_alone, online_alone, together, warm_up
from eval.mix import Mix
from eval.records import Record
from eval.server import LOCAL, Server
from eval.step_shares import Row, step_rows

WAIT = "echo_sgl_online_wait_seconds"
PHASES = ("online-alone", "offline-alone", "together")

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ArmRun:
    """All that was seen on one server; a class that did not run alone is empty there.

    `spans_s`: when each phase began and ended, on the monotonic clock, which steps have too.
    """

    online: list[Record]
    ceiling: list[Record]
    mixed: list[Record]
    online_window_s: tuple[float, float]
    counters: Counters = field(default_factory=dict)
    longest_wait_s: float | None = None
    steps: list[Row] = field(default_factory=list)
    spans_s: dict[str, Span] = field(default_factory=dict)


def run_reference(server: Server, arm: Arm, mix: Mix, options: AblationOptions) -> list[Record]:
    """Online alone on a stock server, from an empty cache: what the promises are made of."""
    asyncio.run(warm_up(server, arm, mix))
    empty_cache(server)
    return asyncio.run(online_alone(server, arm, mix, options))


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
    before = _metrics(server)
    began_s.append(time.monotonic())
    mixed, window_s = asyncio.run(together(server, arm, mix, options))
    ended_s = time.monotonic()
    steps = step_rows(server, ended_s - began_s[-1])
    time.sleep(COUNTED_AFTER_S)
    after = _metrics(server)
    old, new = parse_counters(before), parse_counters(after)
    grown = {key: value - old.get(key, 0.0) for key, value in new.items()}
    wait_s = longest_wait_s(before, after)
    spans_s = dict(zip(PHASES, itertools.pairwise([*began_s, ended_s]), strict=True))
    return ArmRun(online, ceiling, mixed, window_s, grown, wait_s, steps, spans_s)


def begin_phase(server: Server, options: AblationOptions) -> None:
    """From an empty cache; where phases are to be apart, also without what the last one taught."""
    empty_cache(server)
    if options.phases_apart:
        LOCAL.post(f"{server.url}/echo/forget-traffic", timeout=30).raise_for_status()


def longest_wait_s(before: str, after: str) -> float | None:
    """The longest wait between two `/metrics` texts; None where the server does not tell.

    Of a histogram it is the upper bound of the last bucket that grew; a gauge tells itself.
    """
    gauge, new = _waits(after)
    if not new:
        return gauge
    old = _waits(before)[1]
    counts = {bound_s: count - old.get(bound_s, 0.0) for bound_s, count in sorted(new.items())}
    total = max(counts.values())
    return next(bound_s for bound_s, count in counts.items() if count == total) if total else 0.0


def _waits(text: str) -> tuple[float | None, dict[float, float]]:
    """The largest value of a gauge, and the cumulative counts of a histogram by bound (s)."""
    largest: float | None = None
    buckets: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{WAIT}_bucket":
                bound_s = float(sample.labels["le"])
                buckets[bound_s] = buckets.get(bound_s, 0.0) + sample.value
            elif sample.name in (WAIT, f"{WAIT}_max"):
                largest = max(largest or 0.0, sample.value)
    return largest, buckets


def _metrics(server: Server) -> str:
    return LOCAL.get(f"{server.url}/metrics", timeout=30).text
