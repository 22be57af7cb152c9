"""Arrival traces: when online requests come and how long their prompts and answers are."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.workloads import WorkloadError, read_lines

TRACE_COLUMNS = ("t_s", "context_tokens", "generated_tokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; `at_s` counts from the start of the trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[Arrival]:
    """Read a CSV with the columns `TRACE_COLUMNS`, in order of time; more columns are ignored.

    Errors: `WorkloadError` names the file, the line, the column and the bad value.
    """
    lines = read_lines(path)
    header = next(csv.reader([next(lines, (1, ""))[1]]), [])
    if missing := [name for name in TRACE_COLUMNS if name not in header]:
        raise WorkloadError(
            f"{path} line 1: no column {', '.join(missing)}; "
            f"there are {', '.join(header) or 'none'}"
        )
    arrivals: list[Arrival] = []
    for number, line in lines:
        if line.strip():
            arrivals.append(_arrival(f"{path} line {number}", header, next(csv.reader([line]))))
            _check_order(f"{path} line {number}", arrivals)
    if not arrivals:
        raise WorkloadError(f"{path} holds no request: there is nothing below the header")
    return arrivals


def slice_trace(
    arrivals: Sequence[Arrival], *, start_s: float, duration_s: float, time_scale: float
) -> list[Arrival]:
    """The requests that fall into `duration_s` seconds after stretching all gaps by `time_scale`.

    Units: `start_s` in the trace's own time; the result starts at 0.
    """
    _check_positive(time_scale=time_scale, duration_s=duration_s)
    moved = (replace(one, at_s=(one.at_s - start_s) * time_scale) for one in arrivals)
    return [one for one in moved if 0 <= one.at_s < duration_s]


def time_scale_for_rate(
    arrivals: Sequence[Arrival], *, start_s: float, duration_s: float, rate_rps: float
) -> float:
    """The stretch under which `duration_s` seconds hold `rate_rps` requests a second on average.

    The number of requests is fixed, the time they span follows: the burst shape stays.
    """
    _check_positive(rate_rps=rate_rps, duration_s=duration_s)
    rest = [one.at_s for one in arrivals if one.at_s >= start_s]
    wanted = max(1, round(rate_rps * duration_s))
    if len(rest) <= wanted:
        raise WorkloadError(
            f"{rate_rps:g} requests/s over {duration_s:g} s need {wanted + 1} requests after "
            f"{start_s:g} s of the trace, which holds {len(rest)}; lower the rate or the duration"
        )
    span_s = rest[wanted] - start_s
    if span_s <= 0:
        raise WorkloadError(f"the trace's first {wanted} requests after {start_s:g} s are at once")
    return duration_s / span_s


def scale_lengths(
    arrivals: Sequence[Arrival], length_scale: float, *, max_prompt_tokens: int = 0
) -> list[Arrival]:
    """Multiply prompt and answer lengths (at least 1 token); 0 in `max_prompt_tokens`: no limit."""
    _check_positive(length_scale=length_scale)
    limit = max_prompt_tokens or math.inf
    return [
        Arrival(
            one.at_s,
            int(min(limit, max(1, round(one.prompt_tokens * length_scale)))),
            max(1, round(one.output_tokens * length_scale)),
        )
        for one in arrivals
    ]


def bursty_arrivals(
    *, seed: int, quiet_rps: float, burst_rps: float, quiet_s: float, burst_s: float
) -> Iterator[float]:
    """Endless arrival times (s): Poisson arrivals whose rate switches between quiet and burst."""
    _check_positive(quiet_rps=quiet_rps, burst_rps=burst_rps, quiet_s=quiet_s, burst_s=burst_s)
    rng = random.Random(seed)
    start_s = 0.0
    while True:
        for rate_rps, length_s in ((quiet_rps, quiet_s), (burst_rps, burst_s)):
            at_s = start_s + rng.expovariate(rate_rps)
            while at_s < start_s + length_s:
                yield at_s
                at_s += rng.expovariate(rate_rps)
            start_s += length_s


def _arrival(where: str, header: Sequence[str], row: Sequence[str]) -> Arrival:
    if len(row) != len(header):
        raise WorkloadError(f"{where}: {len(row)} values for {len(header)} columns")
    values = dict(zip(header, row, strict=True))
    t_s, prompt, output = (_number(where, name, values[name]) for name in TRACE_COLUMNS)
    for name, tokens in zip(TRACE_COLUMNS[1:], (prompt, output), strict=True):
        if not tokens.is_integer():
            raise WorkloadError(f"{where}, column {name}: {tokens!r} is not a whole number")
    return Arrival(t_s, int(prompt), int(output))


def _number(where: str, name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise WorkloadError(f"{where}, column {name}: {text!r} is not a number from 0 up")
    return number


def _check_order(where: str, arrivals: Sequence[Arrival]) -> None:
    if len(arrivals) > 1 and arrivals[-1].at_s < arrivals[-2].at_s:
        raise WorkloadError(
            f"{where}, column t_s: {arrivals[-1].at_s:g} comes after {arrivals[-2].at_s:g}; "
            "sort the file by t_s"
        )


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name} is {value!r}; it must be a number above 0")
