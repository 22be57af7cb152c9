"""What Echo's own code costs a step of a server with any model, on any device.

    python -m eval.own_time --model llama-3-8b --server-args "--attention-backend triton" --name x

`eval.bench.steps` measures the same with a model that is small enough for every machine. Writes
eval/results/<name>/: config.json, summary.json and summary.md.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from eval.bench.steps import JOBS, MIN_STEPS, measure
from eval.options import check_options, option
from eval.paths import RESULTS_DIR
from eval.servers.machine import device_args, provenance
from eval.servers.models import find_model
from eval.simulated.points import parse_points

Rows = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class OwnTimeOptions:
    """What is measured."""

    name: str = option("own-time", "folder under eval/results/ that takes the results")
    model: str = option("base", "demo model (tiny, small, base, large), shape, folder or hub id")
    server_args: str = option("", "more arguments for the server, as one string")
    jobs: int = option(len(JOBS), "how many of the jobs of eval.bench.steps", 1)

    def __post_init__(self) -> None:
        check_options(self)


def own_times(options: OwnTimeOptions) -> list[dict[str, Any]]:
    """The rows of each job."""
    model, load_args = find_model(options.model)
    args = (*device_args(), *load_args, *shlex.split(options.server_args))
    jobs = list(JOBS)[: options.jobs]
    return [row for job in jobs for row in measure(job, model, args, {})]


def summary_markdown(config: dict[str, Any], rows: Rows) -> str:
    """One line a figure."""
    lines = [
        f"# Own time `{config['name']}`",
        "",
        f"    {config['command']}",
        "",
        f"- machine: {config['machine']}; date: {config['date']}",
        f"- SGLang {config['sglang']}, torch {config['torch']}, Python {config['python']}; "
        f"model {config['model']}",
        f"- at least {MIN_STEPS:,} steps of each job; share: of a median step of the same kind",
        "",
        "| figure | us | share of a step | steps |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(f"| {row['name']} | {row['ours']:.0f} | {row['ratio']:.1%} | {row['n']:,} |")
    return "\n".join([*lines, ""])


def main(argv: list[str]) -> None:
    """Measure, print and write."""
    options = parse_points(argv, OwnTimeOptions, prog="python -m eval.own_time")
    command = f"python -m eval.own_time {shlex.join(argv)}".strip()
    rows = own_times(options)
    config = {**dataclasses.asdict(options), "command": command, **provenance()}
    write_results(RESULTS_DIR / options.name, config, rows)


def write_results(folder: Path, config: dict[str, Any], rows: Rows) -> None:
    """The three files; prints the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tree in (("config.json", config), ("summary.json", {"rows": list(rows)})):
        (folder / name).write_bytes(orjson.dumps(tree, option=orjson.OPT_INDENT_2) + b"\n")
    text = summary_markdown(config, rows)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    Console().print(text, highlight=False, markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
