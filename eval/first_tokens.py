"""What it gains to prefill online requests in two steps (`steps.split_online`), simulated.

    python -m eval.first_tokens --workers 2

The ablation's workloads under its promises on the simulated servers of `eval.chunks`, as fast as
when the promises were taken and somewhat slower. Writes eval/results/<name>/: config.json,
summary.json and summary.md.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo_sgl.config import load_config
from echo_sgl.types import Task
from eval.chunks import GPU_SLO_FACTOR, SERVERS, SLO_FACTORS, load_of
from eval.options import check_options, option
from eval.report import table
from eval.simulated_load import (
    CONFIGS_DIR,
    LEAD_S,
    latencies,
    with_sections,
    with_slo,
)
from eval.simulated_points import parse_points, simulate_points, write_points
from eval.summary import tokens_per_s

RESULTS_DIR = Path(__file__).resolve().parent / "results"
# Of which servers, and mean online requests a second.
LOADS = {
    "H200, 64 places": (("llm-d",), (4.0, 8.0, 12.0)),
    "H200, 256 places": (("azure-qmsum", "bursts-loogle"), (4.0, 8.0, 12.0)),
    "CPU": (("llm-d", "long-answers"), (1.6,)),
}
SEEDS = range(4)
# How many times as long steps take as when the promises were taken.
SLOWNESS = (1.0, 1.1)


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
    """One load on one server; `slowness`: see `SLOWNESS`."""

    server: str
    workload: str
    rate_rps: float
    seed: int
    slowness: float


def points() -> Iterator[Point]:
    for server, (workloads, rates_rps) in LOADS.items():
        for workload in workloads:
            for rate_rps in rates_rps:
                for seed in SEEDS:
                    for slowness in SLOWNESS:
                        yield Point(server, workload, rate_rps, seed, slowness)


def run_point(options: FirstTokensOptions, point: Point) -> dict[str, Any]:
    """One row: both ways under the same load; counts of online requests."""
    apart, together = (_served(options, point, split_online) for split_online in (True, False))
    both = {name: [apart[name], together[name]] for name in apart}
    return {**dataclasses.asdict(point), **both}


def _served(options: FirstTokensOptions, point: Point, split_online: bool) -> dict[str, float]:
    load = load_of(point.server, point.workload, point.rate_rps, point.seed, options.duration_s)
    slo = load.promise(SLO_FACTORS.get(point.server, GPU_SLO_FACTOR))
    preset = load_config(CONFIGS_DIR / "echo.toml")
    echo = with_sections(preset, {"steps": {"split_online": split_online}})
    lines = [*load.offline, *load.online]
    records = load.run(with_slo(echo, slo), lines, slowness=point.slowness)
    ttft_s, tpot_s = latencies([one for one in records if one.task is Task.ONLINE])
    in_time = ttft_s <= slo.ttft_s
    return {
        "num_online": len(ttft_s),
        "num_kept": int(np.sum(in_time & (tpot_s <= slo.tpot_s))),
        "num_late_first": int(np.sum(~in_time)),
        "offline_tokens_per_s": tokens_per_s(records, LEAD_S, LEAD_S + options.duration_s),
    }


def summary_markdown(config: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """summary.md: each load, over the seeds."""
    keys = ("server", "workload", "rate_rps", "slowness")
    cells = []
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        group = [row for row in rows if tuple(row[name] for name in keys) == key]
        num_online = sum(row["num_online"][0] for row in group)
        kept, late = (_sums(group, name) for name in ("num_kept", "num_late_first"))
        rates = _sums(group, "offline_tokens_per_s") / len(group)
        cells.append(
            [
                *(key[0], key[1], f"{key[2]:g}", f"{key[3]:g}", f"{num_online:,}"),
                "{:.2%} ({:.2%})".format(*(kept / num_online)),
                "{:.0f} ({:.0f})".format(*late),
                "{:,.0f} ({:,.0f})".format(*rates),
            ]
        )
    head = ["server", "workload", "online/s", "times as slow", "online requests"]
    head += ["promises kept", "late first tokens", "offline tokens/s"]
    return "\n".join(
        [
            f"# Online prefills in two steps `{config['name']}`: a simulation",
            "",
            f"    {config['command']}",
            "",
            f"- {config['options']['duration_s']:g} s each, {len(SEEDS)} seeds summed; in brackets "
            "with `steps.split_online` false",
            f"- promised: p99 of the same online load alone, times {GPU_SLO_FACTOR} on the H200 "
            "and 1.5 on the CPU, on a machine that is not slower",
            "",
            *table(head, cells),
            "",
        ]
    )


def _sums(rows: Sequence[dict[str, Any]], name: str) -> Any:
    """Both ways. Shape: (2,)."""
    return np.sum([row[name] for row in rows], axis=0)


def main(argv: Sequence[str]) -> None:
    """Simulate every point and write the results; wrong options end it with code 2."""
    prog = "python -m eval.first_tokens"
    options = parse_points(argv, FirstTokensOptions, prog=prog)
    chunk = len(SLOWNESS) * len(SEEDS)
    rows = simulate_points(run_point, options, list(points()), chunk=chunk)
    facts = {"servers": {name: one.sizes for name, one in SERVERS.items()}}
    write_points(RESULTS_DIR, options, rows, summary_markdown, prog=prog, argv=argv, facts=facts)


if __name__ == "__main__":
    main(sys.argv[1:])
