"""The end of batches and files: what was not answered is said so, and what is old goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import Connection

from echo_sgl.batches.dispatch.validation import NotOursError
from echo_sgl.batches.lines.replies import unanswered_record
from echo_sgl.batches.store import batch_rows, files, work
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.files import FileRow
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.work import Result

_ENDING = ("finalizing", "cancelling")
_ROWS_EACH = 1000
_REASONS = {
    "expired": ("batch_expired", "the completion window was over before this request was done"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was done"),
    "completed": ("batch_unfinished", "this request was left out; retry the batch"),
}


class Ender:
    """Ends batches that nobody works on; call it in one thread at a time.

    A crash on the way is harmless: lines get their records in groups, and the state changes with
    the files' rows in one last transaction. Each makes sure of the claim first: who was taken for
    dead may come back to a batch that another server ended, and that is done again.
    """

    def __init__(self, store: JobStore, *, output_days: float) -> None:
        self._store = store
        self._output_days = output_days
        self._number: int | None = None  # of the last batch

    def end_one(self) -> bool:
        """End the oldest batch that is to end; whether there was one. Blocks."""
        store = self._store
        with store.database.write() as connection:
            self._free_left(connection)
            live = store.peers.live(connection, store.clock())
            batch = batch_rows.claim_batch(connection, store.server_id, live, _ENDING)
        if batch is None:
            return False
        self._number = batch.number
        with suppress(NotOursError):
            _record_unanswered(store, batch)
            with _ours(store, batch) as connection:
                batch_rows.finish_batch(
                    connection, batch.number, store.clock(), output_days=self._output_days
                )
        return True

    def _free_left(self, connection: Connection) -> None:
        """Let go of what is left from an end that broke off, even if only its claim was lost."""
        owner = self._store.server_id
        for row in batch_rows.open_batches(connection):
            # This server may still check the file of a batch that never ran.
            is_ours = row.in_progress_at_s is not None or row.number == self._number
            if row.status in _ENDING and row.owner == owner and is_ours:
                batch_rows.release_batch(connection, row.number, owner)


def delete_expired_files(store: JobStore) -> Iterator[str]:
    """Delete files whose time is over, unless a batch still reads them. Blocks at each step.

    Results go in parts: after each comes their file's id, and others should get to write. Cut
    short, it is done again: the file is among the `expired_files`.
    """
    with store.database.write() as connection:
        gone = [
            file
            for file in files.expired_files(connection, store.clock())
            if files.open_batch_of(connection, file.id) is None
        ]
        for file in gone:
            files.delete_file(connection, file, store.clock())
        files.forget_gone(connection, store.clock())
    for file in gone:
        if file.source == "blob":
            store.blobs.delete(file.id)
        else:
            while _delete_records(store, file):
                yield file.id


def _delete_records(store: JobStore, file: FileRow) -> bool:
    with store.database.write() as connection:
        return files.delete_records(connection, file)


@contextmanager
def _ours(store: JobStore, batch: BatchRow) -> Iterator[Connection]:
    """A transaction during which nobody else ends the batch, nor retries it.

    Errors: `NotOursError` when another server has it, or it has ended.
    """
    with store.database.write() as connection:
        if not batch_rows.try_hold(connection, batch.number, store.server_id, _ENDING):
            raise NotOursError
        yield connection


def _record_unanswered(store: JobStore, batch: BatchRow) -> None:
    """Errors: `NotOursError`."""
    if not batch.total:  # ended while its file was checked: no line of it was promised
        with _ours(store, batch) as connection:
            work.delete_lines(connection, batch.number)
        return
    code, message = _REASONS[batch.ends_as]
    position = -1
    while True:
        with store.database.read() as connection:
            left = work.unanswered(connection, batch.number, after=position, limit=_ROWS_EACH)
        if not left:
            return
        position = left[-1][0]
        results = [
            Result(place, is_ok=False, record=unanswered_record(custom_id, code, message))
            for place, custom_id in left
        ]
        with _ours(store, batch) as connection:
            work.record_results(
                connection, batch.number, store.server_id, results, now_s=store.clock()
            )
