"""What was read of a trace: each value checked, and in the end what is odd about all of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from echo_sgl.errors import EchoError
from echo_sgl.sim.trace_formats import Format, known_formats
from echo_sgl.sim.workload import BLOCK_TOKENS, Trace
from echo_sgl.types import Task

MAX_TOKENS = 100_000_000
MAX_BLOCKS, MAX_BLOCK_ID = 200_000, 1 << 62
GAP_S = 3600.0
MAX_TRACE_DAYS = 366
# Later than any date: what is larger is no time in seconds.
LAST_S = 253_402_300_800.0
# Seconds since 1970 of the years 2014 to 2039: as milliseconds days of January 1970.
EPOCH_S = range(1_400_000_000, 2_200_000_000)
MAX_GAPS_TOLD = 5
# Of a server, or of a part of many; told for so many requests.
LEAST_RPS, MOST_RPS, MIN_RATED = 0.02, 2000.0, 200


class TraceFileError(EchoError, ValueError):
    """A trace that cannot be simulated; the message names file, line and value."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace that was read, in which format, and what was odd about it."""

    trace: Trace
    format: str
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class TraceColumns:
    """What was read so far."""

    path: Path
    task: Task
    skip_empty: bool = field(kw_only=True)
    format: Format | None = None
    block_tokens: int = 0
    at_s: array[float] = field(default_factory=lambda: array("d"))
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompts: array[int] = field(default_factory=lambda: array("q"))
    outputs: array[int] = field(default_factory=lambda: array("q"))
    blocks: list[array[int]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    num_gaps: int = 0
    num_empty: int = 0
    num_other_class: int = 0
    origin_s: float = 0.0

    def error(self, number: int, problem: str) -> TraceFileError:
        return TraceFileError(f"trace {self.path}, line {number}: {problem}")

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        """One request. Errors: `TraceFileError` names line, column and value."""
        form = self.format
        assert form is not None
        if self._task(number, row) is not self.task:
            self.num_other_class += 1
            return
        at_s = self._time_s(number, form, row.get(form.time))
        prompt = self.tokens(number, form.prompt, row.get(form.prompt))
        output = self.tokens(number, form.output, row.get(form.output))
        if not (prompt and output):
            self._empty(number, form.output if prompt else form.prompt)
            return
        if self.is_recording:
            self.arrivals.append((at_s, number))
        else:
            self._note_time(number, form.time, at_s)
        self.prompts.append(prompt)
        self.outputs.append(output)
        if form.blocks and form.blocks in row:
            self._add_blocks(number, form.blocks, row[form.blocks], prompt)

    @property
    def is_recording(self) -> bool:
        """One says how large its blocks are, and has its requests in the order of their ends."""
        return self.block_tokens > 0

    def finish(self) -> TraceFile:
        if self.is_recording:
            self._sort()
        left_out = list(self._left_out())
        if not self.at_s or self.format is None:
            why = ", ".join(left_out) or f"known formats are {known_formats()}"
            raise TraceFileError(f"trace {self.path} holds no {self.task} request; {why}")
        if self.blocks and len(self.blocks) != len(self.at_s):
            key = self.format.blocks
            raise TraceFileError(f"trace {self.path}: some lines have {key}, some have none")
        if (more := self.num_gaps - MAX_GAPS_TOLD) > 0:
            self.warnings.append(f"{more} more gaps of over an hour")
        self.warnings += [*left_out, *self._rate_warning(self.format)]
        trace = Trace(
            self.task,
            self.at_s,
            self.prompts,
            self.outputs,
            blocks=self.blocks or None,
            block_tokens=self.block_tokens or self.format.block_tokens,
            # What clients allowed is not in a trace: no more than the longest answer needs.
            max_new_tokens=max(self.outputs),
        )
        return TraceFile(trace, self.format.name, tuple(self.warnings))

    def _rate_warning(self, form: Format) -> Iterator[str]:
        """Times in another unit than that of the format make a trace of such a rate."""
        rate_rps = len(self.at_s) / max(self.at_s[-1], 1e-9)
        if len(self.at_s) >= MIN_RATED and not LEAST_RPS <= rate_rps <= MOST_RPS:
            unit = "seconds" if form.unit_s == 1.0 else "milliseconds"
            yield f"{rate_rps:.4g} requests a second on average; numbers in {form.time} are {unit}"

    def _left_out(self) -> Iterator[str]:
        if self.num_empty:
            yield f"{self.num_empty} requests without prompt or answer left out"
        if self.num_other_class:
            yield f"{self.num_other_class} requests of the other class left out"

    def _empty(self, number: int, column: str) -> None:
        if not self.skip_empty:
            raise self.error(
                number,
                f"{column} is 0; a request has at least one token. Requests that failed can be "
                "left out with --skip-empty",
            )
        self.num_empty += 1

    def _sort(self) -> None:
        """By arrival, and those that came at once as they ended."""
        assert self.format is not None
        order = sorted(range(len(self.arrivals)), key=lambda place: self.arrivals[place][0])
        for place in order:
            at_s, number = self.arrivals[place]
            self._note_time(number, self.format.time, at_s)
        self.prompts = array("q", (self.prompts[place] for place in order))
        self.outputs = array("q", (self.outputs[place] for place in order))
        if len(self.blocks) == len(order):
            self.blocks = [self.blocks[place] for place in order]

    def _note_time(self, number: int, column: str, at_s: float) -> None:
        if not self.at_s:
            self._check_unit(number, column, at_s)
            self.origin_s = at_s
        at_s -= self.origin_s
        last_s = self.at_s[-1] if self.at_s else 0.0
        if at_s < last_s:
            raise self.error(
                number, f"{column} goes back by {last_s - at_s:g} s; sort the file by {column}"
            )
        if at_s > MAX_TRACE_DAYS * 86400:
            raise self.error(
                number,
                f"{column} is {at_s:g} s after that of the first request; a trace has at most "
                f"{MAX_TRACE_DAYS} days. Correct the time, or cut the file",
            )
        if at_s - last_s > GAP_S:
            self._note_gap(number, (at_s - last_s) / 3600)
        self.at_s.append(at_s)

    def _check_unit(self, number: int, column: str, at_s: float) -> None:
        """A thousand times too fast would be a trace whose times are seconds, not milliseconds."""
        given = int(at_s / self.format.unit_s) if self.format else 0
        if given != int(at_s) and given in EPOCH_S:
            raise self.error(
                number,
                f"{column} is {given}; numbers there are milliseconds, and this is a time in "
                "seconds since 1970. Multiply them by 1,000, or write dates",
            )

    def _note_gap(self, number: int, hours: float) -> None:
        self.num_gaps += 1
        if self.num_gaps <= MAX_GAPS_TOLD:
            self.warnings.append(f"line {number}: nothing came for {hours:.1f} h before it")

    def _add_blocks(self, number: int, key: str, value: Any, prompt: int) -> None:
        size = self.block_tokens or (self.format.block_tokens if self.format else BLOCK_TOKENS)
        wanted = -(-prompt // size)
        is_list = isinstance(value, list) and len(value) <= MAX_BLOCKS
        if not is_list or not all(type(one) is int for one in value):
            raise self.error(
                number, f"{key} is {str(value)[:60]}; it must be a list of whole numbers"
            )
        if len(value) != wanted:
            raise self.error(
                number,
                f"{key} has {len(value)} entries; {prompt} tokens are {wanted} blocks of {size}",
            )
        # Hashes of 64 bits, too, signed or not: two that are alike in 62 are the same one.
        blocks = array("q", (one % MAX_BLOCK_ID for one in value))
        if rest := prompt % size:
            # An id stands for so many tokens: who has more of the block has another one.
            blocks[-1] = hash((blocks[-1], rest)) % MAX_BLOCK_ID
        self.blocks.append(blocks)

    def _task(self, number: int, row: Mapping[str, Any]) -> Task:
        """The class of a row; a row that names none is of the class that is read."""
        given = row.get("class", self.task)
        try:
            return Task(given)
        except ValueError:
            allowed = " or ".join(Task)
        raise self.error(number, f"class is {given!r:.60}; it must be {allowed}, or left out")

    def tokens(self, number: int, column: str, value: Any) -> int:
        try:
            # A float, as pandas writes 472 as 472.0 in a column with gaps.
            tokens = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            tokens = math.nan
        if not tokens.is_integer() or not 0 <= tokens <= MAX_TOKENS:
            raise self.error(
                number, f"{column} is {value!r:.60}; it must be a whole number of tokens"
            )
        return int(tokens)

    def _time_s(self, number: int, form: Format, value: Any) -> float:
        try:
            at_s = _seconds(value, form.unit_s)
        except (TypeError, ValueError, OverflowError):
            at_s = math.nan
        unit = "seconds" if form.unit_s == 1.0 else f"units of {form.unit_s:g} s"
        if not math.isfinite(at_s):
            raise self.error(
                number, f"{form.time} is {value!r:.60}; it must be {unit} or a date and time"
            )
        if at_s > LAST_S:
            raise self.error(
                number,
                f"{form.time} is {value!r:.60}; numbers there are {unit}, and this is after the "
                "year 9999. Divide them: milliseconds by 1,000, or write dates",
            )
        return at_s


def _seconds(at: Any, unit_s: float) -> float:
    """A number of units in seconds; a date and time since 1970, UTC where it names no offset.

    Of a fraction, six digits count: Azure writes seven in 2023; in 2024 none where it is 0.
    """
    try:
        return float(at) * unit_s
    except ValueError:
        text = str(at).strip()
    if len(text) <= len("2024-05-10"):
        # Python reads a date alone as its midnight: all requests of a day would come at once.
        raise ValueError(f"{text} has no time of day")
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
