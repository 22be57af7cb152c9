"""How fast the simulator is: a day of Azure's conversations and 50,000 lines, or a part of it.

    python -m eval.bench.sim --full-day

prints what the whole day takes on one core: time, CPU time and peak memory.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.progress import Progress

from echo_sgl.config import parse_config
from echo_sgl.estimators.batch_time import create_batch_time
from echo_sgl.sim.results import SimResults
from echo_sgl.sim.server import simulate
from echo_sgl.sim.server_config import ServerConfig
from echo_sgl.sim.workload import BLOCK_TOKENS, Trace
from echo_sgl.types import Task
from eval.servers.machine import machine, peak_bytes
from eval.workloads import DATA_DIR
from eval.workloads.patterns import lognormal_lengths
from eval.workloads.traces import Arrival, read_trace

TRACE = "azure_conv_2023.csv.gz"
HOUR_REQUESTS, MEAN_TOKENS = 19_366, (1155, 211)  # prompts, answers
DAY_S = 86_400.0
DAY_REQUESTS, DAY_LINES = 480_000, 50_000
BENCH_SHARE = 0.01
LINES_PER_DOCUMENT, DOCUMENT_BLOCKS = 8, 30
SEED = 0
# An accelerator that prefills 50,000 tokens a second and decodes at 6 ms: many short steps.
DEVICE = {
    "prefill_area": 2e-11,
    "prefill_token": 2e-5,
    "prefill_token_beyond": 2e-5,
    "prefill_cached": 0.0,
    "prefill_step": 0.004,
    "prefill_knee": 0.0,
    "decode_max_token": 0.0,
    "decode_token": 1.5e-8,
    "decode_request": 2e-5,
    "decode_request_beyond": 2e-5,
    "decode_step": 0.006,
    "decode_knee": 0.0,
    "mixing": 0.7,
}


def run() -> list[dict[str, Any]]:
    """Rows for `make bench`: simulated requests and steps for each second of CPU time."""
    start_s = time.process_time()
    results = simulate_share(BENCH_SHARE)
    cpu_s = time.process_time() - start_s
    requests = results.online_done + results.offline_done
    return [
        _row("simulated requests", requests / cpu_s, "requests/s of CPU", requests),
        _row("simulated steps", results.num_steps / cpu_s, "steps/s of CPU", results.num_steps),
    ]


def simulate_share(
    share: float, on_progress: Callable[[float], None] = lambda done: None
) -> SimResults:
    """The first part of the day, with as large a part of the job beside it."""
    online = online_trace(round(DAY_REQUESTS * share))
    config = ServerConfig(
        device=create_batch_time("pooled").with_coefficients(DEVICE),
        kv_tokens=400_000,
        echo=parse_config({"slo": {"ttft_s": 1.0, "tpot_s": 0.05}}),
    )
    end_s = online.at_s[-1]
    return simulate(
        config,
        online,
        offline_trace(round(DAY_LINES * share)),
        until_s=end_s,
        on_progress=lambda now_s: on_progress(min(1.0, now_s / end_s)),
    )


def online_trace(num: int) -> Trace:
    """Azure's hour again and again, at a rate that makes `DAY_REQUESTS` a day."""
    hour = azure_hour()
    scale = DAY_S / DAY_REQUESTS * len(hour) / hour[-1].at_s
    times, prompts, answers = array("d"), array("q"), array("q")
    now_s = 0.0
    for number in range(num):
        round_number, index = divmod(number, len(hour))
        one = hour[index]
        now_s = max(now_s, (one.at_s + round_number * hour[-1].at_s) * scale)
        times.append(now_s)
        prompts.append(one.prompt_tokens)
        answers.append(one.output_tokens)
    return Trace(Task.ONLINE, times, prompts, answers, max_new_tokens=max(answers))


def azure_hour() -> list[Arrival]:
    """The trace, or where it is not at hand one of its rate and mean lengths."""
    if (DATA_DIR / TRACE).is_file():
        return read_trace(DATA_DIR / TRACE)
    rng = random.Random(SEED)
    times_s = accumulate(rng.expovariate(HOUR_REQUESTS / 3600) for _ in range(HOUR_REQUESTS))
    lengths = (
        lognormal_lengths(mean, sigma=1.0, count=HOUR_REQUESTS, max_tokens=8192, seed=mean)
        for mean in MEAN_TOKENS
    )
    return [Arrival(*one) for one in zip(times_s, *lengths, strict=True)]


def offline_trace(num: int) -> Trace:
    """Lines that come at once, eight about each document of 1,920 tokens, in random order."""
    rng = random.Random(SEED)
    num_documents = max(1, num // LINES_PER_DOCUMENT)
    blocks, prompts = [], array("q")
    for line in range(num):
        start = rng.randrange(num_documents) * DOCUMENT_BLOCKS
        own = range(1 << 30 | line * 4, (1 << 30 | line * 4) + rng.randint(1, 4))
        blocks.append(array("q", (*range(start, start + DOCUMENT_BLOCKS), *own)))
        prompts.append(BLOCK_TOKENS * len(blocks[-1]) - rng.randrange(BLOCK_TOKENS))
    answers = array("q", (rng.randint(20, 400) for _ in range(num)))
    times = array("d", (0.0,)) * num
    return Trace(Task.OFFLINE, times, prompts, answers, blocks=blocks, max_new_tokens=400)


def full_day() -> str:
    """Simulate the whole day; one line that says what it took."""
    start_s = time.perf_counter()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("a day", total=1.0)
        results = simulate_share(1.0, lambda done: progress.update(bar, completed=done))
    wall_s = time.perf_counter() - start_s
    return (
        f"{results.online_done:,} online requests, {results.offline_done:,} lines, "
        f"{results.num_steps:,} steps: {wall_s:.0f} s ({time.process_time():.0f} s of CPU), "
        f"{peak_bytes() / 1e6:.0f} MB at most, on {machine()}"
    )


def _row(name: str, value: float, unit: str, count: int) -> dict[str, Any]:
    about = f"{name}, {BENCH_SHARE:.0%} of a day"
    return {
        "name": about,
        "ours": round(value),
        "stock": None,
        "ratio": None,
        "unit": unit,
        "n": count,
        "machine": machine(),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.bench.sim", description=__doc__)
    parser.add_argument("--full-day", action="store_true", help="all of it, with a progress bar")
    if parser.parse_args(argv).full_day:
        print(full_day())
        return
    for row in run():
        print(f"{row['name']}: {row['ours']:,} {row['unit']}")


if __name__ == "__main__":
    main(sys.argv[1:])
