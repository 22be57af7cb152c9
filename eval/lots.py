"""What it gains when offline requests start in lots (`steps.gather`) and not at once, simulated.

    python -m eval.lots

serves jobs of several shapes, alone and beside online requests, on a simulated H200 and a simulated
CPU server, and writes eval/results/lots/ with config.json, summary.json and summary.md. The steps'
times come from profiles that `echo-sgl calibrate` measured; no server runs. On real CPU servers:
`python -m eval.bench --only bench_lots`.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_sgl.config import parse_config
from echo_sgl.estimators.profile import load_profile
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import simulate
from echo_sgl.sim.server_config import NO_HOST_TIME, ServerConfig
from echo_sgl.sim.workload import BLOCK_TOKENS, Trace, empty_trace
from echo_sgl.types import Task
from eval.corun.report import table
from eval.options import check_options, option
from eval.paths import CONFIGS_DIR, PROFILES_DIR, RESULTS_DIR
from eval.simulated.points import parse_points, simulate_points, write_points

NUM_DOCUMENTS = 50


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Lines of a job: what each shares with its document and has of its own, in tokens."""

    shared: int
    own: int
    shortest: int
    longest: int

    def __str__(self) -> str:
        answers = f"answers of {self.shortest} to {self.longest}"
        return f"{self.own} tokens behind {self.shared:,} shared, {answers}"


@dataclasses.dataclass(frozen=True, slots=True)
class Simulated:
    """A server, what it promises, its online rates (1/s), and the jobs that suit it."""

    profile: Path
    kv_tokens: int
    num_places: int
    chunk_tokens: int
    ttft_s: float
    tpot_s: float
    online_rps: tuple[float, ...]
    online_tokens: tuple[int, int]
    shapes: tuple[Shape, ...]


SERVERS: Mapping[str, Simulated] = {
    "H200": Simulated(
        CONFIGS_DIR / "profiles" / "h200-llama-3-8b.json",
        *(300_000, 64, 8192, 0.3, 0.03, (0.0, 4.0), (500, 200)),
        tuple(
            Shape(1536, own, *answers)
            for own, answers in (
                (100, (1, 31)),
                (100, (1, 255)),
                (100, (200, 600)),
                (800, (1, 255)),
                (3000, (1, 255)),
            )
        ),
    ),
    "CPU": Simulated(
        PROFILES_DIR / "base-cpu.json",
        *(12_000, 16, 512, 1.0, 0.2, (0.0, 0.3), (100, 50)),
        (Shape(512, 40, 1, 31), Shape(512, 40, 1, 127), Shape(512, 400, 1, 127)),
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class LotsOptions:
    """What is simulated."""

    name: str = option("lots", "folder under eval/results/ that takes the results")
    duration_s: float = option(60.0, "for how long each job runs", 1)
    seed: int = option(0, "of the jobs and the online requests", 0)
    workers: int = option(1, "processes; the results are the same", 1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One job on one server beside one online rate."""

    server: str
    shape: Shape
    online_rps: float


def points() -> Iterator[Point]:
    for name, server in SERVERS.items():
        for shape in server.shapes:
            for online_rps in server.online_rps:
                yield Point(name, shape, online_rps)


def run_point(options: LotsOptions, point: Point) -> dict[str, Any]:
    """One row: both ways of starting under the same load."""
    lots, at_once = (_served(options, point, gather) for gather in (True, False))
    row: dict[str, Any] = {
        "server": point.server,
        "shape": str(point.shape),
        "online_rps": point.online_rps,
        "tokens_per_s": [lots.offline_tokens_per_s, at_once.offline_tokens_per_s],
        "prefill_steps": [lots.num_prefill_steps, at_once.num_prefill_steps],
    }
    if point.online_rps:
        row["tpot_s"] = [one.statistic_s("tpot", "mean") for one in (lots, at_once)]
        row["ttft_p99_s"] = [one.statistic_s("ttft", "p99") for one in (lots, at_once)]
        row["kept"] = [one.online_kept / one.online_done for one in (lots, at_once)]
    return row


def _served(options: LotsOptions, point: Point, gather: bool) -> SimResults:
    server = SERVERS[point.server]
    profile = load_profile(server.profile, device="", model="", force=True)
    config = ServerConfig(
        device=profile.estimator,
        kv_tokens=server.kv_tokens,
        echo=parse_config(
            {
                "slo": {"ttft_s": server.ttft_s, "tpot_s": server.tpot_s},
                "steps": {"gather": gather},
            }
        ),
        max_running_requests=server.num_places,
        chunked_prefill_tokens=server.chunk_tokens,
        host=profile.host or NO_HOST_TIME,
    )
    rng = random.Random(options.seed)
    online = _online(server, point.online_rps, options.duration_s, rng)
    job = _job(point.shape, int(200 * options.duration_s), rng)
    return simulate(config, online, job, until_s=options.duration_s)


def _online(server: Simulated, rate_rps: float, duration_s: float, rng: random.Random) -> Trace:
    """Poisson arrivals of prompts that nobody shares."""
    if not rate_rps:
        return empty_trace(Task.ONLINE)
    at_s, now_s = array("d"), 0.0
    while (now_s := now_s + rng.expovariate(rate_rps)) < duration_s:
        at_s.append(now_s)
    mean_prompt, mean_answer = server.online_tokens
    prompts = array("q", (rng.randint(1, 2 * mean_prompt) for _ in at_s))
    answers = array("q", (rng.randint(1, 2 * mean_answer) for _ in at_s))
    return Trace(Task.ONLINE, at_s, prompts, answers)


def _job(shape: Shape, num_lines: int, rng: random.Random) -> Trace:
    """More lines than there is time for, all there from the start."""
    num_shared, num_own = shape.shared // BLOCK_TOKENS, -(-shape.own // BLOCK_TOKENS)
    blocks = []
    for line in range(num_lines):
        first, own = rng.randrange(NUM_DOCUMENTS) * num_shared, 10**6 + line * num_own
        blocks.append(array("q", (*range(first, first + num_shared), *range(own, own + num_own))))
    prompt_tokens = num_shared * BLOCK_TOKENS + shape.own
    answers = array("q", (rng.randint(shape.shortest, shape.longest) for _ in blocks))
    return Trace(
        Task.OFFLINE,
        array("d", [0.0]) * num_lines,
        array("q", [prompt_tokens]) * num_lines,
        answers,
        blocks=blocks,
        max_new_tokens=shape.longest,
    )


def summary_markdown(config: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """summary.md: in lots, and beside it at once."""
    cells = [
        [
            row["server"],
            row["shape"],
            f"{row['online_rps']:g}",
            _pair(row["tokens_per_s"], "{:,.0f}"),
            f"{row['tokens_per_s'][0] / row['tokens_per_s'][1] - 1:+.1%}",
            _pair(row["prefill_steps"], "{:,}"),
            _pair([1e3 * one for one in row["tpot_s"]], "{:.1f}") if "tpot_s" in row else "-",
            _pair([1e3 * one for one in row["ttft_p99_s"]], "{:.0f}") if "tpot_s" in row else "-",
            _pair(row["kept"], "{:.1%}") if "kept" in row else "-",
        ]
        for row in rows
    ]
    head = [
        *("server", "job", "online/s", "job, tokens/s", "", "prefill steps"),
        *("TPOT, mean ms", "TTFT p99, ms", "promises kept"),
    ]
    return "\n".join(
        [
            f"# Starting in lots `{config['name']}`: a simulation",
            "",
            f"    {config['command']}",
            "",
            f"- {config['options']['duration_s']:g} s each; in lots, in brackets at once",
            *(f"- {name}: {text}" for name, text in config["servers"].items()),
            "",
            *table(head, cells),
            "",
        ]
    )


def _pair(values: Sequence[float], form: str) -> str:
    lots, at_once = (form.format(value) for value in values)
    return f"{lots} ({at_once})"


def _described(server: Simulated) -> str:
    return (
        f"steps as in {server.profile.name}, {server.num_places} places, a KV pool of "
        f"{server.kv_tokens:,} tokens, prefill chunks of {server.chunk_tokens:,}; promised are "
        f"{server.ttft_s:g} s and {server.tpot_s * 1e3:g} ms"
    )


def main(argv: Sequence[str]) -> None:
    """Simulate every point and write the results; wrong options end it with code 2."""
    prog = "python -m eval.lots"
    options = parse_points(argv, LotsOptions, prog=prog)
    rows = simulate_points(run_point, options, list(points()))
    facts = {"servers": {name: _described(one) for name, one in SERVERS.items()}}
    write_points(RESULTS_DIR, options, rows, summary_markdown, prog=prog, argv=argv, facts=facts)


if __name__ == "__main__":
    main(sys.argv[1:])
