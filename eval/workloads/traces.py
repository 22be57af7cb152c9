"""Arrival traces: when online requests come and how long their prompts and answers are."""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echo_sgl.sim.trace_columns import MAX_BLOCK_ID, TraceFileError
from echo_sgl.sim.trace_files import read_trace_file
from eval.workloads import WorkloadError
from eval.workloads.patterns import poisson_arrivals


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; `at_s` counts from the start of the trace.

    `blocks`: what its prompt consists of, `block_tokens` each but for the last: prompts that begin
    with the same ones begin alike. Empty where the trace does not tell.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: float = 0.0


def read_trace(path: Path) -> list[Arrival]:
    """The requests of a file in any format that `echo-sgl plan` reads, the first one at 0 s.

    Those without prompt or answer, which failed where they were recorded, are left out. That, and
    what else is odd about the file, is said on stderr.
    Errors: `WorkloadError` names the file, the line, the column and the bad value.
    """
    try:
        read = read_trace_file(path, skip_empty=True)
    except TraceFileError as error:
        raise WorkloadError(str(error)) from error
    for warning in read.warnings:
        tell_once(f"warning: trace {path}: {warning}")
    trace = read.trace
    columns = trace.at_s, trace.prompt_tokens, trace.output_tokens
    arrivals = [Arrival(*row) for row in zip(*columns, strict=True)]
    if trace.blocks is None:
        return arrivals
    return [
        replace(one, blocks=tuple(blocks), block_tokens=float(trace.block_tokens))
        for one, blocks in zip(arrivals, trace.blocks, strict=True)
    ]


@functools.cache
def tell_once(message: str) -> None:
    """An experiment reads its trace several times."""
    print(message, file=sys.stderr)


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
    """Multiply prompt and answer lengths (at least 1 token); 0 in `max_prompt_tokens`: no limit.

    Prompts go on sharing the same share of their lengths.
    """
    _check_positive(length_scale=length_scale)
    limit = max_prompt_tokens or math.inf
    return [
        replace(
            one,
            prompt_tokens=int(min(limit, max(1, round(one.prompt_tokens * length_scale)))),
            output_tokens=max(1, round(one.output_tokens * length_scale)),
            block_tokens=one.block_tokens * length_scale,
        )
        for one in arrivals
    ]


def again_and_again(arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    """A trace's requests without end; what one time shares is of its own in the next."""
    for lap in itertools.count():
        for one in arrivals:
            yield replace(one, blocks=tuple(block + lap * MAX_BLOCK_ID for block in one.blocks))


def bursty_arrivals(
    *, seed: int, quiet_rps: float, burst_rps: float, quiet_s: float, burst_s: float
) -> Iterator[float]:
    """Endless arrival times (s): Poisson arrivals whose rate switches between quiet and burst."""
    _check_positive(quiet_rps=quiet_rps, burst_rps=burst_rps, quiet_s=quiet_s, burst_s=burst_s)
    segments = itertools.cycle([(quiet_rps, quiet_s), (burst_rps, burst_s)])
    return poisson_arrivals(segments, random.Random(seed))


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name} is {value!r}; it must be a number above 0")
