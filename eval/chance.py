"""Are promises kept under loads that nobody chose? Hundreds of them, drawn by chance, simulated.

    python -m eval.chance

draws online loads and jobs (`eval/simulated/chance.py`), plays each alone and beside its job on a
simulated CPU server and on two simulated H200 servers under several presets, and writes
eval/results/chance/ with config.json, summary.json and summary.md. What is promised is the p99 of
the online load alone, times the factors that `eval.ablation` has on a CPU and on a GPU. The steps'
times and their scatter come from profiles that `echo-sgl calibrate` measured; no server runs.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo_sgl.config import EchoConfig, SloConfig, load_config
from echo_sgl.estimators.profile import load_profile
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import simulate
from echo_sgl.sim.server_config import NO_HOST_TIME, ServerConfig
from echo_sgl.sim.workload import SimRequest, Trace, empty_trace
from echo_sgl.types import Task
from eval.corun.report import table
from eval.fidelity.replay import noise_of
from eval.figures.slo import parse_factors
from eval.options import check_options, option
from eval.paths import CONFIGS_DIR, PROFILES_DIR, RESULTS_DIR
from eval.simulated.chance import ChanceLoad
from eval.simulated.load import (
    DRAIN_S,
    LEAD_S,
    PROMISE_SEED,
    SEED,
    unpromised_echo,
    with_slo,
)
from eval.simulated.points import parse_points, simulate_points, write_points

ALONE, PRIORITIES = "alone", "bs"
NO_JOB = empty_trace(Task.OFFLINE)
PRESETS = (PRIORITIES, "echo", "hygen", "bros", "ooco")
# Fewer say little of a p99, more take long. A job's lines are doubled until it outlasts the run.
LEAST_ONLINE, MOST_ONLINE, FIRST_LINES, MOST_LINES = 30, 3000, 100, 12_800
SHARES = (0.99, 0.97, 0.95)


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A simulated server; `scale`: of the loads' lengths; `slo_factor`: over alone p99."""

    profile: Path
    sizes: dict[str, Any]
    scale: float
    slo_factor: str

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "profile": self.profile.name}


H200_PROFILE = CONFIGS_DIR / "profiles" / "h200-llama-3-8b.json"
MACHINES = {
    "CPU, 16 places": Machine(
        PROFILES_DIR / "base-cpu.json",
        {
            "kv_tokens": 20_000,
            "max_running_requests": 16,
            "chunked_prefill_tokens": 512,
            "overlap": False,
        },
        scale=1.0,
        slo_factor="1.5",
    ),
    **{
        f"H200, {places} places": Machine(
            H200_PROFILE, {"kv_tokens": kv_tokens, "max_running_requests": places}, 4.0, "1.2,1.1"
        )
        for places, kv_tokens in ((64, 120_000), (256, 300_000))
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class ChanceOptions:
    """What is simulated."""

    name: str = option("chance", "folder under eval/results/ that takes the results")
    loads: int = option(120, "how many loads, a third of them on each server", 1)
    first_seed: int = option(0, "the first load's seed", 0)
    duration_s: float = option(60.0, "how long online requests keep coming", 1)
    workers: int = option(1, "processes; the results are the same", 1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One load on one of `MACHINES`."""

    seed: int
    machine: str


def points(options: ChanceOptions) -> list[Point]:
    names = list(MACHINES)
    seeds = range(options.first_seed, options.first_seed + options.loads)
    return [Point(seed, names[seed % len(names)]) for seed in seeds]


class JobSeen:
    """Counts tokens of the job's lines that end while online requests come."""

    def __init__(self, options: ChanceOptions) -> None:
        self._end_s = LEAD_S + options.duration_s
        self.tokens = 0

    def came(self, request: SimRequest) -> None:
        """Nothing is to be seen yet."""

    def ended(self, request: SimRequest, num_tokens: int, now_s: float) -> None:
        if request.is_offline and LEAD_S <= now_s < self._end_s:
            self.tokens += request.prompt_tokens + num_tokens


def run_point(options: ChanceOptions, point: Point) -> dict[str, Any]:
    """One row: how many promises are kept alone and under each preset, and what the job gets."""
    play = Play(options, MACHINES[point.machine])
    load = play.load(point.seed)
    row = {**dataclasses.asdict(point), "load": str(load)}
    online = load.online(play.saturation_rps(load), start_s=LEAD_S, duration_s=options.duration_s)
    row["online"] = len(online)
    if not LEAST_ONLINE <= len(online) <= MOST_ONLINE:
        return row
    slo = play.promise(online)
    row |= {"ttft_promise_s": slo.ttft_s, "tpot_promise_s": slo.tpot_s}
    alone, _ = play.run(play.preset(PRIORITIES, slo), online, NO_JOB)
    row[ALONE] = alone.online_kept / len(online)
    job = play.lasting_job(load)
    for name in PRESETS:
        results, tokens = play.run(play.preset(name, slo), online, job)
        row[name] = results.online_kept / len(online)
        row[f"{name}_tokens_per_s"] = tokens / options.duration_s
        row[f"{name}_late"] = int((np.array(results.ttft_s) > slo.ttft_s).sum())
        row[f"{name}_slow"] = int((np.array(results.tpot_s) > slo.tpot_s).sum())
    return row


class Play:
    """Runs of one machine."""

    def __init__(self, options: ChanceOptions, machine: Machine) -> None:
        self._options, self._machine = options, machine
        self._profile = load_profile(machine.profile, device="", model="", force=True)

    def load(self, seed: int) -> ChanceLoad:
        machine = self._machine
        return ChanceLoad.draw(seed, pool_tokens=machine.sizes["kv_tokens"], scale=machine.scale)

    def preset(self, name: str, slo: SloConfig) -> EchoConfig:
        return with_slo(load_config(CONFIGS_DIR / f"{name}.toml"), slo)

    def saturation_rps(self, load: ChanceLoad) -> float:
        """Online requests a second that the server answers when all are there at once."""
        count = max(60, 4 * self._machine.sizes["max_running_requests"])
        results, _ = self.run(unpromised_echo(), load.at_once(count), NO_JOB, end_s=math.inf)
        return float(count / results.end_s)

    def promise(self, online: Trace) -> SloConfig:
        """So many times the p99 of the online requests alone."""
        results, _ = self.run(unpromised_echo(), online, NO_JOB, seed=PROMISE_SEED)
        ttft, tpot = parse_factors(self._machine.slo_factor)
        p99_s = (
            float(np.percentile(np.array(values or [0.0]), 99))
            for values in (results.ttft_s, results.tpot_s)
        )
        ttft_s, tpot_s = p99_s
        return SloConfig(ttft_s=ttft * ttft_s, tpot_s=max(1e-4, tpot * tpot_s))

    def lasting_job(self, load: ChanceLoad) -> Trace:
        """As many lines as the server is busy with for the whole time where nobody is online."""
        end_s, count = LEAD_S + self._options.duration_s, FIRST_LINES
        while True:
            job = load.job(count)
            results, _ = self.run(unpromised_echo(), empty_trace(Task.ONLINE), job, end_s=end_s)
            if results.offline_done < count or count >= MOST_LINES:
                return job
            count *= 2

    def run(
        self,
        echo: EchoConfig,
        online: Trace,
        job: Trace,
        *,
        seed: int = SEED,
        end_s: float | None = None,
    ) -> tuple[SimResults, int]:
        """What came of both, and the job's tokens while online requests came."""
        config = ServerConfig(
            device=self._profile.estimator,
            echo=echo,
            host=self._profile.host or NO_HOST_TIME,
            noise=noise_of(self._profile),
            seed=seed,
            **self._machine.sizes,
        )
        seen = JobSeen(self._options)
        if end_s is None:
            end_s = LEAD_S + self._options.duration_s + DRAIN_S
        return simulate(config, online, job, until_s=end_s, observer=seen), seen.tokens


# ---- the table ---------------------------------------------------------------------------------


def summary_markdown(config: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """summary.md: each preset over all loads, then the loads that `echo` did worst with."""
    measured = [row for row in rows if ALONE in row]
    cells = [_cells(name, measured) for name in PRESETS]
    promises = "; ".join(f"{one.slo_factor} on {name}" for name, one in MACHINES.items())
    worst = sorted(measured, key=lambda row: _share(row, "echo"))[:10]
    head = ["preset", *(f"at least {share:.0%}" for share in SHARES), "mean", "least", "tokens/s"]
    return "\n".join(
        [
            f"# Loads by chance `{config['name']}`: a simulation",
            "",
            f"    {config['command']}",
            "",
            f"- {len(measured)} of {len(rows)} loads (others had under {LEAST_ONLINE} or over "
            f"{MOST_ONLINE:,} online requests), {config['options']['duration_s']:g} s each; "
            f"promised: p99 alone, times (TTFT[,TPOT]) {promises}",
            "- at least: loads in which so many of the promises that the server keeps alone are "
            "kept; mean and least: such shares; tokens/s of the job: over those of `bs` "
            "(priorities alone), geometric mean of the loads in which both do something, and how "
            "often one of them does nothing",
            "",
            *table(head, cells),
            "",
            "Where `echo` kept least (medians of tokens, in brackets sigma):",
            "",
            *table(
                ["seed", "server", "load", "online", "alone", "echo", "late", "slow"],
                [_load_cells(row) for row in worst],
            ),
            "",
        ]
    )


def _share(row: dict[str, Any], name: str) -> float:
    kept: float = row[name]
    return kept / row[ALONE] if row[ALONE] else 1.0


def _cells(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return [f"`{name}`", *["-"] * (len(SHARES) + 3)]
    shares = [_share(row, name) for row in rows]
    rates = [(row[f"{name}_tokens_per_s"], row[f"{PRIORITIES}_tokens_per_s"]) for row in rows]
    logs = [math.log(own / other) for own, other in rates if own and other]
    idle = sum(not own or not other for own, other in rates)
    return [
        f"`{name}`",
        *(str(sum(share >= least for share in shares)) for least in SHARES),
        f"{np.mean(shares):.1%}",
        f"{min(shares):.1%}",
        f"{math.exp(np.mean(logs)):.2f}x, {idle}" if logs else f"-, {idle}",
    ]


def _load_cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["seed"]),
        row["machine"],
        row["load"],
        f"{row['online']:,}",
        f"{row[ALONE]:.1%}",
        f"{row['echo']:.1%}",
        str(row["echo_late"]),
        str(row["echo_slow"]),
    ]


def main(argv: Sequence[str]) -> None:
    """Simulate every load and write the results; wrong options end it with code 2."""
    prog = "python -m eval.chance"
    options = parse_points(argv, ChanceOptions, prog=prog)
    rows = simulate_points(run_point, options, points(options))
    facts = {"machines": {name: one.as_dict() for name, one in MACHINES.items()}}
    write_points(RESULTS_DIR, options, rows, summary_markdown, prog=prog, argv=argv, facts=facts)


if __name__ == "__main__":
    main(sys.argv[1:])
