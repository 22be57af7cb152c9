"""From `validating` to `in_progress` or `failed`: check a batch's file and put its lines in."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import orjson

from echo_sgl.batches.check_upload import CheckRules
from echo_sgl.batches.store import batch_rows, work
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.job_store import JobStore

_ROWS_EACH = 2000


def validate_batch(
    store: JobStore, batch: BatchRow, rules: CheckRules, is_wanted: Callable[[], bool]
) -> None:
    """Check the file of a claimed batch in a process of its own; blocks, so run it in a thread.

    `is_wanted` turns false when the server stops: the batch is then left as it was.
    """
    number = batch.number
    with store.database.write() as connection:
        work.delete_lines(connection, number)
    try:
        with store.blobs.local_path(batch.input_file_id) as path, _checker(path, rules) as output:
            is_checked = _take(store, batch, output, is_wanted)
    except FileNotFoundError:
        _fail(store, number, "file_not_found", "the input file is gone; upload it again")
        return
    if not is_checked and is_wanted():
        message = "the file could not be checked: it takes too much time or memory; split it"
        _fail(store, number, "file_not_checked", message)


def _take(
    store: JobStore, batch: BatchRow, output: IO[bytes], is_wanted: Callable[[], bool]
) -> bool:
    """Take over what the check found; False when it ended early or is not wanted any more."""
    if not (first := output.readline()):
        return False
    head = orjson.loads(first)
    if head["problems"]:
        with store.database.write() as connection:
            batch_rows.fail_batch(connection, batch.number, head["problems"], store.clock())
        return True
    total = 0
    lines = enumerate(output)
    while rows := [_row(place, line) for place, line in itertools.islice(lines, _ROWS_EACH)]:
        if not is_wanted():
            return False
        with store.database.write() as connection:
            work.insert_lines(connection, batch.number, rows)
        total += len(rows)
    if total != head["num_lines"]:
        return False
    model = head["models"][0] if len(head["models"]) == 1 else None
    with store.database.write() as connection:
        batch_rows.start_batch(
            connection, batch.number, total=total, model=model, now_s=store.clock()
        )
    return True


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


@contextmanager
def _checker(path: Path, rules: CheckRules) -> Iterator[IO[bytes]]:
    """Run the check; gives its standard output."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "echo_sgl.batches.check_upload"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(orjson.dumps({**asdict(rules), "path": str(path)}))
        process.stdin.close()
        yield process.stdout
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def _fail(store: JobStore, number: int, code: str, message: str) -> None:
    problem = {"code": code, "message": message, "param": None, "line": None}
    with store.database.write() as connection:
        batch_rows.fail_batch(connection, number, [problem], store.clock())
