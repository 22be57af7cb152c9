"""What the cache finds again, by arm: long documents alone, beside conversations, in a burst.

    python -m eval.cache offline     # long documents on a pool that holds a fifth of them
    python -m eval.cache overlap     # the same beside online conversations
    python -m eval.cache burst       # four times the online traffic for a while
    python -m eval.cache control     # few-shot jobs, where plain LRU is good already

writes eval/results/cache-EXPERIMENT-JOB/ with config.json, the arms' config files, raw/,
summary.json and summary.md, one folder for each of the experiment's jobs.
"""

from __future__ import annotations

import dataclasses
import gc
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console

from eval.arms import Arm
from eval.cache.arms import ARM_WINDOWS, with_config_file
from eval.cache.figures import figures
from eval.cache.load import CacheLoad, build_load
from eval.cache.options import CacheOptions, parse_options
from eval.cache.phases import run_phases
from eval.cache.report import summary_markdown
from eval.figures.results_folder import replacing
from eval.figures.summary import over_repetitions
from eval.load.mix import SERVED_MODEL
from eval.load.records import write_records
from eval.paths import LOGS_DIR, RESULTS_DIR
from eval.servers.machine import device_args, provenance
from eval.servers.models import demo_model
from eval.servers.server import ServerStartError, running_server
from eval.workloads import WorkloadError
from eval.workloads.prompts import load_tokenizer

Tree = dict[str, Any]

_console = Console(stderr=True)


def main(argv: list[str]) -> None:
    """Run one experiment; a wrong input or a server that does not start ends with code 1."""
    options = parse_options(argv, prog="python -m eval.cache")
    command = f"python -m eval.cache {shlex.join(argv)}"
    try:
        for job_name in options.job_names:
            folder = run(options, job_name, command=command)
            print((folder / "summary.md").read_text(encoding="utf-8"))
    except (WorkloadError, ServerStartError, httpx.HTTPError) as error:
        sys.exit(f"error: {error}")


def run(
    options: CacheOptions, job_name: str, *, command: str, results_dir: Path = RESULTS_DIR
) -> Path:
    """Measure all arms on one job and write its results, replacing those of the same name."""
    model = demo_model(options.size)
    load = build_load(options, job_name, load_tokenizer(str(model)))
    config = _config(options, job_name, load, command)
    # The prompts live as long as the run: a collector that walks them would delay sending.
    gc.collect()
    gc.freeze()
    results = results_dir / options.folder_name(job_name)
    with replacing(results) as folder:
        _write_json(folder / "config.json", config)
        trees = _measure(options, load, folder, model, config["bounds"])
        summary = {name: over_repetitions(runs) for name, runs in trees.items()}
        _write_json(folder / "summary.json", {"arms": summary, "repetitions": trees})
        text = summary_markdown(config, summary)
        (folder / "summary.md").write_text(text, encoding="utf-8")
    return results


def server_args(options: CacheOptions, arm: Arm, pool_tokens: int) -> tuple[str, ...]:
    """Arguments of one arm's server."""
    return (
        *device_args(),
        *("--served-model-name", SERVED_MODEL, "--enable-cache-report", "--enable-metrics"),
        *("--random-seed", str(options.seed)),
        *("--max-total-tokens", str(pool_tokens)),
        *("--max-running-requests", str(options.max_running_requests)),
        *("--chunked-prefill-size", str(options.chunked_prefill_size)),
        *arm.args,
    )


def _measure(
    options: CacheOptions, load: CacheLoad, folder: Path, model: Path, bounds: Tree
) -> dict[str, list[Tree]]:
    """The arms one after the other, every second repetition in reverse."""
    arms = {
        name: with_config_file(arm, folder / "configs" / f"{name}.toml")
        for name, arm in options.picked_arms().items()
    }
    trees: dict[str, list[Tree]] = {name: [] for name in arms}
    for repetition in range(options.repetitions):
        for name in arms if repetition % 2 == 0 else reversed(arms):
            _console.log(f"repetition {repetition + 1} of {options.repetitions}, {name}")
            raw = folder / "raw" / f"{name}-{repetition + 1}"
            window = min(options.window, ARM_WINDOWS.get(name, options.window))
            mine = dataclasses.replace(options, window=window)
            trees[name].append(_run_arm(arms[name], load, mine, bounds, model=model, raw=raw))
    return trees


def _run_arm(
    arm: Arm, load: CacheLoad, options: CacheOptions, bounds: Tree, *, model: Path, raw: Path
) -> Tree:
    """One server start with all phases of the experiment."""
    log_path = LOGS_DIR / f"cache-{raw.parent.parent.name}-{raw.name}.log"
    args = server_args(options, arm, load.pool_tokens)
    started_s = time.monotonic()
    with running_server(model, args, config=arm.config, log_path=log_path) as server:
        _console.log(f"  ready after {time.monotonic() - started_s:.0f} s")
        phases = run_phases(server, arm, load, options)
    for name, phase in phases.items():
        write_records(raw.with_name(f"{raw.name}-{name}.jsonl.gz"), phase.records)
    counters = {name: phase.counters for name, phase in phases.items()}
    _write_json(raw.with_name(f"{raw.name}-counters.json"), counters)
    _console.log(f"  done after {time.monotonic() - started_s:.0f} s")
    return figures(phases, load, options, bounds)


def _config(options: CacheOptions, job_name: str, load: CacheLoad, command: str) -> Tree:
    """All that is needed to run it again, the load's size and its bounds."""
    arms = options.picked_arms()
    args = {name: server_args(options, arm, load.pool_tokens) for name, arm in arms.items()}
    return {
        "command": command,
        "job": job_name.rpartition("/")[2],
        **provenance(),
        "options": dataclasses.asdict(options),
        "arms": {name: dataclasses.asdict(arm) for name, arm in arms.items()},
        "server_args": args,
        "load": load.facts(),
        "bounds": load.bounds(),
    }


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
