"""`make bench`: run every measurement of ours against stock, print one table, keep the rows.

A bench module has `run() -> list[row]`; a row is {name, ours, stock, ratio, unit, n, machine}.
What was measured is kept bench by bench: one that fails, or runs alone, loses nothing of others.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from eval.paths import BUILD_DIR
from eval.servers.machine import on_cpu

BENCHES = (
    "cpu",
    "overlap",
    "pool",
    "tree",
    "estimators",
    "steps",
    "lots",
    "batches",
    "sim",
)
# What they compare serves on the CPU, where our platform stands aside for an accelerator.
CPU_BENCHES = {"cpu", "overlap", "lots"}
RESULT_FILE = BUILD_DIR / "bench.json"
ROW_KEYS = ("name", "ours", "stock", "ratio", "unit", "n", "machine")

Row = Mapping[str, Any]


def main(argv: list[str]) -> None:
    """Run all benches or one, print the table, write `RESULT_FILE` after each."""
    parser = argparse.ArgumentParser(prog="python -m eval.bench", description=__doc__)
    parser.add_argument("--only", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    names = [only] if (only := parser.parse_args(argv).only) else list(BENCHES)
    console = Console()
    rows: list[Row] = []
    for name in names:
        if name in CPU_BENCHES and not on_cpu():
            console.print(f"left out {name}: it is for machines without accelerator")
            continue
        console.print(f"running {name}", highlight=False)
        measured = checked(name, importlib.import_module(f"eval.bench.{name}").run())
        write_rows(name, measured, RESULT_FILE)
        rows += measured
    console.print(bench_table(rows))
    console.print(f"written to {RESULT_FILE.relative_to(RESULT_FILE.parents[1])}", highlight=False)


def checked(name: str, rows: Sequence[Row]) -> Sequence[Row]:
    """The rows, if they can go into the table.

    Errors: `ValueError` names the bench and the key that is missing or not known.
    """
    if not rows:
        raise ValueError(f"{name} measured nothing: run() must return at least one row")
    for row in rows:
        if wrong := set(row) ^ set(ROW_KEYS):
            raise ValueError(
                f"{name}: a row lacks or has too much {sorted(wrong)}; its keys must be "
                f"{', '.join(ROW_KEYS)}"
            )
    return rows


def write_rows(bench: str, rows: Sequence[Row], path: Path) -> None:
    """Put the rows of one bench in the place of its earlier ones; each says whose it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = orjson.loads(path.read_bytes()) if path.exists() else []
    kept = [row for row in before if row.get("bench") in BENCHES and row["bench"] != bench]
    kept += [{"bench": bench, **row} for row in rows]
    kept.sort(key=lambda row: BENCHES.index(row["bench"]))
    path.write_bytes(orjson.dumps(kept, option=orjson.OPT_INDENT_2) + b"\n")


def bench_table(rows: Sequence[Row]) -> Table:
    """One row per figure; `ratio` as the bench defines it, ours over stock.

    The machine is said once below: names are long, and terminals narrow.
    """
    machines = "; ".join(sorted({str(row["machine"]) for row in rows}))
    table = Table(title="Ours against stock SGLang", caption=machines)
    shown = [key for key in ROW_KEYS if key != "machine"]
    for key in shown:
        table.add_column(key, justify="left" if key in ("name", "unit") else "right")
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in shown))
    return table


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)
