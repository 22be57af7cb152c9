"""From records to figures: percentiles, hit ratios, throughput, inflation, medians over runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from echo_sgl.types import Task
from eval.load.records import Record, Status

STEADY_CUT = 0.1
# Of the time in which online requests come: a job that lasts for less of it has no harvest.
MIN_HARVEST_SHARE = 0.1
LATENCIES = (
    ("ttft_ms", "p50"),
    ("ttft_ms", "p99"),
    ("tpot_ms", "p50"),
    ("tpot_ms", "p99"),
    ("gap_ms", "p99"),
)

Tree = dict[str, Any]


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float | None]:
    """p50, p99 (linear between ranks) and max in ms; None when there is nothing to measure."""
    values = [value * 1000 for value in seconds]
    if not values:
        return {"p50": None, "p99": None, "max": None}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "max": max(values)}


def class_stats(records: Iterable[Record], task: Task) -> Tree:
    """Counts, tokens and latencies of one class. Tokens are those of complete answers."""
    mine = [record for record in records if record.task is task]
    done = [record for record in mine if record.status is Status.OK]
    prompt = sum(record.prompt_tokens for record in done)
    cached = sum(record.cached_tokens for record in done)
    return {
        "requests": len(mine),
        **{status.value: sum(r.status is status for r in mine) for status in list(Status)[1:]},
        "late": sum(record.late for record in mine),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "generated_tokens": sum(record.completion_tokens for record in done),
        "hit_ratio": cached / prompt if prompt else None,
        "ttft_ms": percentiles_ms(r.ttft_s for r in mine if r.ttft_s is not None),
        "tpot_ms": percentiles_ms(r.tpot_s for r in mine if r.tpot_s is not None),
        "gap_ms": percentiles_ms(gap_s for record in mine for gap_s in record.gaps_s),
    }


def tokens_per_s(records: Iterable[Record], start_s: float, end_s: float) -> float:
    """Prompt + generated tokens of the offline answers completed in (start, end], a second.

    Half open at the start: answers that end in one step with the window's beginning were
    worked for before it.
    """
    if end_s <= start_s:
        return 0.0
    completed = sum(r.total_tokens for r in _completed(records) if start_s < _end(r) <= end_s)
    return completed / (end_s - start_s)


def streamed_tokens_per_s(records: Iterable[Record], start_s: float, end_s: float) -> float:
    """Prompt + generated tokens of streamed offline answers that came in (start, end], a second.

    A prompt comes with its first token. Answers that were given up half way count as far as they
    got: this has less scatter than `tokens_per_s`, which waits for their ends.
    """
    if end_s <= start_s:
        return 0.0
    streamed = [r for r in records if r.task is Task.OFFLINE and r.first_token_s is not None]
    came = sum(_came_by(record, end_s) - _came_by(record, start_s) for record in streamed)
    return came / (end_s - start_s)


def _came_by(record: Record, at_s: float) -> float:
    first_s, last_s = record.first_token_s, record.last_token_s
    assert first_s is not None and last_s is not None
    if at_s < first_s:
        return 0.0
    share = (at_s - first_s) / (last_s - first_s) if at_s < last_s else 1.0
    return record.prompt_tokens + 1 + share * (record.completion_tokens - 1)


def steady_window(records: Iterable[Record], cut: float = STEADY_CUT) -> tuple[float, float]:
    """From the completion of the first tenth of the offline answers to that of the last but one.

    Before it the server fills up, after it the job runs dry. (0, 0) when too few completed.
    """
    ends = sorted(_end(record) for record in _completed(records))
    num_cut = math.ceil(len(ends) * cut)
    if len(ends) <= 2 * num_cut:
        return 0.0, 0.0
    return ends[num_cut - 1], ends[len(ends) - num_cut - 1]


def harvest_window(records: Sequence[Record], start_s: float, end_s: float) -> tuple[float, float]:
    """The window in which online runs, cut where the job ran dry if it did not last so long.

    Empty where the job was over before online requests came.
    """
    offline = [record for record in records if record.task is Task.OFFLINE]
    if any(r.status is Status.CANCELLED for r in offline):
        return start_s, end_s
    return start_s, max(start_s, min(end_s, steady_window(offline)[1]))


def harvest_tokens_per_s(
    records: Sequence[Record],
    online_window_s: tuple[float, float],
    *,
    speed: Callable[[Sequence[Record], float, float], float] = tokens_per_s,
) -> float | None:
    """What the job did a second in `harvest_window`; None where that is too short to tell.

    Too short is less than `MIN_HARVEST_SHARE` of the online window: a job that was done before is
    no job that did nothing.
    """
    start_s, end_s = harvest_window(records, *online_window_s)
    least_s = MIN_HARVEST_SHARE * (online_window_s[1] - online_window_s[0])
    return None if end_s - start_s < least_s else speed(records, start_s, end_s)


def summarise_repetition(
    online_alone: Sequence[Record],
    offline_alone: Sequence[Record],
    together: Sequence[Record],
    online_window_s: tuple[float, float],
) -> Tree:
    """All figures of one server start: three phases, their ratios, and what went wrong.

    `online_window_s` is when online ran in `together`. The ceiling and the harvest count
    offline prompt + generated tokens of lines completed per second; the latter is None where the
    job was over too early.
    """
    window_s = harvest_window(together, *online_window_s)
    alone, mixed = class_stats(online_alone, Task.ONLINE), class_stats(together, Task.ONLINE)
    ceiling = tokens_per_s(offline_alone, *steady_window(offline_alone))
    harvest = harvest_tokens_per_s(together, online_window_s)
    return {
        "online_alone": alone,
        "offline_alone": class_stats(offline_alone, Task.OFFLINE),
        "online_together": mixed,
        "offline_together": class_stats(together, Task.OFFLINE),
        "inflation": {
            f"{name}_{point}": ratio(mixed[name][point], alone[name][point])
            for name, point in LATENCIES
        },
        "ceiling_tokens_per_s": ceiling,
        "harvest_tokens_per_s": harvest,
        "harvest_of_ceiling": ratio(harvest, ceiling),
        "harvest_window_s": window_s[1] - window_s[0],
        "job_ran_dry": window_s[1] < online_window_s[1],
    }


def over_repetitions(trees: Sequence[Mapping[str, Any]]) -> Tree:
    """The same tree with {median, min, max} at every number; None where a run lacks it.

    A run that was measured by earlier code may lack a key.
    """
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return {key: _merge([tree.get(key) for tree in trees]) for key in keys}


def _merge(values: Sequence[Any]) -> Any:
    if any(isinstance(value, Mapping) for value in values):
        return over_repetitions([value or {} for value in values])
    if any(value is None for value in values):
        return {"median": None, "min": None, "max": None}
    return {"median": float(np.median(values)), "min": min(values), "max": max(values)}


def _completed(records: Iterable[Record]) -> list[Record]:
    return [r for r in records if r.task is Task.OFFLINE and r.status is Status.OK]


def _end(record: Record) -> float:
    assert record.end_s is not None  # every ended record has its time
    return record.end_s


def ratio(value: float | None, base: float | None) -> float | None:
    """None where one of them is not known, or the base is 0."""
    return value / base if value is not None and base else None
