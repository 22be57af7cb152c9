"""From one server start's records to its figures, and from those of all starts to an arm's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from echo_sgl.types import Task
from eval.ablation.arms import ALONE_ARM, BASE_ARM
from eval.ablation.phases import ArmRun
from eval.cache.figures import counter
from eval.cache.phases import Counters
from eval.figures.deadlines import deadline_figures
from eval.figures.slo import Slo, attainment
from eval.figures.step_shares import Row, step_shares
from eval.figures.summary import (
    LATENCIES,
    class_stats,
    harvest_tokens_per_s,
    harvest_window,
    over_repetitions,
    ratio,
    steady_window,
    tokens_per_s,
)
from eval.load.records import Record

Tree = dict[str, Any]
Runs = Mapping[str, Mapping[int, Tree]]  # by arm and repetition

ENOUGH_ATTAINMENT = 0.99  # of what the same server reaches alone
# The first of these that a server has; each with the labels it must carry.
COUNTED: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "parks": (
        ("echo_sgl_parks_total", {}),
        ("echo_sgl_parked_prefills_total", {}),
    ),
    "retractions": (
        ("echo_sgl_retractions_total", {"task": "offline"}),
        ("sglang:num_retracted_requests_total", {}),
    ),
    "recomputed_tokens": (("echo_sgl_recomputed_tokens_sum", {}),),
}


def run_figures(
    run: ArmRun, slo: Slo, *, ceiling: Tree, reference: Tree, deadlines: Mapping[str, float]
) -> Tree:
    """One start's figures, with the same keys for every arm; None where there is nothing.

    `ceiling` is `ceiling_figures` of this start or of an earlier one of the arm;
    `reference` is `reference_figures` of the stock server alone that `slo` was made of.
    Attainment is held against the better of both servers alone: one that was disturbed while
    it ran alone would make any attainment look good. `machine_slowness`: how many times longer
    the same work took than when the promises were measured.
    """
    alone, mixed = class_stats(run.online, Task.ONLINE), class_stats(run.mixed, Task.ONLINE)
    window_s = harvest_window(run.mixed, *run.online_window_s)
    harvest = harvest_tokens_per_s(run.mixed, run.online_window_s)
    reached = {"alone": attainment(run.online, slo), "together": attainment(run.mixed, slo)}
    of_ceiling = ratio(harvest, ceiling["tokens_per_s"])
    steps = step_shares(_steps_of(run, window_s))
    best_alone = max(reached["alone"] or 0.0, reference["attainment"])
    return {
        "online_alone": alone,
        "online_together": mixed,
        "offline_together": class_stats(run.mixed, Task.OFFLINE),
        "vs_alone": _inflation(mixed, alone),
        "vs_stock_alone": _inflation(mixed, reference["online_alone"]),
        "attainment": {**reached, "of_alone": ratio(reached["together"], best_alone)},
        "ceiling": ceiling,
        "harvest_tokens_per_s": harvest,
        "harvest_of_ceiling": of_ceiling,
        "harvest_of_room": ratio(of_ceiling, steps["room"]),
        "job_ran_dry": _has_job(run) and window_s[1] < run.online_window_s[1],
        **{name: first_counter(run.counters, name) for name in COUNTED},
        **run.waits,
        "steps": steps,
        "machine_slowness": ratio(run.probe_s, reference.get("probe_s")),
        "deadlines": deadline_figures(run.mixed, deadlines, end_s=_last_s(run.mixed)),
    }


def _has_job(run: ArmRun) -> bool:
    return any(record.task is Task.OFFLINE for record in run.mixed)


def _steps_of(run: ArmRun, window_s: tuple[float, float]) -> list[Row]:
    """The steps that began in these seconds of the phase in which both classes ran."""
    phase_s, _ = run.spans_s.get("together", (0.0, 0.0))
    first_s, last_s = (phase_s + one for one in window_s)
    return [row for row in run.steps if first_s <= row["start_s"] < last_s]


def reference_figures(records: Sequence[Record], slo: Slo) -> Tree:
    """What the stock server's online users get without offline work."""
    return {
        "online_alone": class_stats(records, Task.ONLINE),
        "attainment": attainment(records, slo),
    }


def ceiling_figures(records: Sequence[Record]) -> Tree:
    """What the offline job reaches alone."""
    stats = class_stats(records, Task.OFFLINE)
    speed = tokens_per_s(records, *steady_window(records))
    return {"tokens_per_s": speed, "hit_ratio": stats["hit_ratio"], "answered": stats["ok"]}


def summarise(runs: Runs) -> dict[str, Tree]:
    """Each arm's figures over its repetitions, beside those of two other arms in the same ones.

    Where the stock server was measured without a job in turn with the others, its attainment in
    the same repetition is what theirs is held against: a machine that has got slower since the
    promises were taken would make any scheduler look bad.
    """
    summary: dict[str, Tree] = {}
    base, alone = runs.get(BASE_ARM, {}), runs.get(ALONE_ARM, {})
    for name, all_of_mine in runs.items():
        mine = {number: _beside(tree, alone.get(number)) for number, tree in all_of_mine.items()}
        if not mine:
            continue
        ratios = [
            {"vs_base": ratio(tree["harvest_tokens_per_s"], base[number]["harvest_tokens_per_s"])}
            for number, tree in mine.items()
            if number in base
        ]
        summary[name] = {
            "repetitions": len(mine),
            **over_repetitions(list(mine.values())),
            **over_repetitions(ratios or [{"vs_base": None}]),
            "at_equal_attainment": at_equal_attainment(list(mine.values())),
        }
    return summary


def _beside(tree: Tree, alone: Tree | None) -> Tree:
    """The figures with their attainment held against that of the server alone, if it is known."""
    if alone is None:
        return tree
    reached = tree["attainment"]
    of_alone = ratio(reached["together"], alone["attainment"]["together"])
    return {**tree, "attainment": {**reached, "of_alone": of_alone}}


def at_equal_attainment(trees: Sequence[Tree]) -> Tree:
    """The harvest of those runs that kept their promises as well as the server alone."""
    kept = [
        {key: tree[key] for key in ("harvest_tokens_per_s", "harvest_of_ceiling")}
        for tree in trees
        if (tree["attainment"]["of_alone"] or 0.0) >= ENOUGH_ATTAINMENT
    ]
    return {"runs": len(kept), **(over_repetitions(kept) if kept else {})}


def first_counter(counters: Counters, name: str) -> float | None:
    values = (counter(counters, metric, **labels) for metric, labels in COUNTED[name])
    return next((value for value in values if value is not None), None)


def _inflation(mixed: Tree, alone: Tree) -> Tree:
    return {
        f"{name}_{point}": ratio(mixed[name][point], alone[name][point])
        for name, point in LATENCIES
    }


def _last_s(records: Sequence[Record]) -> float:
    """When the phase was over: nothing is recorded later."""
    return max((record.end_s or 0.0 for record in records), default=math.inf)
