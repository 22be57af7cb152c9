"""Measured steps as files: what a server ran and how long it took, with where that was.

NAME.csv.gz has a row per step: which phase it belongs to, the columns of `BatchRow`, and seconds.
NAME.json has the server's facts and the provenance. Models can be judged by them anywhere.
Those that are kept lie under eval/data/. Older ones have no `max_prefill_tokens`: of several
prefills in one step, the contexts count as equally long there.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from echo_sgl.batch_shape import BatchRow
from echo_sgl.estimators.held_out import Samples
from eval.servers.machine import provenance

CALIBRATION, LIVE = "calibration", "live"
COLUMNS = ("phase", *BatchRow._fields, "time_s")
LONGEST = "max_prefill_tokens"
OLDER_COLUMNS = tuple(name for name in COLUMNS if name != LONGEST)


def write_steps(folder: Path, name: str, steps: dict[str, Samples], about: dict[str, Any]) -> None:
    """Write the steps of each phase, and what is told about them beside the provenance."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for phase, (rows, times_s) in steps.items():
        for row, time_s in zip(rows, times_s, strict=True):
            table.writerow([phase, *map(int, row), f"{time_s:.7g}"])
    packed = gzip.compress(text.getvalue().encode(), mtime=0)
    (folder / f"{name}.csv.gz").write_bytes(packed)
    document = orjson.dumps({**provenance(), **about}, option=orjson.OPT_INDENT_2)
    (folder / f"{name}.json").write_bytes(document + b"\n")


def read_steps(folder: Path, name: str) -> tuple[dict[str, Samples], dict[str, Any]]:
    """Rows and times of each phase, and the document beside them.

    Shapes: (steps, columns of `BatchRow`) and (steps,). Errors: `ValueError` for other columns.
    """
    document: dict[str, Any] = orjson.loads((folder / f"{name}.json").read_bytes())
    with gzip.open(folder / f"{name}.csv.gz", "rt", encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file)
    if tuple(header) not in (COLUMNS, OLDER_COLUMNS):
        raise ValueError(f"{name}.csv.gz has columns {header}; they must be {list(COLUMNS)}")
    phases = dict.fromkeys(line[0] for line in lines)
    steps = {}
    for phase in phases:
        table = np.array([line[1:] for line in lines if line[0] == phase], dtype=np.float64)
        rows = table[:, :-1]
        if LONGEST not in header:
            rows = np.column_stack([rows, [mean_context(row) for row in rows]])
        steps[phase] = rows, table[:, -1]
    return steps, document


def mean_context(row: Sequence[float]) -> int:
    """How long the prefills of a step are in the mean, with their prefixes; 0 without any."""
    num_prefills, prefill_tokens, cached_tokens, *_ = row
    return int((prefill_tokens + cached_tokens) // num_prefills) if num_prefills else 0
