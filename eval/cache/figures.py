"""From the phases of one server start to the figures that the cache experiments compare."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from echo_sgl.types import Task
from eval.cache.load import CacheLoad
from eval.cache.options import CacheOptions
from eval.cache.phases import Counters, PhaseResult
from eval.figures.summary import class_stats, tokens_per_s
from eval.load.records import Record, Status
from eval.workloads.bounds import distinct_tokens

Tree = dict[str, Any]
Phases = Mapping[str, PhaseResult]

RETRACTIONS = "echo_sgl_retractions_total"
RECOMPUTED = "echo_sgl_recomputed_tokens_sum"
EVICTED = "sglang:evicted_tokens_total"


def figures(phases: Phases, load: CacheLoad, options: CacheOptions, bounds: Tree) -> Tree:
    """One server start's figures: a tree of numbers with the same keys for every arm."""
    if options.experiment == "overlap":
        return overlap_figures(phases)
    if options.experiment == "burst":
        return burst_figures(phases["together"], load.prompts, options)
    return offline_figures(phases["offline-alone"], bounds["infinite"])


def offline_figures(phase: PhaseResult, infinite_hits: int) -> Tree:
    """Hits of the whole job beside those of a cache that forgets nothing."""
    stats = class_stats(phase.records, Task.OFFLINE)
    time_s = max((record.end_s or 0.0 for record in phase.records), default=0.0)
    return {
        **_counts(stats),
        "of_infinite": stats["cached_tokens"] / infinite_hits if infinite_hits else None,
        "evicted_tokens": counter(phase.counters, EVICTED) or 0.0,
        "time_s": time_s,
        "tokens_per_s": tokens_per_s(phase.records, 0.0, time_s),
    }


def overlap_figures(phases: Phases) -> Tree:
    """Each class alone and together, over the requests that were answered in both phases.

    The phase together ends with the first class that is through, so all its requests ran
    beside the other class; the same requests are then looked up in the phase alone.
    """
    together = phases["together"].records
    tree: Tree = {}
    for task in Task:
        alone, mixed = matched(phases[f"{task}-alone"].records, together, task)
        ratios = [class_stats(part, task)["hit_ratio"] for part in (alone, mixed)]
        tree[task.value] = {
            "matched": len(mixed),
            "alone": ratios[0],
            "together": ratios[1],
            "difference": _difference(ratios[1], ratios[0]),
            "of_alone": _ratio(ratios[1], ratios[0]),
            "errors": class_stats(together, task)["error"],
        }
    tree["together_s"] = max((record.end_s or 0.0 for record in together), default=0.0)
    tree["evicted_tokens"] = counter(phases["together"].counters, EVICTED) or 0.0
    return tree


def burst_figures(
    phase: PhaseResult, prompts: Mapping[str, list[int]], options: CacheOptions
) -> Tree:
    """Online waits between bursts and in them, and what offline work was done twice.

    `computed_again` counts the prompt tokens that were computed although an earlier prompt
    of the job had them; usage does not show what a retracted request computes again, the
    server's own counters do (None where it has none).
    """
    stats = class_stats(phase.records, Task.OFFLINE)
    done = [r.id for r in phase.records if r.task is Task.OFFLINE and r.status is Status.OK]
    least = distinct_tokens([prompts[name] for name in done])
    computed = stats["prompt_tokens"] - stats["cached_tokens"]
    time_s = max((record.end_s or 0.0 for record in phase.records), default=0.0)
    return {
        **_waits(phase.records, options),
        "offline": {
            **_counts(stats),
            "computed_tokens": computed,
            "computed_again": computed - least,
            "retractions": counter(phase.counters, RETRACTIONS, task="offline"),
            "recomputed_tokens": counter(phase.counters, RECOMPUTED),
            "tokens_per_s": tokens_per_s(phase.records, 0.0, time_s),
            "ran_dry": stats["cancelled"] == 0,
        },
    }


def matched(
    alone: Iterable[Record], together: Iterable[Record], task: Task
) -> tuple[list[Record], list[Record]]:
    """The records of a class's requests that were answered in both phases, in equal order."""
    first, second = (
        {r.id: r for r in records if r.task is task and r.status is Status.OK}
        for records in (alone, together)
    )
    names = [name for name in second if name in first]
    return [first[name] for name in names], [second[name] for name in names]


def counter(counters: Counters, name: str, **labels: str) -> float | None:
    """Sum of a counter over all labels but the given ones; None when there is none such."""
    wanted = {f"{key}={value}" for key, value in labels.items()}
    found = []
    for key, value in counters.items():
        base, _, rest = key.partition("{")
        if base == name and wanted <= set(rest.rstrip("}").split(",")):
            found.append(value)
    return sum(found) if found else None


def _waits(records: Iterable[Record], options: CacheOptions) -> Tree:
    """Online figures of the steady times before bursts, and of the bursts; not of the end."""
    ends_s = list(itertools.accumulate(length_s for _, length_s in options.burst_segments))
    kept = ("requests", "ok", "error", "cancelled", "late", "ttft_ms")
    parts: dict[str, list[Record]] = {"steady": [], "burst": []}
    for record in records:
        number = bisect.bisect(ends_s, record.scheduled_s)
        if number < len(ends_s) - 1:
            parts["burst" if number % 2 else "steady"].append(record)
    stats = {name: class_stats(mine, Task.ONLINE) for name, mine in parts.items()}
    return {name: {key: one[key] for key in kept} for name, one in stats.items()}


def _counts(stats: Tree) -> Tree:
    kept = ("requests", "ok", "error", "cancelled", "prompt_tokens", "cached_tokens", "hit_ratio")
    return {key: stats[key] for key in kept}


def _difference(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
