"""Which plots a results folder gets, by the module that made it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from echo_sgl.types import Task
from eval.load.records import Record, Status, read_records
from eval.report_page.plots import Series, bars, lines, points

Tree = Mapping[str, Any]
Plots = Callable[[Path, Tree], list[str]]

NUM_BINS = 24


def median(tree: Tree, *path: str) -> float | None:
    """A figure of a summary: the median over repetitions; None where there is none."""
    value: Any = tree
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        value = value.get("median")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def over_arms(arms: Tree, *path: str) -> list[float | None]:
    return [median(tree, *path) for tree in arms.values()]


def corun_plots(folder: Path, summary: Tree) -> list[str]:
    """Online load against harvest over time, hit ratios, and latencies."""
    arms = summary["arms"]
    names = list(arms)
    phases = {"alone": "online_alone", "together": "online_together"}

    def both(latency: str) -> dict[str, list[float | None]]:
        return {label: over_arms(arms, phase, latency, "p99") for label, phase in phases.items()}

    return [
        *over_time(folder, names),
        bars("Online TTFT p99", names, both("ttft_ms"), unit="ms"),
        bars("Online TPOT p99", names, both("tpot_ms"), unit="ms"),
    ]


def ablation_plots(folder: Path, summary: Tree) -> list[str]:
    """Attainment against harvest, latencies against stock alone, and both loads over time."""
    arms = summary["arms"]
    names = list(arms)
    reached = {
        name: (x, y)
        for name, x, y in zip(
            names,
            over_arms(arms, "attainment", "together"),
            over_arms(arms, "harvest_tokens_per_s"),
            strict=True,
        )
        if x is not None and y is not None
    }
    slowdown = {
        key.upper(): over_arms(arms, "vs_stock_alone", f"{key}_ms_p99") for key in ("ttft", "tpot")
    }
    hits = {
        task: over_arms(arms, f"{task}_together", "hit_ratio") for task in ("online", "offline")
    }
    return [
        points("Promises kept and harvest", reached, x="attainment, %", unit="offline tokens/s"),
        bars("Online p99 against stock alone", names, slowdown, unit="times"),
        bars("Cache hits while both run", names, hits, unit="%"),
        *over_time(folder, names),
    ]


def cache_plots(folder: Path, summary: Tree) -> list[str]:
    """Hits of the whole run, or alone and together, or what a burst costs; and over time."""
    arms = summary["arms"]
    names = list(arms)
    first = next(iter(arms.values()))
    if "burst" in first:
        return [
            bars(
                "TTFT p99 of online requests",
                names,
                {part: over_arms(arms, part, "ttft_ms", "p99") for part in ("steady", "burst")},
                unit="ms",
            ),
            bars(
                "Offline work computed twice",
                names,
                {"recomputed": over_arms(arms, "offline", "recomputed_tokens")},
                unit="tokens",
            ),
            *over_time(folder, names),
        ]
    if "online" in first:
        return [
            bars(
                f"Cache hits of the {task} class",
                names,
                {phase: over_arms(arms, task, phase) for phase in ("alone", "together")},
                unit="%",
            )
            for task in ("online", "offline")
        ]
    return [
        bars("Cache hits", names, {"of the prompt": over_arms(arms, "hit_ratio")}, unit="%"),
        bars(
            "Speed of the job", names, {"speed": over_arms(arms, "tokens_per_s")}, unit="tokens/s"
        ),
        *hits_over_time(folder, names, "offline-alone"),
    ]


def reserve_plots(folder: Path, summary: Tree) -> list[str]:
    """Predicted against true peaks over time, how often one covered the other, and the price."""
    rows = summary["rows"]
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    predictors = list(dict.fromkeys(row["predictor"] for row in rows))

    def by_predictor(key: str) -> dict[str, list[float | None]]:
        found = {(row["trace"], row["predictor"]): row[key] for row in rows}
        return {name: [found.get((trace, name)) for trace in traces] for name in predictors}

    return [
        bars("Seconds whose coming peak was covered", traces, by_predictor("coverage"), unit="%"),
        bars("Reserved beyond that peak", traces, by_predictor("over_reservation"), unit="%"),
        *_reserve_curves(folder),
    ]


def _reserve_curves(folder: Path) -> list[str]:
    path = folder / "curves.json"
    if not path.exists():
        return []
    step_s = orjson.loads((folder / "config.json").read_bytes())["curve_step_s"]
    plots = []
    for trace, curves in orjson.loads(path.read_bytes()).items():
        series: dict[str, Series] = {}
        for label, values in curves.items():
            known = [(n * step_s, value) for n, value in enumerate(values) if value is not None]
            series[label] = ([at_s for at_s, _ in known], [value for _, value in known])
        plots.append(lines(f"Online KV, predicted and true: {trace}", series, x="s", unit="tokens"))
    return plots


def step_time_plots(_: Path, summary: Tree) -> list[str]:
    """Error of each model by kind of step, one plot a model size."""
    rows = summary["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    plots = []
    for size in dict.fromkeys(row["size"] for row in rows):
        found = {(row["model"], row["kind"]): row["mape"] for row in rows if row["size"] == size}
        models = dict.fromkeys(model for model, _ in found)
        series = {model: [found.get((model, kind)) for kind in kinds] for model in models}
        plots.append(
            bars(f"Mean error of a step's predicted time, {size}", kinds, series, unit="%")
        )
    return plots


def fleet_plots(_: Path, summary: Tree) -> list[str]:
    """Broken promises and offline work over the offline load, by arm, for each setting."""
    rows = summary["rows"]
    plots = []
    for job, tpot_s in dict.fromkeys((row["job"], row["tpot_s"]) for row in rows):
        here = [row for row in rows if (row["job"], row["tpot_s"]) == (job, tpot_s)]
        about = f"{job}, TPOT {tpot_s:g} s"
        for title, key, unit in (
            ("Broken promises under offline load", "violations", "%"),
            ("Offline work", "offline_tokens_per_s", "tokens/s"),
        ):
            series: dict[str, Series] = {}
            for arm in dict.fromkeys(row["arm"] for row in here):
                mine = [row for row in here if row["arm"] == arm]
                series[arm] = ([row["load_rps"] for row in mine], [row[key] for row in mine])
            plots.append(lines(f"{title}: {about}", series, x="offline requests/s", unit=unit))
    return plots


def shared_block_plots(_: Path, summary: Tree) -> list[str]:
    """Offline work of each layout by page size, one plot a job."""
    plots = []
    for job in dict.fromkeys(row["job"] for row in summary["rows"]):
        here = [row for row in summary["rows"] if row["job"] == job]
        pages = list(dict.fromkeys(row["page_tokens"] for row in here))
        found = {(row["layout"], row["page_tokens"]): row["offline_tokens_per_s"] for row in here}
        layouts = dict.fromkeys(layout for layout, _ in found)
        series = {layout: [found.get((layout, page)) for page in pages] for layout in layouts}
        names = [f"pages of {page}" for page in pages]
        plots.append(bars(f"Offline work of each layout: {job}", names, series, unit="tokens/s"))
    return plots


def crash_plots(_: Path, summary: Tree) -> list[str]:
    """Answers that a kill lost, which are computed again."""
    phases = summary["phases"]
    worst = [float(tree["answers_to_repeat_max"]) for tree in phases.values()]
    title = "Answers to compute again after a kill, at most"
    window = float(summary["window_lines"])
    return [bars(title, list(phases), {"worst": worst}, unit="lines", target=window)]


PLOTS: dict[str, Plots] = {
    "corun": corun_plots,
    "ablation": ablation_plots,
    "estimator_error": ablation_plots,
    "cache": cache_plots,
    "reserve_coverage": reserve_plots,
    "step_times": step_time_plots,
    "crash": crash_plots,
    "fleet": fleet_plots,
    "shared_blocks": shared_block_plots,
}


def over_time(folder: Path, arms: Sequence[str]) -> list[str]:
    """Online load, offline harvest and offline hits while both ran, of the first repetition."""
    records = {name: _records(folder, name, "together") for name in arms}
    records = {name: found for name, found in records.items() if found}
    if not records:
        return []
    end_s = max(_last_arrival_s(found) for found in records.values())
    load = {
        "requests": binned(
            ((r.scheduled_s, 1.0) for r in next(iter(records.values())) if r.task is Task.ONLINE),
            end_s,
        )
    }
    harvest = {
        name: binned(((r.end_s or 0.0, r.total_tokens) for r in _answered(found)), end_s)
        for name, found in records.items()
    }
    return [
        lines("Online load", load, x="s", unit="requests/s"),
        lines("Offline harvest beside it", harvest, x="s", unit="tokens/s"),
        *hits_over_time(folder, list(records), "together"),
    ]


def hits_over_time(folder: Path, arms: Sequence[str], phase: str) -> list[str]:
    """Cached share of the offline prompt tokens so far, as the job goes on."""
    series: dict[str, Series] = {}
    for name in arms:
        answered = sorted(_answered(_records(folder, name, phase)), key=lambda r: r.end_s or 0.0)
        prompt = cached = 0
        times, ratios = [], []
        for record in answered:
            prompt, cached = prompt + record.prompt_tokens, cached + record.cached_tokens
            times.append(record.end_s or 0.0)
            ratios.append(cached / prompt if prompt else 0.0)
        if times:
            series[name] = (times, ratios)
    return [lines("Offline hits so far", series, x="s", unit="%")] if series else []


def binned(events: Iterable[tuple[float, float]], end_s: float) -> Series:
    """Amounts per second from 0 to `end_s`, in equal bins; later events are left out."""
    size_s = max(end_s, 1e-9) / NUM_BINS
    sums = [0.0] * NUM_BINS
    for at_s, amount in events:
        if 0 <= at_s < end_s:
            sums[min(NUM_BINS - 1, int(at_s / size_s))] += amount
    return [size_s * (number + 0.5) for number in range(NUM_BINS)], [s / size_s for s in sums]


def _records(folder: Path, arm: str, phase: str) -> list[Record]:
    """The first repetition's records; a co-run and an ablation name their files differently."""
    for name in (f"{arm}-1-{phase}", f"{arm}-{phase}-1"):
        path = folder / "raw" / f"{name}.jsonl.gz"
        if path.exists():
            return read_records(path)
    return []


def _answered(records: Iterable[Record]) -> list[Record]:
    return [r for r in records if r.task is Task.OFFLINE and r.status is Status.OK]


def _last_arrival_s(records: Iterable[Record]) -> float:
    return max((r.scheduled_s for r in records if r.task is Task.ONLINE), default=0.0)
