"""How wrong each batch-time model is on live traffic that its calibration did not see.

    python -m eval.step_times --sizes small,base,large

Per model size: calibrate an idle server (`echo-sgl calibrate`'s own code), then play mixed
online and offline traffic and judge every model by the steps that came of it: as calibrated,
and as the scheduler has it, learning from the steps before.
Writes eval/results/<name>/: summary.json, summary.md, and of each size the profile of the best
model; and the steps of each size to eval/data/<name>/. With --judge-only the steps that are there
are judged again, by the models as they are now, wherever they were measured.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import orjson
from rich.console import Console

from echo_sgl.batch_shape import BatchRow, StepKind
from echo_sgl.cli.tuning.calibration import Driver, fit_all
from echo_sgl.cli.watching.steps import fetch_steps
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.held_out import Samples, held_out_errors
from echo_sgl.estimators.host_time import HostTime
from echo_sgl.estimators.lessons import Lessons
from echo_sgl.estimators.live import LiveBatchTime
from echo_sgl.estimators.profile import save_profile
from echo_sgl.types import OFFLINE_SERVICE_TIER
from eval.figures.step_samples import CALIBRATION, LIVE, read_steps, write_steps
from eval.options import count, folder_name, positive
from eval.paths import LOGS_DIR, RESULTS_DIR, SAMPLES_DIR
from eval.servers.machine import device_args
from eval.servers.models import find_model
from eval.servers.server import Server, running_server

SERVER_ARGS = (
    "--max-total-tokens 24000 --max-running-requests 16 --chunked-prefill-size 512 "
    "--enable-mixed-chunk"
)
SHARED_TOKENS, MOST_TOKENS = 600, 900
# So often one of these instead, behind nothing shared: steps alike tell chance from error.
RECURRING_SHARE, RECURRING_TOKENS = 0.25, (30, 90, 200, 450)
QUANTILE = 0.95
LIVE_WARM_UP_STEPS = 50
MIN_ALIKE = 10


async def live_traffic(server: Server, vocab: int, options: argparse.Namespace) -> None:
    """Clients of both classes that come one after another: fresh and shared prompts, short and
    long answers, pauses.
    """
    rng, until_s = random.Random(options.seed + 1), time.monotonic() + options.live_s
    shared = [rng.randrange(16, vocab) for _ in range(SHARED_TOKENS)]

    def lengths() -> tuple[int, int]:
        """Tokens of a prompt that others share, and those of its own."""
        if rng.random() < RECURRING_SHARE:
            return 0, rng.choice(RECURRING_TOKENS)
        num_shared = rng.randrange(SHARED_TOKENS) if rng.random() < 0.5 else 0
        return num_shared, rng.randrange(1, MOST_TOKENS)

    async def client(http: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(options.live_s * number / options.clients)
        while time.monotonic() < until_s:
            num_shared, num_own = lengths()
            start = shared[:num_shared]
            own = [rng.randrange(16, vocab) for _ in range(num_own)]
            tier = OFFLINE_SERVICE_TIER if rng.random() < 0.6 else "default"
            sampling = {
                "temperature": 0,
                "max_new_tokens": rng.randrange(1, 80),
                "ignore_eos": True,
                "custom_params": {"service_tier": tier},
            }
            body = {"input_ids": start + own, "sampling_params": sampling}
            (await http.post(f"{server.url}/generate", json=body)).raise_for_status()
            await asyncio.sleep(rng.expovariate(2.0))

    async with httpx.AsyncClient(timeout=300) as http:
        await asyncio.gather(*(client(http, number) for number in range(options.clients)))


def live_steps(server: Server, vocab: int, options: argparse.Namespace) -> Samples:
    """Rows and times of the steps that the traffic became."""
    [before] = fetch_steps(server.url)
    asyncio.run(live_traffic(server, vocab, options))
    [after] = fetch_steps(server.url)
    new = after["rows"][before["num_steps"] - after["num_steps"] :]
    table = np.array(new, dtype=np.float64)
    num_columns = len(BatchRow._fields)
    return table[:, :num_columns], table[:, num_columns]


def live_errors(
    model: BatchTimeModel, samples: Samples, largest_step: Mapping[str, int] | None = None
) -> dict[str, tuple[float, float]]:
    """MAPE and coverage of what the scheduler asks, by kind: it learns from the steps before.

    `largest_step`: of calibration, see `Profile`.
    """
    live = LiveBatchTime(model, quantile=QUANTILE, calibrated=largest_step)
    errors: dict[str, list[tuple[float, bool]]] = {}
    lessons, now_s = Lessons(live), 0.0
    for number, (values, time_s) in enumerate(zip(*samples, strict=True)):
        row = BatchRow(*map(int, values))
        if number >= LIVE_WARM_UP_STEPS:
            error = abs(live.predict_s(row) / time_s - 1.0)
            errors.setdefault(row.kind, []).append((error, bool(time_s <= live.upper_s(row))))
        now_s += time_s
        if lessons.take([(row, float(time_s))], now_s):
            lessons.learn(now_s)
    means = {kind: np.mean(np.array(steps, dtype=float), axis=0) for kind, steps in errors.items()}
    return {kind: (float(mape), float(covered)) for kind, (mape, covered) in means.items()}


def scatter(samples: Samples) -> dict[StepKind, float]:
    """What steps are off by when only chance differs: no model's MAPE is less.

    By kind, of those that have enough steps alike: the same row, or, of decodes, the same
    requests one token later. Two times of one mean differ by sqrt(2) times as much as each from it.
    """
    rows, times_s = samples
    batches = [BatchRow(*map(int, row)) for row in rows]
    last_s: dict[BatchRow, float] = {}
    differences: dict[StepKind, list[float]] = {}
    for number, (row, time_s) in enumerate(zip(batches, times_s, strict=True)):
        alike_s = last_s.get(row)
        if number and _follows(row, batches[number - 1]):
            alike_s = times_s[number - 1]
        if alike_s is not None:
            differences.setdefault(row.kind, []).append(abs(time_s / alike_s - 1.0))
        last_s[row] = time_s
    enough = {kind: off for kind, off in differences.items() if len(off) >= MIN_ALIKE}
    return {kind: float(np.mean(off) / np.sqrt(2)) for kind, off in enough.items()}


def _follows(row: BatchRow, before: BatchRow) -> bool:
    """Whether a step decodes what the one before decoded, a token later."""
    is_same_batch = row.num_decodes == before.num_decodes > 0 == row.num_prefills
    grown_tokens = row.decode_tokens - before.decode_tokens
    return is_same_batch and not before.num_prefills and grown_tokens == row.num_decodes


def measure(size: str, options: argparse.Namespace) -> None:
    """Calibrate a server, play live traffic on it, and keep the steps of both."""
    log_path = LOGS_DIR / f"{options.name}-{size}.log"
    model, load_args = find_model(size)
    args = (*device_args(), *load_args, *shlex.split(options.server_args))
    env = {"OMP_NUM_THREADS": str(options.threads)} if options.threads else {}
    with running_server(model, args, config="echo", env=env, log_path=log_path) as server:
        driver = Driver(server.url, None, random.Random(options.seed))
        samples = driver.measure(options.calibrate_s, on_wave=lambda share: None)
        host = driver.host_time()
        live = live_steps(server, driver.server["vocab"], options)
    about = {"command": options.command, "server": driver.server, "host": host}
    write_steps(SAMPLES_DIR / options.name, size, {CALIBRATION: samples, LIVE: live}, about)


def judge(size: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per model and kind of step, by the steps that were kept; writes the best profile."""
    steps, about = read_steps(SAMPLES_DIR / options.name, size)
    live = steps[LIVE]
    host = HostTime(**about["host"]) if about["host"] else None
    calibration = fit_all(steps[CALIBRATION], about["server"], seed=options.seed, host=host)
    profile = dataclasses.replace(calibration.profile(), date=about["date"])
    save_profile(profile, options.folder / f"{size}-profile.json")
    rows, off = [], scatter(live)
    for name, model in calibration.models.items():
        learning = live_errors(model, live, profile.largest_step)
        for kind, error in held_out_errors(model, live).items():
            mask = np.array([BatchRow(*map(int, row)).kind is kind for row in live[0]])
            rows.append(
                {
                    "size": size,
                    "model": name,
                    "is_best": name == calibration.best,
                    "kind": kind,
                    "median_ms": float(np.median(live[1][mask]) * 1000),
                    "num_steps": error.num_steps,
                    "mape": error.mape,
                    "p95": error.p95,
                    "bias": error.bias,
                    "held_out_mape": calibration.errors[name][kind].mape
                    if kind in calibration.errors[name]
                    else None,
                    "live_mape": learning[kind][0] if kind in learning else None,
                    "coverage": learning[kind][1] if kind in learning else None,
                    "scatter": off.get(kind),
                }
            )
    return rows


def summary_markdown(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> str:
    """The table and how to read it."""
    _, measured = read_steps(SAMPLES_DIR / options.name, options.sizes.split(",")[0])
    command, _, _ = (measured.pop(name) for name in ("command", "server", "host"))
    lines = [
        f"# Step times `{options.name}`",
        "",
        f"    {command}",
        "",
        f"- {', '.join(f'{key}: {value}' for key, value in measured.items())}",
        "- every model is fitted to the steps of calibration and judged by those of live traffic",
        "- scatter: what live steps of one shape differ by, and decodes of the same requests",
        "  one token later: no model's MAPE is less than that of the machine",
        "",
        "| size | model | step | live steps | median ms | MAPE | p95 | bias | MAPE held out "
        "| MAPE while learning | scatter | 95 % bound covers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row["size"], row["model"] + (" (best)" if row["is_best"] else ""), row["kind"]]
        cells += [str(row["num_steps"]), f"{row['median_ms']:.1f}"]
        cells += [f"{row[key]:.1%}" for key in ("mape", "p95", "bias")]
        cells += ["-" if row[key] is None else f"{row[key]:.1%}" for key in _OPTIONAL]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


_OPTIONAL = ("held_out_mape", "live_mape", "scatter", "coverage")


def main(argv: list[str]) -> None:
    """Measure all sizes, or judge steps that are there; print and write the summary."""
    parser = argparse.ArgumentParser(prog="python -m eval.step_times", description=__doc__)
    parser.add_argument("--sizes", default="small,base,large")
    parser.add_argument("--server-args", default=SERVER_ARGS)
    parser.add_argument("--calibrate-s", type=positive, default=60.0)
    parser.add_argument("--live-s", type=positive, default=45.0)
    parser.add_argument("--clients", type=count, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", type=folder_name, default="step-times")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="of the model on a CPU; 0: one for each core, and none left to the HTTP processes",
    )
    parser.add_argument("--judge-only", action="store_true", help="by the steps of an earlier run")
    options = parser.parse_args(argv)
    options.command = shlex.join(["python", "-m", "eval.step_times", *argv])
    folder = options.folder = RESULTS_DIR / options.name
    folder.mkdir(parents=True, exist_ok=True)
    sizes = options.sizes.split(",")
    if not options.judge_only:
        for size in sizes:
            measure(size, options)
    rows = [row for size in sizes for row in judge(size, options)]
    document = orjson.dumps({"rows": rows}, option=orjson.OPT_INDENT_2)
    (folder / "summary.json").write_bytes(document + b"\n")
    summary = summary_markdown(options, rows)
    (folder / "summary.md").write_text(summary, encoding="utf-8")
    Console().print(summary, highlight=False, markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
