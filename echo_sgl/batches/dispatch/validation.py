"""From `validating` to `in_progress` or `failed`: check a batch's file and put its lines in."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import orjson
from sqlalchemy import Connection

from echo_sgl.batches.lines.check_upload import CheckRules
from echo_sgl.batches.store import batch_rows, work
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.job_store import JobStore

CHECKER = (sys.executable, "-P", "-m", "echo_sgl.batches.lines.check_upload")
# Whoever stops the server may tell its children, too: that says nothing about the file.
_ASKED_TO_END = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_ROWS_EACH = 2000


class NotOursError(Exception):
    """The batch is not to be validated here any more, and is left as it is."""


class Validation:
    """The check of a batch that this server claimed, in a process of its own.

    Each transaction makes sure of the claim first: who is taken for dead, or too late for a
    cancel, changes nothing.
    """

    def __init__(self, store: JobStore, batch: BatchRow, rules: CheckRules) -> None:
        self._store = store
        self._batch = batch
        self._rules = rules
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self.is_elsewhere = False  # the batch was left to a server that has its models

    def run(self) -> None:
        """Check and put the lines in; blocks, so run it in a thread.

        Errors: `InterruptedError` when the check was told to end; the batch is to be checked anew.
        """
        with contextlib.suppress(NotOursError):
            self._run()

    def stop(self) -> None:
        """End the check from any thread; `run` then returns and leaves the batch as it was."""
        with self._turn:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def fail(self, code: str, message: str) -> None:
        """validating -> failed, for a reason that is not a line's.

        Errors: `NotOursError`.
        """
        self._fail_with([{"code": code, "message": message, "param": None, "line": None}])

    def _run(self) -> None:
        with self._ours() as connection:
            work.delete_lines(connection, self._batch.number)
        with self._store.blobs.local_path(self._batch.input_file_id) as path:
            if not path.exists():
                self.fail("file_not_found", "the input file is gone; upload it again")
                return
            with self._checker(path) as process:
                assert process.stdout is not None
                if self._take(process.stdout):
                    return
                died_of = -process.wait()
        if died_of in _ASKED_TO_END:
            raise InterruptedError(f"the check of a file was ended by signal {died_of}")
        message = "the file could not be checked: it takes too much time or memory; split it"
        self.fail("file_not_checked", message)

    def _take(self, output: IO[bytes]) -> bool:
        """Take over what the check found; False when it ended early."""
        if not (first := output.readline()):
            return False
        head = orjson.loads(first)
        if head.get("is_elsewhere"):
            self.is_elsewhere = True
            return True
        if head["problems"]:
            self._fail_with(head["problems"])
            return True
        total = 0
        lines = enumerate(output)
        while rows := [_row(place, line) for place, line in itertools.islice(lines, _ROWS_EACH)]:
            with self._ours() as connection:
                work.insert_lines(connection, self._batch.number, rows)
            total += len(rows)
        if total != head["num_lines"]:
            return False
        with self._ours() as connection:
            batch_rows.start_batch(
                connection,
                self._batch.number,
                total=total,
                model=head["model"],
                models=head["models"],
                now_s=self._store.clock(),
            )
        return True

    def _fail_with(self, problems: list[dict[str, Any]]) -> None:
        with self._ours() as connection:
            batch_rows.fail_batch(connection, self._batch.number, problems, self._store.clock())

    @contextmanager
    def _ours(self) -> Iterator[Connection]:
        """A transaction during which nobody else has the batch.

        Errors: `NotOursError` when it was cancelled, is over, or another server has it.
        """
        with self._store.database.write() as connection:
            if self._is_stopped or not batch_rows.try_hold(
                connection, self._batch.number, self._store.server_id
            ):
                raise NotOursError
            yield connection

    @contextmanager
    def _checker(self, path: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run the check; gives its process, whose standard output is to be read."""
        process = subprocess.Popen(CHECKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            self._watch(process)
            order = orjson.dumps({**asdict(self._rules), "path": str(path)})
            # When it died already, its output shows that.
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(order)
            yield process
        finally:
            self._watch(None)
            process.kill()
            process.stdout.close()
            process.wait()

    def _watch(self, process: subprocess.Popen[bytes] | None) -> None:
        """Let `stop` kill this process, or none: the id of one that was waited for is not ours."""
        with self._turn:
            self._process = process
            if process is not None and self._is_stopped:
                process.kill()


def _row(position: int, line: bytes) -> dict[str, Any]:
    line_number, offset_bytes, num_bytes, custom_id, tokens = orjson.loads(line)
    return {
        "position": position,
        "line_number": line_number,
        "offset_bytes": offset_bytes,
        "num_bytes": num_bytes,
        "custom_id": custom_id,
        "tokens": tokens,
    }
