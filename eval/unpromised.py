"""What online users notice of a job when nobody promised them anything: the default, simulated.

    python -m eval.unpromised

replays online patterns alone and beside their jobs on a simulated CPU server and on a simulated
H200, under `configs/echo.toml` without promises and with other values of the two settings that
count then, and writes eval/results/unpromised/ with config.json, summary.json and summary.md.
The steps' times come from profiles that `echo-sgl calibrate` measured; no server runs.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from echo_sgl.config import load_config
from echo_sgl.types import Task
from eval.cache.arms import Sections
from eval.corun.report import table
from eval.figures.summary import tokens_per_s
from eval.options import check_options, option
from eval.paths import CONFIGS_DIR, RESULTS_DIR
from eval.simulated.load import (
    CPU_SERVER,
    LEAD_S,
    NO_PROMISE,
    Load,
    Pattern,
    SimulatedServer,
    latencies,
    with_sections,
    with_slo,
)
from eval.simulated.points import parse_points, simulate_points, write_points

H200_SIZES = {
    "pool_tokens": 300_000,
    "max_running_requests": 256,
    "chunked_prefill_size": 8192,
    "document_tokens": 8000,
}
SERVERS = {
    "CPU": CPU_SERVER,
    "H200": SimulatedServer(
        CONFIGS_DIR / "profiles" / "h200-llama-3-8b.json", H200_SIZES, overlap=True
    ),
}
WORKLOADS = ("azure-qmsum", "bursts-loogle", "llm-d")
# Mean online requests a second.
RATES_RPS = {"CPU": (0.5, 1.5), "H200": (4.0, 10.0)}
WHOLE: dict[str, Any] = {"length_scale": 1.0, "max_prompt_tokens": 4000}
SETTINGS: dict[str, Sections] = {
    "echo.toml": {},
    **{f"max_inflation {value:g}": {"steps": {"max_inflation": value}} for value in (1.05, 1.2)},
    **{f"max_stall_s {value:g}": {"steps": {"max_stall_s": value}} for value in (0.05, 0.025)},
}
FIGURES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")


@dataclasses.dataclass(frozen=True, slots=True)
class UnpromisedOptions:
    """What is simulated."""

    name: str = option("unpromised", "folder under eval/results/ that takes the results")
    duration_s: float = option(60.0, "how long online requests keep coming", 1)
    workers: int = option(1, "processes; the results are the same", 1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One load on one server under one setting."""

    server: str
    rate_rps: float
    workload: str
    setting: str


def points() -> Iterator[Point]:
    for server, rates_rps in RATES_RPS.items():
        for rate_rps in rates_rps:
            for workload in WORKLOADS:
                for setting in SETTINGS:
                    yield Point(server, rate_rps, workload, setting)


def run_point(options: UnpromisedOptions, point: Point) -> dict[str, Any]:
    """One row: each latency beside the job over the same alone, and what the job got."""
    load = _load(options, point.server, point.rate_rps, point.workload)
    echo = load_config(CONFIGS_DIR / "echo.toml")
    echo = with_slo(with_sections(echo, SETTINGS[point.setting]), NO_PROMISE)
    together = load.run(echo, [*load.online, *load.offline])
    alone_s = _percentiles_s(load.run(echo, load.online))
    beside_s = _percentiles_s([one for one in together if one.task is Task.ONLINE])
    return {
        **dataclasses.asdict(point),
        "online": len(load.online),
        **{name: beside_s[name] / alone_s[name] for name in FIGURES},
        "offline_tokens_per_s": tokens_per_s(together, LEAD_S, LEAD_S + options.duration_s),
    }


@functools.lru_cache(maxsize=1)
def _load(options: UnpromisedOptions, server: str, rate_rps: float, workload: str) -> Load:
    """Points of the same load follow each other, and share it."""
    pattern = Pattern(workload, **(WHOLE if server == "H200" else {}))
    return Load(rate_rps, pattern, duration_s=options.duration_s, server=SERVERS[server])


def _percentiles_s(online: Sequence[Any]) -> dict[str, float]:
    ttft_s, tpot_s = latencies(online)
    several = np.array([one.completion_tokens > 1 for one in online])
    values = (ttft_s, tpot_s[several])
    return {
        name: float(np.percentile(values[place // 2], (50, 99)[place % 2]))
        for place, name in enumerate(FIGURES)
    }


def summary_markdown(config: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """summary.md: by server, rate and setting, over the workloads, with the worst in brackets."""
    cells = []
    for key in dict.fromkeys((row["server"], row["rate_rps"], row["setting"]) for row in rows):
        group = [row for row in rows if (row["server"], row["rate_rps"], row["setting"]) == key]
        figures = [[row[name] for row in group] for name in FIGURES]
        rates = [row["offline_tokens_per_s"] for row in group]
        cells.append(
            [
                key[0],
                f"{key[1]:g}",
                key[2],
                *(f"{np.mean(one):.2f}x (at most {max(one):.2f}x)" for one in figures),
                f"{np.mean(rates):,.0f} ({', '.join(f'{rate:,.0f}' for rate in rates)})",
            ]
        )
    heads = ["TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"]
    head = ["server", "online/s", "setting", *heads, "offline tokens/s"]
    return "\n".join(
        [
            f"# Without promises `{config['name']}`: a simulation",
            "",
            f"    {config['command']}",
            "",
            f"- workloads: {', '.join(WORKLOADS)}, {config['options']['duration_s']:g} s each; "
            "latencies beside the job over the same alone: the mean of the workloads and the worst",
            "- offline tokens/s: the mean, and of each workload",
            f"- H200: Llama 3 8B's shape, {config['h200_sizes']}; prompts at their whole length",
            "",
            *table(head, cells),
            "",
        ]
    )


def main(argv: Sequence[str]) -> None:
    """Simulate every point and write the results; wrong options end it with code 2."""
    prog = "python -m eval.unpromised"
    options = parse_points(argv, UnpromisedOptions, prog=prog)
    rows = simulate_points(run_point, options, list(points()), chunk=len(SETTINGS))
    facts = {"settings": SETTINGS, "h200_sizes": H200_SIZES}
    write_points(RESULTS_DIR, options, rows, summary_markdown, prog=prog, argv=argv, facts=facts)


if __name__ == "__main__":
    main(sys.argv[1:])
