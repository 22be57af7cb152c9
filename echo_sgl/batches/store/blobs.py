"""The bytes of uploaded files, never whole in memory.

On one server they are files in the state directory; servers that share a database keep them in
it, because they need not share a disk. A blob appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from sqlalchemy import (
    Connection,
    LargeBinary,
    Select,
    delete,
    func,
    insert,
    literal,
    select,
    union_all,
)

from echo_sgl.batches.store.database import Database
from echo_sgl.batches.store.schema import blob_chunks, files

CHUNK_BYTES = 1024 * 1024
PIECES_PER_QUERY = 64
DRAFT_SUFFIX = ".part"
_SAFE_ID = re.compile(r"file-[0-9a-f]{32}")
Register = Callable[[Connection], None]


class Draft:
    """An upload that is being written: a file that no other name leads to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{secrets.token_hex(16)}{DRAFT_SUFFIX}"
        self._file: BinaryIO = self.path.open("xb")
        self.num_bytes = 0
        self.num_lines = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.num_bytes += len(data)
        self.num_lines += data.count(b"\n")

    def sync(self) -> None:
        """Return when all that was written is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


class Blobs(Protocol):
    """Where uploaded content is kept, by file id."""

    def keep(self, draft: Draft, blob_id: str, register: Register) -> None:
        """Make a draft the blob of this id, together with what `register` writes."""

    def read(self, blob_id: str, spans: list[tuple[int, int]]) -> list[bytes]:
        """Parts of a blob, each given as byte offset and length."""

    def stream(self, blob_id: str) -> Iterator[bytes]:
        """All of a blob, piece by piece."""

    def local_path(self, blob_id: str) -> contextlib.AbstractContextManager[Path]:
        """The blob as a file on this machine, for as long as the block runs."""

    def delete(self, blob_id: str) -> None:
        """Remove a blob; one that is not there is no error."""

    def sweep(self, known: set[str]) -> None:
        """Remove what a crash left: blobs without a row."""


class DiskBlobs:
    """Blobs as files whose names are made of ids, never of what a user sent."""

    def __init__(self, folder: Path, database: Database) -> None:
        self._folder = folder
        self._database = database

    def keep(self, draft: Draft, blob_id: str, register: Register) -> None:
        draft.sync()
        draft.path.replace(self._path(blob_id))
        _sync_folder(self._folder)
        try:
            with self._database.write() as connection:
                register(connection)
        except BaseException:
            self.delete(blob_id)
            raise

    def read(self, blob_id: str, spans: list[tuple[int, int]]) -> list[bytes]:
        with self._path(blob_id).open("rb") as file:
            return [os.pread(file.fileno(), length, offset) for offset, length in spans]

    def stream(self, blob_id: str) -> Iterator[bytes]:
        with self._path(blob_id).open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    @contextmanager
    def local_path(self, blob_id: str) -> Iterator[Path]:
        yield self._path(blob_id)

    def delete(self, blob_id: str) -> None:
        self._path(blob_id).unlink(missing_ok=True)

    def sweep(self, known: set[str]) -> None:
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    def _path(self, blob_id: str) -> Path:
        if not _SAFE_ID.fullmatch(blob_id):
            raise ValueError(f"{blob_id!r} is no id of a blob")
        return self._folder / blob_id


class DatabaseBlobs:
    """Blobs as rows of a megabyte, for servers that share a database but no disk."""

    def __init__(self, folder: Path, database: Database) -> None:
        self._folder = folder
        self._database = database

    def keep(self, draft: Draft, blob_id: str, register: Register) -> None:
        draft.sync()
        with self._database.write() as connection, draft.path.open("rb") as file:
            number = 0
            while piece := file.read(CHUNK_BYTES):
                connection.execute(
                    insert(blob_chunks).values(blob_id=blob_id, number=number, content=piece)
                )
                number += 1
            register(connection)
        draft.discard()

    def read(self, blob_id: str, spans: list[tuple[int, int]]) -> list[bytes]:
        """Only these bytes leave the database: a claim is of lines from all over the file."""
        parts = [bytearray(length) for _, length in spans]
        pieces = [
            (place, *piece) for place, span in enumerate(spans) for piece in _pieces_of(*span)
        ]
        with self._database.read() as connection:
            for first in range(0, len(pieces), PIECES_PER_QUERY):
                some = pieces[first : first + PIECES_PER_QUERY]
                found: Any = connection.execute(union_all(*(_piece(blob_id, *one) for one in some)))
                for place, start, content in found:
                    parts[place][start : start + len(content)] = content
        return [bytes(part) for part in parts]

    def stream(self, blob_id: str) -> Iterator[bytes]:
        number = 0
        while piece := self._chunk(blob_id, number):
            yield piece
            number += 1

    @contextmanager
    def local_path(self, blob_id: str) -> Iterator[Path]:
        draft = Draft(self._folder)
        try:
            for piece in self.stream(blob_id):
                draft.write(piece)
            draft.sync()
            yield draft.path
        finally:
            draft.discard()

    def delete(self, blob_id: str) -> None:
        with self._database.write() as connection:
            connection.execute(delete(blob_chunks).where(blob_chunks.c.blob_id == blob_id))

    def sweep(self, known: set[str]) -> None:
        """Other servers add blobs meanwhile: the row that a chunk came with is looked for anew.

        In the folder only drafts go: its other files are blobs of a SQLite store beside it.
        """
        for path in self._folder.glob(f"*{DRAFT_SUFFIX}"):
            path.unlink(missing_ok=True)
        has_row = select(files.c.id).where(files.c.id == blob_chunks.c.blob_id).exists()
        with self._database.write() as connection:
            connection.execute(delete(blob_chunks).where(~has_row))

    def _chunk(self, blob_id: str, number: int) -> bytes:
        query = select(blob_chunks.c.content).where(
            blob_chunks.c.blob_id == blob_id, blob_chunks.c.number == number
        )
        with self._database.read() as connection:
            return bytes(connection.execute(query).scalar() or b"")


def _pieces_of(offset: int, length: int) -> Iterator[tuple[int, int, int, int]]:
    """A part of a blob by chunk: where it starts in the part, the chunk, where there, how long."""
    end = offset + length
    while (start := end - length) < end:
        number, within = divmod(start, CHUNK_BYTES)
        taken = min(length, CHUNK_BYTES - within)
        yield start - offset, number, within, taken
        length -= taken


def _piece(
    blob_id: str, place: int, start: int, number: int, within: int, length: int
) -> Select[int, int, bytes]:
    content = func.substr(blob_chunks.c.content, within + 1, length, type_=LargeBinary)
    return select(literal(place), literal(start), content).where(
        blob_chunks.c.blob_id == blob_id, blob_chunks.c.number == number
    )


def open_blobs(state_dir: Path, database: Database) -> tuple[Blobs, Path]:
    """The blobs that fit the database, and the folder for drafts."""
    folder = state_dir / "files"
    folder.mkdir(exist_ok=True)
    kind = DatabaseBlobs if database.is_shared else DiskBlobs
    return kind(folder, database), folder


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
