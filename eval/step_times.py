"""How wrong each batch-time model is on live traffic that its calibration did not see.

    python -m eval.step_times --sizes tiny,small,base

Per model size: calibrate an idle server (`echo-sgl calibrate`'s own code), then play mixed
online and offline traffic and judge every model, and the 95 % upper bound of the best one,
by the steps that came of it. Writes eval/results/<name>/summary.json and summary.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from rich.console import Console

from echo_sgl.batch_shape import BatchRow
from echo_sgl.cli.calibration import Calibration, Driver, fit_all
from echo_sgl.cli.steps import fetch_steps
from echo_sgl.estimators.conformal import ConformalBand
from echo_sgl.estimators.held_out import Samples, held_out_errors
from echo_sgl.types import OFFLINE_SERVICE_TIER
from eval.machine import device_args, provenance
from eval.models import demo_model
from eval.server import Server, running_server

ROOT = Path(__file__).resolve().parent.parent
SERVER_ARGS = ("--max-total-tokens", "24000", "--max-running-requests", "16")
CHUNK_ARGS = ("--chunked-prefill-size", "512", "--enable-mixed-chunk")
NUM_CLIENTS = 10
SHARED_TOKENS = 600
QUANTILE = 0.95
BAND_WARM_UP_STEPS = 50


async def live_traffic(server: Server, vocab: int, seconds: float, seed: int) -> None:
    """Clients of both classes: fresh and shared prompts, short and long answers, pauses."""
    rng, until_s = random.Random(seed), time.monotonic() + seconds
    shared = [rng.randrange(16, vocab) for _ in range(SHARED_TOKENS)]

    async def client(http: httpx.AsyncClient) -> None:
        while time.monotonic() < until_s:
            start = shared[: rng.randrange(SHARED_TOKENS)] if rng.random() < 0.5 else []
            own = [rng.randrange(16, vocab) for _ in range(rng.randrange(1, 900))]
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
        await asyncio.gather(*(client(http) for _ in range(NUM_CLIENTS)))


def live_steps(server: Server, vocab: int, seconds: float, seed: int) -> Samples:
    """Rows and times of the steps that the traffic became."""
    [before] = fetch_steps(server.url)
    asyncio.run(live_traffic(server, vocab, seconds, seed))
    [after] = fetch_steps(server.url)
    new = after["rows"][before["num_steps"] - after["num_steps"] :]
    table = np.array(new, dtype=np.float64)
    num_columns = len(BatchRow._fields)
    return table[:, :num_columns], table[:, num_columns]


def band_coverage(calibration: Calibration, samples: Samples) -> dict[str, float]:
    """Share of live steps at or under their upper bound, which learns from the steps before."""
    band = ConformalBand(calibration.models[calibration.best])
    covered: dict[str, list[bool]] = {}
    for number, (values, time_s) in enumerate(zip(*samples, strict=True)):
        row = BatchRow(*map(int, values))
        if number >= BAND_WARM_UP_STEPS:
            is_covered = time_s <= band.predict_upper(row, QUANTILE)
            covered.setdefault(row.kind, []).append(bool(is_covered))
        band.observe(row, float(time_s), float(number))
    return {kind: float(np.mean(steps)) for kind, steps in covered.items()}


def rows_of_size(size: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per model and kind of step."""
    log_path = ROOT / "build" / "logs" / f"{options.name}-{size}.log"
    args = (*device_args(), *SERVER_ARGS, *CHUNK_ARGS)
    with running_server(demo_model(size), args, config="echo", log_path=log_path) as server:
        driver = Driver(server.url, None, random.Random(options.seed))
        samples = driver.measure(options.calibrate_s, on_wave=lambda share: None)
        calibration = fit_all(samples, driver.server, seed=options.seed)
        live = live_steps(server, driver.server["vocab"], options.live_s, options.seed + 1)
    coverage = band_coverage(calibration, live)
    rows = []
    for name, model in calibration.models.items():
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
                    "coverage": coverage.get(kind) if name == calibration.best else None,
                }
            )
    return rows


def summary_markdown(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> str:
    """The table and how to read it."""
    facts = provenance()
    lines = [
        f"# Step times `{options.name}`",
        "",
        f"    python -m eval.step_times --sizes {options.sizes}",
        "",
        f"- {', '.join(f'{key}: {value}' for key, value in facts.items())}",
        f"- {options.calibrate_s:g} s of calibration, then {options.live_s:g} s of live traffic",
        "",
        "| size | model | step | live steps | median ms | MAPE | p95 | bias | MAPE held out "
        "| 95 % bound covers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row["size"], row["model"] + (" (best)" if row["is_best"] else ""), row["kind"]]
        cells += [str(row["num_steps"]), f"{row['median_ms']:.1f}"]
        cells += [f"{row[key]:.1%}" for key in ("mape", "p95", "bias")]
        cells += ["-" if row[key] is None else f"{row[key]:.1%}" for key in _OPTIONAL]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


_OPTIONAL = ("held_out_mape", "coverage")


def main(argv: list[str]) -> None:
    """Measure all sizes, print and write the summary."""
    parser = argparse.ArgumentParser(prog="python -m eval.step_times", description=__doc__)
    parser.add_argument("--sizes", default="tiny,small,base")
    parser.add_argument("--calibrate-s", type=float, default=60.0)
    parser.add_argument("--live-s", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="step-times")
    options = parser.parse_args(argv)
    rows = [row for size in options.sizes.split(",") for row in rows_of_size(size, options)]
    folder = ROOT / "eval" / "results" / options.name
    folder.mkdir(parents=True, exist_ok=True)
    document = {"options": vars(options), **provenance(), "rows": rows}
    (folder / "summary.json").write_bytes(
        orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"
    )
    summary = summary_markdown(options, rows)
    (folder / "summary.md").write_text(summary, encoding="utf-8")
    Console().print(summary, highlight=False, markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
