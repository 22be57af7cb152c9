"""Simulate many points of one evaluation, and write what came of them."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import track

from eval.options import add_arguments
from eval.servers.machine import provenance

Rows = Sequence[dict[str, Any]]


def parse_points(argv: Sequence[str], options: type[Any], *, prog: str) -> Any:
    """The options of that dataclass; wrong ones end the program with code 2."""
    parser = argparse.ArgumentParser(prog=prog)
    add_arguments(parser, options, {})
    try:
        return options(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))


def simulate_points(
    run_point: Callable[[Any, Any], dict[str, Any]],
    options: Any,
    points: Sequence[Any],
    *,
    chunk: int = 1,
) -> list[dict[str, Any]]:
    """One row a point, in `options.workers` processes; `chunk` points that follow share one."""
    with ProcessPoolExecutor(options.workers) as pool:
        done = pool.map(run_point, [options] * len(points), points, chunksize=chunk)
        return list(track(done, total=len(points), console=Console(stderr=True)))


def write_points(
    results_dir: Path,
    options: Any,
    rows: Rows,
    summary: Callable[[dict[str, Any], Rows], str],
    *,
    prog: str,
    argv: Sequence[str],
    facts: Mapping[str, Any],
) -> None:
    """config.json, summary.json and summary.md in the folder of that name; prints the last."""
    config = {
        "name": options.name,
        "command": f"{prog} {shlex.join(argv)}".strip(),
        **provenance(),
        "options": dataclasses.asdict(options),
        **facts,
    }
    folder = results_dir / options.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, tree in (("config.json", config), ("summary.json", {"rows": rows})):
        (folder / name).write_bytes(orjson.dumps(tree, option=orjson.OPT_INDENT_2))
    text = summary(config, rows)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    print(text)
