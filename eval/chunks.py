"""What room offline prefills get under promises, and what that gains, simulated.

    python -m eval.chunks --workers 2

The ablation's workloads, with its promises, on simulated servers that take as long for each step as
measured profiles say: an H200, with the pool of `eval/results/ablation-llm-d-h200` and with a large
one, and a CPU. Writes eval/results/<name>/: config.json, summary.json and summary.md.
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
from eval.paths import CONFIGS_DIR, PROFILES_DIR, RESULTS_DIR
from eval.simulated.load import (
    CPU_SERVER,
    LEAD_S,
    Load,
    Pattern,
    SimulatedServer,
    latencies,
    with_sections,
    with_slo,
)
from eval.simulated.points import parse_points, simulate_points, write_points
from eval.unpromised import H200_SIZES, WHOLE

PROFILE = CONFIGS_DIR / "profiles" / "h200-llama-3-8b.json"
SMALL_POOL = {
    "pool_tokens": 48_000,
    "max_running_requests": 64,
    "chunked_prefill_size": 8192,
    "window": 3000,
}
SERVERS = {
    "H200, 64 places": SimulatedServer(PROFILE, SMALL_POOL, overlap=True),
    "H200, 256 places": SimulatedServer(PROFILE, H200_SIZES, overlap=True),
    "CPU": CPU_SERVER,
    "fast CPU": SimulatedServer(PROFILES_DIR / "base-fast-cpu.json"),
}
# Of which servers, and mean online requests a second.
LOADS = {
    "H200, 64 places": (("llm-d",), (4.0, 8.0, 12.0)),
    "H200, 256 places": (("azure-qmsum", "bursts-loogle"), (4.0, 10.0)),
    "CPU": (("azure-qmsum", "bursts-loogle", "llm-d"), (0.5, 1.6)),
}
# Of the online requests alone; as in the ablation.
SLO_FACTORS = dict.fromkeys(("CPU", "fast CPU"), "1.5")
GPU_SLO_FACTOR = "1.2,1.1"
SEEDS = (0, 1)
# Prefill steps then have what decode steps have.
AS_DECODES = {"reserve_tokens": 1000.0}
SETTINGS: dict[str, Sections] = {
    "whatever fits": {"steps": {"chunk_overhead": 0.0, **AS_DECODES}},
    "worth a step": {"steps": AS_DECODES},
    "and of all slack but 4 TPOTs (echo.toml)": {},
    "and up to 90 % of the KV kept for online peaks": {"reserve": {"max_share": 0.9}},
    **{
        f"who arrives waits for {share:.0%} of what there is": {"steps": {"stall_share": share}}
        for share in (0.2, 1.0)
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class ChunksOptions:
    """What is simulated."""

    name: str = option("chunks", "folder under eval/results/ that takes the results")
    duration_s: float = option(60.0, "how long online requests keep coming", 1)
    workers: int = option(1, "processes; the results are the same", 1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One load on one server under one setting."""

    server: str
    workload: str
    rate_rps: float
    seed: int
    setting: str


def points() -> Iterator[Point]:
    for server, (workloads, rates_rps) in LOADS.items():
        for workload in workloads:
            for rate_rps in rates_rps:
                for seed in SEEDS:
                    for setting in SETTINGS:
                        yield Point(server, workload, rate_rps, seed, setting)


def run_point(options: ChunksOptions, point: Point) -> dict[str, Any]:
    """One row: promises kept, latencies and what the job got."""
    load = load_of(point.server, point.workload, point.rate_rps, point.seed, options.duration_s)
    slo = load.promise(SLO_FACTORS.get(point.server, GPU_SLO_FACTOR))
    echo = with_sections(load_config(CONFIGS_DIR / "echo.toml"), SETTINGS[point.setting])
    records = load.run(with_slo(echo, slo), [*load.offline, *load.online])
    ttft_s, tpot_s = latencies([one for one in records if one.task is Task.ONLINE])
    return {
        **dataclasses.asdict(point),
        "online": len(load.online),
        "kept": float(np.mean((ttft_s <= slo.ttft_s) & (tpot_s <= slo.tpot_s))),
        "ttft_p99_of_promise": float(np.percentile(ttft_s, 99) / slo.ttft_s),
        "tpot_p50_of_promise": float(np.percentile(tpot_s, 50) / slo.tpot_s),
        "tpot_p99_of_promise": float(np.percentile(tpot_s, 99) / slo.tpot_s),
        "offline_tokens_per_s": tokens_per_s(records, LEAD_S, LEAD_S + options.duration_s),
    }


@functools.lru_cache(maxsize=1)
def load_of(server: str, workload: str, rate_rps: float, seed: int, duration_s: float) -> Load:
    """Points of the same load follow each other, and share it."""
    pattern = Pattern(workload, seed=seed, **({} if server in SLO_FACTORS else WHOLE))
    return Load(rate_rps, pattern, duration_s=duration_s, server=SERVERS[server])


def summary_markdown(config: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """summary.md: each load, one line a setting, over the seeds."""
    cells = []
    keys = ("server", "workload", "rate_rps", "setting")
    first: dict[tuple[Any, ...], float] = {}
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        group = [row for row in rows if tuple(row[name] for name in keys) == key]
        rate = float(np.mean([row["offline_tokens_per_s"] for row in group]))
        base = first.setdefault(key[:3], rate)
        shares = ("ttft_p99_of_promise", "tpot_p50_of_promise", "tpot_p99_of_promise")
        cells.append(
            [
                key[0],
                key[1],
                f"{key[2]:g}",
                key[3],
                ", ".join(f"{row['kept']:.1%}" for row in group),
                *(f"{np.mean([row[name] for row in group]):.0%}" for name in shares),
                f"{rate:,.0f}",
                f"{rate / base - 1:+.0%}",
            ]
        )
    head = ["server", "workload", "online/s", "setting", "promises kept"]
    head += ["TTFT p99, of the promised", "TPOT p50", "TPOT p99", "offline tokens/s", ""]
    return "\n".join(
        [
            f"# Room for offline prefills `{config['name']}`: a simulation",
            "",
            f"    {config['command']}",
            "",
            f"- {config['options']['duration_s']:g} s each, {len(SEEDS)} seeds: promises kept of "
            "each, else the mean",
            f"- promised: p99 of the same online load alone, times {GPU_SLO_FACTOR} on the H200 "
            "and 1.5 on the CPU",
            "- H200: Llama 3 8B's shape, prompts at their whole length up to 4,000 tokens",
            "",
            *table(head, cells),
            "",
        ]
    )


def main(argv: Sequence[str]) -> None:
    """Simulate every point and write the results; wrong options end it with code 2."""
    prog = "python -m eval.chunks"
    options = parse_points(argv, ChunksOptions, prog=prog)
    rows = simulate_points(run_point, options, list(points()), chunk=len(SETTINGS))
    facts = {"settings": SETTINGS, "small_pool": SMALL_POOL, "large_pool": H200_SIZES}
    write_points(RESULTS_DIR, options, rows, summary_markdown, prog=prog, argv=argv, facts=facts)


if __name__ == "__main__":
    main(sys.argv[1:])
