"""Traces of requests from files in any of `trace_formats`.

Errors name file, line, column and value; what is only odd comes back as a warning.
"""

from __future__ import annotations

import csv
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_sgl.sim.text_files import open_text_file
from echo_sgl.sim.trace_columns import TraceColumns, TraceFile, TraceFileError
from echo_sgl.sim.trace_formats import CSV_FORMATS, JSON_FORMATS, RECORDING, Format, known_formats
from echo_sgl.types import Task

MAX_LINE_CHARS = 4_000_000
SNIFFED_BYTES = 1024
RECORDING_FORMAT = "echo-recording"
RECORDING_VERSIONS = (1,)


def read_trace_file(path: Path, *, task: Task = Task.ONLINE, skip_empty: bool = False) -> TraceFile:
    """Read a trace; what is in it tells its format, gzip is unpacked.

    Time starts at 0 with the first request. `skip_empty` leaves out requests without prompt or
    answer, which failed where they were recorded. Of a recording only the class of `task` is
    taken, in order of arrival, and not what was being written when it was killed.

    Errors: `TraceFileError` names the line.
    """
    columns = TraceColumns(path, task, skip_empty=skip_empty)
    try:
        with open_text_file(path) as file:
            start = file.peek(SNIFFED_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            # No name of a column begins so.
            if start[:1] in {b"{", b"["}:
                _read_json(columns, text, is_array=start[:1] == b"[")
            else:
                _read_csv(columns, text, delimiter=_delimiter(start))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise TraceFileError(f"trace {path} cannot be read: {error}") from error
    return columns.finish()


def _read_csv(columns: TraceColumns, file: io.TextIOBase, *, delimiter: str) -> None:
    lines = csv.reader(file, delimiter=delimiter)
    rows = (row for row in lines if len(row) > 1 or "".join(row).strip())
    header = [name.strip() for name in next(rows, [])]
    columns.format = _csv_format(columns, header)
    for row in rows:
        if len(row) != len(header):
            raise columns.error(
                lines.line_num, f"{len(row)} values for {len(header)} columns; none may be missing"
            )
        columns.add(lines.line_num, dict(zip(header, row, strict=True)))


def _csv_format(columns: TraceColumns, header: Sequence[str]) -> Format:
    form = _format_of(columns, header, CSV_FORMATS, "columns")
    # What has no name is a number of the row, as pandas writes it.
    if unknown := set(header) - {*form.columns, ""}:
        raise columns.error(
            1,
            f"unknown columns {', '.join(sorted(unknown))}; {form.name} has "
            f"{', '.join(form.columns)}. Remove the others",
        )
    if twice := {name for name in header if name and header.count(name) > 1}:
        raise columns.error(
            1, f"columns {', '.join(sorted(twice))} are there more than once; keep one of each"
        )
    return form


def _delimiter(start: bytes) -> str:
    """What stands between the names of the columns: a comma, or what some write in its place."""
    header = start.splitlines()[0] if start else b""
    return max(",;\t", key=lambda one: header.count(one.encode()))


def _read_json(columns: TraceColumns, file: io.TextIOBase, *, is_array: bool) -> None:
    if is_array:
        raise columns.error(
            1, "an array begins; one JSON object a line is needed, as jq -c '.[]' writes them"
        )
    for number, line in _lines(columns, file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if columns.is_recording and not line.endswith("\n"):
                columns.warnings.append(f"line {number}: cut off as the recording ended")
                return
            raise columns.error(
                number, f"not JSON: {error}. One object a line is needed, no array around them"
            ) from error
        if not isinstance(row, dict):
            raise columns.error(number, f"not a JSON object: {line[:60]!r}; one a line is needed")
        if columns.format is None and row.get("format") == RECORDING_FORMAT:
            _read_head(columns, number, row)
            continue
        if columns.format is None:
            columns.format = _format_of(columns, list(row), JSON_FORMATS, "keys")
        form = columns.format
        if unknown := set(row) - {*form.columns}:
            raise columns.error(
                number,
                f"unknown keys {', '.join(sorted(unknown))[:80]}; {form.name} has "
                f"{', '.join(form.columns)}",
            )
        columns.add(number, row)


def _read_head(columns: TraceColumns, number: int, row: Mapping[str, Any]) -> None:
    """The first line of a recording, which tells its version and the size of its blocks."""
    if (version := row.get("version")) not in RECORDING_VERSIONS:
        known = ", ".join(map(str, RECORDING_VERSIONS))
        raise columns.error(
            number,
            f"version of the recording is {version!r:.60}; known are {known}. "
            "Record it anew, or read it with the echo-sgl that wrote it",
        )
    columns.format = RECORDING
    columns.block_tokens = columns.tokens(number, "block_tokens", row.get("block_tokens"))
    if not columns.block_tokens:
        raise columns.error(number, "block_tokens is 0; a block holds at least one token")


def _lines(columns: TraceColumns, file: io.TextIOBase) -> Iterator[tuple[int, str]]:
    number = 0
    while line := file.readline(MAX_LINE_CHARS):
        number += 1
        if len(line) == MAX_LINE_CHARS:
            raise columns.error(number, f"longer than {MAX_LINE_CHARS:,} characters")
        if line.strip():
            yield number, line


def _format_of(
    columns: TraceColumns, names: Sequence[str], formats: Sequence[Format], what: str
) -> Format:
    for form in formats:
        if set(form.needed) <= set(names):
            return form
    found = ", ".join(names)[:200] or "none"
    raise columns.error(1, f"the {what} are {found}; known formats are {known_formats()}")
