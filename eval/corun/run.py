"""Compare arms on one machine: online alone, offline alone, both together, per server start.

    python -m eval.corun --arms stock,stock-priority,echo --name first

writes eval/results/first/ with config.json, raw/, summary.json and summary.md.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console

from eval.arms import Arm, pick_arms
from eval.corun.phases import empty_cache, offline_alone, online_alone, together, warm_up
from eval.corun.report import summary_markdown
from eval.figures.results_folder import replacing
from eval.figures.summary import over_repetitions, summarise_repetition
from eval.load.mix import SERVED_MODEL, Mix, build_mix
from eval.load.records import write_records
from eval.options import CorunOptions, parse_options
from eval.paths import LOGS_DIR, RESULTS_DIR
from eval.servers.machine import device_args, provenance
from eval.servers.models import find_model
from eval.servers.server import Server, ServerStartError, running_server
from eval.workloads import WorkloadError
from eval.workloads.prompts import load_tokenizer

_console = Console(stderr=True)


def main(argv: list[str]) -> None:
    """Run the comparison; a wrong input or a server that does not start ends with code 1."""
    options = parse_options(argv, prog="python -m eval.corun")
    try:
        folder = run(options, command=f"python -m eval.corun {shlex.join(argv)}".strip())
    except (WorkloadError, ServerStartError, httpx.HTTPError) as error:
        sys.exit(f"error: {error}")
    print((folder / "summary.md").read_text(encoding="utf-8"))


def run(options: CorunOptions, *, command: str) -> Path:
    """Measure all arms and write the results folder, replacing one of the same name."""
    model, _ = find_model(options.model)
    mix = build_mix(options, load_tokenizer(model))
    # The prompts live as long as the run: a collector that walks them would delay sending.
    gc.collect()
    gc.freeze()
    with replacing(RESULTS_DIR / options.name) as folder:
        _measure(options, mix, folder, model, _config(options, mix, command))
    return RESULTS_DIR / options.name


def _measure(
    options: CorunOptions, mix: Mix, folder: Path, model: str, config: dict[str, Any]
) -> None:
    """The arms one after the other, every second repetition in reverse."""
    _write_json(folder / "config.json", config)
    arms = pick_arms(options.arm_names)
    trees: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for repetition in range(options.repetitions):
        for name in arms if repetition % 2 == 0 else reversed(arms):
            _console.log(f"repetition {repetition + 1} of {options.repetitions}, {name}")
            prefix = folder / "raw" / f"{name}-{repetition + 1}"
            trees[name].append(_run_arm(arms[name], mix, options, model=model, raw_prefix=prefix))
    summary = {name: over_repetitions(runs) for name, runs in trees.items()}
    _write_json(folder / "summary.json", {"arms": summary, "repetitions": trees})
    text = summary_markdown(config, summary)
    (folder / "summary.md").write_text(text, encoding="utf-8")


def server_args(options: CorunOptions, arm: Arm) -> tuple[str, ...]:
    """Arguments of one arm's server; options of 0 are left to the server."""
    limits = {
        "--max-total-tokens": options.pool_tokens,
        "--max-running-requests": options.max_running_requests,
        "--chunked-prefill-size": options.chunked_prefill_size,
    }
    _, load_args = find_model(options.model)
    args = [*load_args, "--served-model-name", SERVED_MODEL, "--enable-cache-report"]
    args += ["--random-seed", str(options.seed)]
    for flag, value in limits.items():
        args += [flag, str(value)] if value else []
    return (*device_args(), *args, *shlex.split(options.server_args), *arm.args)


def _run_arm(
    arm: Arm, mix: Mix, options: CorunOptions, *, model: str, raw_prefix: Path
) -> dict[str, Any]:
    """One server start, three phases, each on an empty cache."""
    log_path = LOGS_DIR / f"corun-{raw_prefix.name}.log"
    args = server_args(options, arm)
    with running_server(model, args, config=arm.config, log_path=log_path) as server:
        asyncio.run(warm_up(server, arm, mix))
        online = _phase("online alone", server, online_alone(server, arm, mix, options))
        # As long as it runs together with online, so that both see the same part of the job.
        limit_s = options.lead_s + options.duration_s
        work = offline_alone(server, arm, mix, options, limit_s=limit_s)
        offline = _phase("offline alone", server, work)
        mixed, window_s = _phase("together", server, together(server, arm, mix, options))
    phases = {"online-alone": online, "offline-alone": offline, "together": mixed}
    for name, records in phases.items():
        write_records(raw_prefix.with_name(f"{raw_prefix.name}-{name}.jsonl.gz"), records)
    return summarise_repetition(online, offline, mixed, window_s)


def _phase(name: str, server: Server, work: Any) -> Any:
    _console.log(f"  {name}")
    empty_cache(server)
    return asyncio.run(work)


def _config(options: CorunOptions, mix: Mix, command: str) -> dict[str, Any]:
    """All that is needed to run it again, and the load's size as it was sent."""
    arms = {name: dataclasses.asdict(arm) for name, arm in pick_arms(options.arm_names).items()}
    arrivals = mix.arrivals
    return {
        "command": command,
        **provenance(),
        "options": dataclasses.asdict(options),
        "arms": arms,
        "server_args": {name: server_args(options, arm) for name, arm in _arms(options)},
        "online": {
            "requests": len(arrivals),
            "prompt_tokens": sum(one.prompt_tokens for one in arrivals),
            "output_tokens": sum(one.output_tokens for one in arrivals),
        },
        "offline": {"lines": len(mix.job)},
    }


def _arms(options: CorunOptions) -> list[tuple[str, Arm]]:
    return list(pick_arms(options.arm_names).items())


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
