"""Traces in Mooncake's JSON-lines format: one request a line, in order of time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.workloads import WorkloadError, read_lines
from eval.workloads.traces import Arrival

MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")


def read_mooncake(path: Path) -> list[Arrival]:
    """Read `timestamp` (ms), `input_length` and `output_length` (tokens); more keys are ignored.

    Errors: `WorkloadError` names the file, the line, the key and the bad value.
    """
    arrivals: list[Arrival] = []
    for number, line in read_lines(path):
        if line.strip():
            arrivals.append(_arrival(f"{path} line {number}", line))
            if len(arrivals) > 1 and arrivals[-1].at_s < arrivals[-2].at_s:
                raise WorkloadError(f"{path} line {number}: timestamp goes back; sort the file")
    if not arrivals:
        raise WorkloadError(f"{path} holds no request")
    return arrivals


def _arrival(where: str, line: str) -> Arrival:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise WorkloadError(f"{where} is not a JSON object")
    at_ms, prompt_tokens, output_tokens = (_count(where, key, row) for key in MOONCAKE_KEYS)
    return Arrival(at_ms / 1000, prompt_tokens, output_tokens)


def _count(where: str, key: str, row: Mapping[str, Any]) -> int:
    value = row.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise WorkloadError(f"{where}, key {key}: {value!r} is not a whole number from 0 up")
    return value
