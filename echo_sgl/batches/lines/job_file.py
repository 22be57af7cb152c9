"""A job file on disk: checked in one pass, then read line by line in any order.

Memory stays bounded by the number of lines, not by their length: what is kept of a line is its
place in the file, its name and a short sort key.
"""

from __future__ import annotations

import codecs
import hashlib
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from echo_sgl.batches.lines.job_line import (
    MAX_LINE_BYTES,
    BatchLine,
    LineError,
    is_blank,
    parse_line,
    shortened,
    too_many_answers,
)
from echo_sgl.batches.lines.model_names import is_served
from echo_sgl.batches.lines.prefix_order import estimated_tokens, prefix_key, prompt_bytes
from echo_sgl.errors import EchoError

_MAX_MODELS_CHARS = 200


class JobFileError(EchoError, ValueError):
    """The job file cannot be used as a whole."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a valid line stands; `offset` and `length` are bytes, `tokens` is an estimate."""

    line_number: int
    offset: int
    length: int
    custom_id: str
    model: str
    tokens: int
    prefix_key: bytes = field(repr=False)
    url: str = ""


@dataclass(frozen=True, slots=True)
class LineProblem:
    """What is wrong with one line, in the words of OpenAI's `errors.data`."""

    line_number: int
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class JobLimits:
    """How much of a file is read before it is refused; `max_requests`: see `too_many_answers`."""

    max_lines: int
    max_problems: int
    max_requests: int | None = None

    def stop(
        self, line_number: int, num_entries: int, num_problems: int, *, is_line: bool
    ) -> LineProblem | None:
        """Why reading ends before this line, which may be a blank one; None if it goes on."""
        # A file of line ends alone has no lines, but takes as long to read.
        num_lines = num_entries + num_problems + is_line
        if num_lines > self.max_lines or line_number > 10 * self.max_lines:
            return LineProblem(
                line_number,
                "too_many_lines",
                f"the file has more than {self.max_lines:,} lines; split it",
            )
        if num_problems >= self.max_problems:
            return LineProblem(
                line_number, "too_many_errors", f"{num_problems:,} lines are wrong; reading stopped"
            )
        return None


@dataclass(frozen=True, slots=True)
class JobFile:
    """A checked job file: its valid lines, the problems of all others, and its SHA-256."""

    path: Path
    sha256: str
    entries: Sequence[Entry]
    problems: Sequence[LineProblem]

    @property
    def num_lines(self) -> int:
        return len(self.entries) + len(self.problems)

    def restrict_models(self, served: Collection[str]) -> JobFile:
        """Turn lines that name a model the server does not have into problems."""
        valid = [entry for entry in self.entries if is_served(entry.model, served)]
        unknown = [entry for entry in self.entries if not is_served(entry.model, served)]
        allowed = shortened(", ".join(sorted(served)), _MAX_MODELS_CHARS)
        found = [
            LineProblem(
                entry.line_number,
                "model_not_found",
                f"body.model is {shortened(repr(entry.model))}; the server has {allowed}",
                "body.model",
            )
            for entry in unknown
        ]
        problems = sorted([*self.problems, *found], key=lambda problem: problem.line_number)
        return JobFile(self.path, self.sha256, valid, problems)

    def in_prefix_order(self) -> list[Entry]:
        """Lines that share a prompt prefix stand together; equal prompts in file order."""
        return sorted(self.entries, key=lambda entry: (entry.prefix_key, entry.line_number))


class LineReader:
    """Reads the lines of a checked job file again, in any order.

    Errors: `JobFileError` when the file is no longer the one that was checked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")

    def read(self, entry: Entry) -> BatchLine:
        self._file.seek(entry.offset)
        try:
            line = parse_line(self._file.read(entry.length))
        except LineError as error:
            raise self._changed(entry) from error
        if line.custom_id != entry.custom_id:
            raise self._changed(entry)
        return line

    def close(self) -> None:
        self._file.close()

    def _changed(self, entry: Entry) -> JobFileError:
        return JobFileError(
            f"{self._path} was changed while it was worked on: line {entry.line_number} is not "
            f"{entry.custom_id!r} any more. Put the old file back and run the command again"
        )


def open_job_file(path: Path) -> BinaryIO:
    """The file, from its beginning.

    Errors: `JobFileError` for a pipe, which gives its lines once only: they are checked before they
    are sent. `OSError` when it cannot be opened.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise JobFileError(
            f"job file {path} is no regular file, and a job is read more than once. Write the "
            "lines to a file first, and name that"
        )
    return path.open("rb")


def no_lines(path: Path) -> JobFileError:
    """What is wrong with a file of nothing, or of line ends."""
    return JobFileError(f"job file {path} holds no lines; it needs one JSON object a line")


def check_job_file(path: Path, limits: JobLimits | None = None) -> JobFile:
    """Read the whole file once and check every line; `limits` make the reading end earlier.

    Errors: `JobFileError` when it cannot be read or holds no line at all.
    """
    digest = hashlib.sha256()
    entries: list[Entry] = []
    problems: list[LineProblem] = []
    first_uses: dict[str, int] = {}
    try:
        with open_job_file(path) as file:
            for line_number, offset, raw in _raw_lines(file, digest):
                is_line = not is_blank(raw)
                num_found = len(entries), len(problems)
                if limits and (end := limits.stop(line_number, *num_found, is_line=is_line)):
                    problems.append(end)
                    break
                if not is_line:
                    continue
                try:
                    line = _line(line_number, raw, first_uses, limits)
                except LineError as error:
                    problems.append(LineProblem(line_number, error.code, str(error), error.param))
                else:
                    entries.append(_entry(line_number, offset, len(raw), line))
    except OSError as error:
        raise JobFileError(f"job file {path} cannot be read: {error.strerror}") from error
    if not entries and not problems:
        raise no_lines(path)
    return JobFile(path, digest.hexdigest(), entries, problems)


def _line(
    line_number: int, raw: bytes, first_uses: dict[str, int], limits: JobLimits | None
) -> BatchLine:
    line = parse_line(raw)
    first_use = first_uses.setdefault(line.custom_id, line_number)
    if first_use != line_number:
        raise LineError(
            "duplicate_custom_id",
            f"custom_id {shortened(repr(line.custom_id))} stands in line {first_use} already; "
            "each must be used once",
            "custom_id",
        )
    if error := too_many_answers(line, limits.max_requests if limits else None):
        raise error
    return line


def _entry(line_number: int, offset: int, length: int, line: BatchLine) -> Entry:
    prompt = prompt_bytes(line)
    tokens, key = estimated_tokens(line, len(prompt)), prefix_key(line, prompt)
    return Entry(line_number, offset, length, line.custom_id, line.model, tokens, key, line.url)


def _raw_lines(file: BinaryIO, digest: hashlib._Hash) -> Iterator[tuple[int, int, bytes]]:
    """Number, byte offset and bytes (without line end or BOM) of every line."""
    offset, line_number = 0, 0
    while whole := _read_line(file, digest):
        line_number += 1
        bom = codecs.BOM_UTF8 if line_number == 1 and whole.startswith(codecs.BOM_UTF8) else b""
        raw = whole[len(bom) :].rstrip(b"\r\n")
        yield line_number, offset + len(bom), raw
        offset = file.tell()


def _read_line(file: BinaryIO, digest: hashlib._Hash) -> bytes:
    """Next line with its end; of one that is too long, just enough to see that it is."""
    line = piece = file.readline(MAX_LINE_BYTES + 3)
    digest.update(piece)
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(MAX_LINE_BYTES)
        digest.update(piece)
    return line
