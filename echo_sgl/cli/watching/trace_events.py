"""Steps as a trace that ui.perfetto.dev and chrome://tracing open.

One process per replica: a track of steps, counters of what was planned, marks of what happened.
Source: the Trace Event Format (JSON object form). Units: microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Event = dict[str, Any]
Step = Mapping[str, Any]

US_PER_S = 1e6
STEPS_TRACK = 1
_COMPOSITION = (
    "num_prefills",
    "prefill_tokens",
    "cached_tokens",
    "num_decodes",
    "decode_tokens",
    "num_offline",
)
_TIMES = ("time_s", "predicted_s", "upper_s", "limit_s", "slack_s")
_GAUGES = {"parked": "num_parked", "pooled": "num_pooled"}
_COUNTED = {
    "evicted tokens": "num_evicted_tokens",
    "parked": "num_parks",
    "resumed": "num_resumes",
    "retracted": "num_retractions",
    "offline prefill set aside": "num_prefill_parks",
    "online decode gave its place": "num_given_places",
}


def trace_document(replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole trace; time starts with the first step of any replica."""
    steps = {one["replica"]: _steps(one) for one in replicas}
    start_s = min((of[0]["start_s"] for of in steps.values() if of), default=0.0)
    events: list[Event] = []
    for replica, of_replica in steps.items():
        events += _names(replica)
        events += _replica_events(replica, of_replica, start_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def num_steps(document: Mapping[str, Any]) -> int:
    """Steps in a trace."""
    return sum(event["ph"] == "X" for event in document["traceEvents"])


def _steps(replica: Mapping[str, Any]) -> list[Step]:
    rows = [dict(zip(replica["columns"], row, strict=True)) for row in replica["rows"]]
    return sorted(rows, key=lambda step: float(step["start_s"]))


def _names(replica: int) -> Iterator[Event]:
    yield _metadata("process_name", replica, 0, f"replica {replica}")
    yield _metadata("thread_name", replica, STEPS_TRACK, "steps")


def _replica_events(replica: int, steps: Iterable[Step], start_s: float) -> Iterator[Event]:
    before: Step | None = None
    free_us = 0.0
    for step in steps:
        # Planned while the one before still ran; the device runs one after the other.
        ts_us = max(free_us, (step["start_s"] - start_s) * US_PER_S)
        if step["time_s"] is not None:
            yield _slice(replica, step, ts_us)
            free_us = ts_us + step["time_s"] * US_PER_S
        yield from _counters(replica, step, ts_us)
        if before is not None:
            yield from _marks(replica, before, step, ts_us)
        before = step


def _slice(replica: int, step: Step, ts_us: float) -> Event:
    args = {name.replace("_s", "_ms"): _ms(step[name]) for name in _TIMES}
    args |= {name: step[name] for name in _COMPOSITION}
    duration_us = step["time_s"] * US_PER_S
    return {**_event("X", _title(step), replica, ts_us), "dur": duration_us, "args": args}


def _title(step: Step) -> str:
    parts = []
    if step["num_prefills"]:
        parts.append(f"prefill {step['num_prefills']} ({step['prefill_tokens']} tokens)")
    if step["num_decodes"]:
        parts.append(f"decode {step['num_decodes']}")
    return " + ".join(parts) or "step"


def _counters(replica: int, step: Step, ts_us: float) -> Iterator[Event]:
    values = {name: step[key] for name, key in _GAUGES.items()}
    values |= {f"{key[:-2]}, ms": _ms(step[key]) for key in ("limit_s", "slack_s", "predicted_s")}
    for name, value in values.items():
        if value is not None:
            yield {**_event("C", name, replica, ts_us), "args": {name: value}}


def _marks(replica: int, before: Step, step: Step, ts_us: float) -> Iterator[Event]:
    for name, key in _COUNTED.items():
        if (count := step[key] - before[key]) > 0:
            mark = _event("i", f"{name}: {count}", replica, ts_us)
            yield {**mark, "s": "t", "args": {key: count}}


def _event(phase: str, name: str, replica: int, ts_us: float) -> Event:
    # Process 0 is the idle one to some viewers.
    common = {"ph": phase, "name": name, "cat": "echo", "ts": ts_us}
    return {**common, "pid": replica + 1, "tid": STEPS_TRACK}


def _metadata(name: str, replica: int, track: int, value: str) -> Event:
    event = {**_event("M", name, replica, 0.0), "args": {"name": value}}
    return event | {"tid": track}


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else time_s * 1000
