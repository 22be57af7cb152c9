"""The job store of one server: database, blobs, and the state directory that it holds alone."""

from __future__ import annotations

import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from echo_sgl.batches.clock import Clock, steady_clock
from echo_sgl.batches.store import files, work
from echo_sgl.batches.store.blobs import Blobs, Draft, open_blobs
from echo_sgl.batches.store.database import Database, StoreError, open_database
from echo_sgl.batches.store.peers import Peers

LOCK_NAME = "lock"
CLOCK_NAME = "clock"


@dataclass(frozen=True, slots=True)
class JobStore:
    """What routes and dispatcher work on. `server_id` is this process's name in leases."""

    database: Database
    blobs: Blobs
    drafts_dir: Path
    server_id: str
    peers: Peers
    clock: Clock
    lock: BinaryIO

    def new_draft(self) -> Draft:
        return Draft(self.drafts_dir)

    def close(self) -> None:
        """End the lease and give the state directory back."""
        with self.database.write() as connection:
            work.forget_servers(connection, self.server_id)
        self.abandon()

    def abandon(self) -> None:
        """Close without a last word, as a crash would."""
        self.database.close()
        self.lock.close()


def open_store(state_dir: Path, database_url: str | None = None) -> JobStore:
    """Open the state directory, which is made if it is missing.

    Errors: `StoreError` when it cannot be written, another server uses it, or the database is
    damaged, foreign or of a newer version.
    """
    lock = _lock(state_dir)
    try:
        database = open_database(state_dir, database_url)
    except BaseException:
        lock.close()
        raise
    blobs, drafts_dir = open_blobs(state_dir, database)
    clock = _clock(database, state_dir)
    with database.write() as connection:
        if not database.is_shared:
            work.forget_servers(connection)
        known = files.blob_ids(connection)
    blobs.sweep(known)
    server_id = f"server-{secrets.token_hex(8)}"
    return JobStore(database, blobs, drafts_dir, server_id, Peers(server_id), clock, lock)


def _clock(database: Database, state_dir: Path) -> Clock:
    if database.is_shared:
        return database.shared_clock()
    with database.read() as connection:
        return steady_clock(state_dir / CLOCK_NAME, work.last_seen_s(connection))


def _lock(state_dir: Path) -> BinaryIO:
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (state_dir / LOCK_NAME).open("a+b")
    except OSError as error:
        raise StoreError(
            f"--echo-state-dir {state_dir} cannot be written: {error.strerror}. Name a directory "
            "that this user may write to"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise StoreError(
            f"another server uses --echo-state-dir {state_dir}; give each its own. Servers share "
            "a queue by --echo-database-url"
        ) from error
    os.set_inheritable(file.fileno(), False)
    return file
