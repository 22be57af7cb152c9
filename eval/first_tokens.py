"""What the rules about first tokens gain, simulated: `steps.split_online` and `steps.place_gain`.

    python -m eval.first_tokens --workers 2

The ablation's workloads under its promises on the simulated servers of `eval.chunks`, as fast as
when the promises were taken and somewhat slower. Writes eval/results/<name>/: config.json,
summary.json and summary.md.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from echo_sgl.config import load_config
from echo_sgl.types import Task
from eval.cache.arms import Sections
from eval.chunks import GPU_SLO_FACTOR, SERVERS, SLO_FACTORS, load_of
from eval.corun.report import table
from eval.figures.summary import tokens_per_s
from eval.options import check_options, option
from eval.paths import CONFIGS_DIR, RESULTS_DIR
from eval.simulated.load import (
    LEAD_S,
    latencies,
    with_sections,
    with_slo,
)
from eval.simulated.points import parse_points, simulate_points, write_points

# Of which servers, and mean online requests a second.
LOADS = {
    "H200, 64 places": (("llm-d",), (4.0, 8.0, 12.0, 16.0)),
    "H200, 256 places": (("azure-qmsum", "bursts-loogle"), (4.0, 8.0, 12.0)),
    "CPU": (("llm-d", "long-answers"), (1.6, 3.2)),
    "fast CPU": (("llm-d", "bursts-loogle"), (5.0, 7.0)),
}
SETTINGS: dict[str, Sections] = {
    "echo.toml": {},
    "split_online false": {"steps": {"split_online": False}},
    **{f"place_gain {gain:g}": {"steps": {"place_gain": gain}} for gain in (0.0, 1.5)},
}
SEEDS = range(4)
# How many times as long steps take as when the promises were taken.
SLOWNESS = (1.0, 1.1)
LOAD_KEYS = ("server", "workload", "rate_rps", "slowness")


@dataclasses.dataclass(frozen=True, slots=True)
class FirstTokensOptions:
    """What is simulated."""

    name: str = option("first-tokens", "folder under eval/results/ that takes the results")
    duration_s: float = option(60.0, "how long online requests keep coming", 1)
    workers: int = option(1, "processes; the results are the same", 1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One load on one server under one setting; `slowness`: see `SLOWNESS`."""

    server: str
    workload: str
    rate_rps: float
    seed: int
    slowness: float
    setting: str


def points() -> Iterator[Point]:
    for server, (workloads, rates_rps) in LOADS.items():
        for workload in workloads:
            for rate_rps in rates_rps:
                for seed in SEEDS:
                    for slowness in SLOWNESS:
                        for setting in SETTINGS:
                            yield Point(server, workload, rate_rps, seed, slowness, setting)


def run_point(options: FirstTokensOptions, point: Point) -> dict[str, Any]:
    """One row: online requests, how many promises were kept, and what the job got."""
    load = load_of(point.server, point.workload, point.rate_rps, point.seed, options.duration_s)
    slo = load.promise(SLO_FACTORS.get(point.server, GPU_SLO_FACTOR))
    echo = with_sections(load_config(CONFIGS_DIR / "echo.toml"), SETTINGS[point.setting])
    lines = [*load.offline, *load.online]
    records = load.run(with_slo(echo, slo), lines, slowness=point.slowness)
    ttft_s, tpot_s = latencies([one for one in records if one.task is Task.ONLINE])
    in_time = ttft_s <= slo.ttft_s
    return {
        **dataclasses.asdict(point),
        "num_online": len(ttft_s),
        "num_kept": int(np.sum(in_time & (tpot_s <= slo.tpot_s))),
        "num_late_first": int(np.sum(~in_time)),
        "offline_tokens_per_s": tokens_per_s(records, LEAD_S, LEAD_S + options.duration_s),
    }


def summary_markdown(config: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """summary.md: each load, over the seeds, and all of them."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    heads = ["server", "workload", "online/s", "times as slow"]
    return "\n".join(
        [
            f"# First tokens `{config['name']}`: a simulation",
            "",
            f"    {config['command']}",
            "",
            f"- {config['options']['duration_s']:g} s each, {len(SEEDS)} seeds summed",
            f"- promised: p99 of the same online load alone, times {GPU_SLO_FACTOR} on the H200 "
            "and 1.5 on the CPUs, on a machine that is not slower",
            "",
            "## Promises kept, and late first tokens",
            "",
            *table([*heads, "online requests", *settings], _kept_cells(rows)),
            "",
            f"## The job: tokens/s with {settings[0]}, and times that with others",
            "",
            *table([*heads, *settings], _rate_cells(rows)),
            "",
        ]
    )


def _kept_cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    cells = []
    groups = [*_groups(rows, LOAD_KEYS), (("all", "", None, None), rows)]
    for (server, workload, *numbers), group in groups:
        by_setting = [one for _, one in _groups(group, ("setting",))]
        num_online = f"{_total(by_setting[0], 'num_online'):,}"
        head = [server, workload, *("" if one is None else f"{one:g}" for one in numbers)]
        cells.append([*head, num_online, *map(_kept, by_setting)])
    return cells


def _rate_cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    cells = []
    for (server, workload, *numbers), group in _groups(rows, LOAD_KEYS):
        first, *others = (
            _total(one, "offline_tokens_per_s") / len(one)
            for _, one in _groups(group, ("setting",))
        )
        ratios = [f"{rate / first:.3f}x" if first else "-" for rate in others]
        cells.append([server, workload, *(f"{one:g}" for one in numbers), f"{first:,.0f}", *ratios])
    return cells


def _groups(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[tuple[Any, Any]]:
    """Rows that agree in these columns, in the order in which they come first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.items())


def _kept(rows: Sequence[dict[str, Any]]) -> str:
    share = _total(rows, "num_kept") / _total(rows, "num_online")
    return f"{share:.2%} ({_total(rows, 'num_late_first')})"


def _total(rows: Sequence[dict[str, Any]], name: str) -> Any:
    return sum(row[name] for row in rows)


def main(argv: Sequence[str]) -> None:
    """Simulate every point and write the results; wrong options end it with code 2."""
    prog = "python -m eval.first_tokens"
    options = parse_points(argv, FirstTokensOptions, prog=prog)
    chunk = len(SETTINGS) * len(SLOWNESS) * len(SEEDS)
    rows = simulate_points(run_point, options, list(points()), chunk=chunk)
    facts = {"servers": {name: one.sizes for name, one in SERVERS.items()}}
    write_points(RESULTS_DIR, options, rows, summary_markdown, prog=prog, argv=argv, facts=facts)


if __name__ == "__main__":
    main(sys.argv[1:])
