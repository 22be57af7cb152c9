"""The output and error file of a job, which are at the same time its journal.

A line is finished when its record stands in one of the two files, flushed to disk. A crash can
tear at most the last record of each file; the next run cuts it off and does that line again.
A small state file beside the output names the job file that the records belong to.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from echo_sgl.errors import EchoError

STATE_VERSION = 1
Record = tuple[bool, bytes]  # whether the line was answered well, and its JSON


class JournalError(EchoError, RuntimeError):
    """The files cannot be continued; the message says what to do."""


@dataclass(frozen=True, slots=True)
class JournalPaths:
    """The three files of a run."""

    output: Path
    errors: Path
    state: Path

    def __post_init__(self) -> None:
        if self.output.resolve() == self.errors.resolve():
            raise JournalError(f"--output and --errors are both {self.output}; they must differ")

    @classmethod
    def beside(cls, output: Path, errors: Path | None = None) -> JournalPaths:
        """The usual names: `out.jsonl`, `out.errors.jsonl` and `out.jsonl.state.json`."""
        errors = errors or output.with_name(f"{output.stem}.errors.jsonl")
        return cls(output, errors, output.with_name(f"{output.name}.state.json"))


def in_utf_8(path: Path | str) -> str:
    """A path as JSON and requests can carry it; its name on disk need not be UTF-8."""
    return str(path).encode(errors="replace").decode()


class Journal:
    """Appends records and knows which lines are finished.

    Opening repairs torn ends and takes a lock that lives as long as the process: two runs on
    one output would answer every line twice.
    """

    def __init__(self, paths: JournalPaths, sha256: str, *, overwrite: bool = False) -> None:
        """Open for a job file; `overwrite` throws away what earlier runs left.

        Errors: `JournalError` when another run holds the files, when they belong to another job
        file, or when they were not written by a run.
        """
        self.paths = paths
        self._output = _open(paths.output)
        self._errors: FileIO | None = None
        try:
            self._errors = _open(paths.errors)
            self._lock()
            self.finished = self._take_over(sha256, overwrite)
        except BaseException:
            self.close()
            raise

    def append(self, records: Iterable[Record]) -> None:
        """Write records and return when they are on disk."""
        assert self._errors is not None
        groups: dict[FileIO, list[bytes]] = {}
        for is_ok, record in records:
            groups.setdefault(self._output if is_ok else self._errors, []).append(record + b"\n")
        for file, lines in groups.items():
            _append(file, b"".join(lines))

    def close(self) -> None:
        """Close the files, which releases the lock."""
        self._output.close()
        if self._errors is not None:
            self._errors.close()

    def _lock(self) -> None:
        assert self._errors is not None
        for file in (self._output, self._errors):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise JournalError(
                    f"another `batch run` is writing {file.name}; "
                    "wait for it, or choose another --output"
                ) from error

    def _take_over(self, sha256: str, overwrite: bool) -> frozenset[str]:
        assert self._errors is not None
        files = (self._output, self._errors)
        if overwrite:
            for file in files:
                file.truncate(0)
        elif any(os.fstat(file.fileno()).st_size for file in files):
            self._check_state(sha256)
        _write_state(self.paths, sha256)
        return frozenset(name for file in files for name in _repair(file))

    def _check_state(self, sha256: str) -> None:
        way_out = "Choose another --output, or throw its content away with --overwrite"
        try:
            state: Any = orjson.loads(self.paths.state.read_bytes())
            made_from, errors = state["job_sha256"], state["errors"]
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise JournalError(
                f"{self.paths.output} or {self.paths.errors} holds data, but {self.paths.state} "
                f"does not say from which job file. {way_out}"
            ) from error
        if made_from != sha256:
            raise JournalError(
                f"{self.paths.output} belongs to another job file, or the job file was changed "
                f"since. {way_out}"
            )
        if errors != in_utf_8(self.paths.errors.absolute()):
            raise JournalError(
                f"the run before wrote its failed lines to {errors}; name the same --errors. "
                f"{way_out}"
            )


def _open(path: Path) -> FileIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise JournalError(f"{path} cannot be written: {error.strerror}") from error
    if not path.is_file():
        file.close()
        raise JournalError(f"{path} is not a regular file; the output must be one to be resumed")
    return file


def _append(file: FileIO, data: bytes) -> None:
    """Put data at the end, on disk: all of it or, when the disk refuses, nothing."""
    end = os.fstat(file.fileno()).st_size
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except OSError as error:
        os.ftruncate(file.fileno(), end)
        raise JournalError(
            f"{file.name} cannot be written: {error.strerror}. What is in it stays; "
            "make room and run the same command again"
        ) from error


def _repair(file: FileIO) -> Sequence[str]:
    """Names of the finished lines; a torn last record is cut off the file."""
    names: list[str] = []
    good_bytes = 0
    with Path(file.name).open("rb") as reader:
        for line_number, line in enumerate(reader, start=1):
            name = _recorded_name(line)
            if name is not None:
                names.append(name)
                good_bytes += len(line)
            elif next(reader, b""):
                raise JournalError(
                    f"{file.name} is damaged: line {line_number} is no record of a batch run, "
                    "and more follow. Take the line out, or start again with --overwrite"
                )
    file.truncate(good_bytes)
    return names


def _recorded_name(line: bytes) -> str | None:
    """The `custom_id` of a whole record; None for a torn one."""
    if not line.endswith(b"\n"):
        return None
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    name = document.get("custom_id") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def _write_state(paths: JournalPaths, sha256: str) -> None:
    """Write the state file whole or not at all, and make the files' names durable."""
    state = {
        "version": STATE_VERSION,
        "job_sha256": sha256,
        "errors": in_utf_8(paths.errors.absolute()),
    }
    draft = paths.state.with_name(f"{paths.state.name}.tmp")
    with draft.open("wb") as file:
        file.write(orjson.dumps(state, option=orjson.OPT_INDENT_2))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(paths.state)
    for folder in {paths.output.parent, paths.errors.parent}:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
