"""Rows of the table `files`, each seen only by its tenant."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    union_all,
    update,
)

from echo_sgl.batches.store.database import Database
from echo_sgl.batches.store.schema import COMPLETED, FAILED, batches, files, gone_files, lines

PURPOSES = ("batch", "batch_output")
OUTCOME_OF_SOURCE = {"completed": COMPLETED, "failed": FAILED}
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_SLICE_BYTES = 1_000_000
_DELETE_BYTES = 64_000_000  # about what one transaction deletes
_GONE_AT_S = 0.0
_IS_KEPT = files.c.expires_at_s.is_distinct_from(_GONE_AT_S)
_REMEMBER_S = 86_400.0
FileRow = Row[Any]


def new_file_id() -> str:
    """128 random bits: an id cannot be guessed."""
    return f"file-{secrets.token_hex(16)}"


def insert_file(connection: Connection, **values: Any) -> FileRow:
    """Add a file and return its row."""
    connection.execute(insert(files).values(**values))
    return connection.execute(select(files).where(files.c.id == values["id"])).one()


def find_file(connection: Connection, file_id: str, tenant: str, now_s: float) -> FileRow | None:
    """The tenant's file of that id, unless it has expired."""
    return connection.execute(_visible(tenant, now_s).where(files.c.id == file_id)).first()


def list_files(
    connection: Connection,
    tenant: str,
    now_s: float,
    *,
    purpose: str | None,
    after: int | None,
    limit: int,
    ascending: bool,
) -> Sequence[FileRow]:
    """One page of the tenant's files; `after` is the number of the last one before."""
    query = _visible(tenant, now_s)
    if purpose is not None:
        query = query.where(files.c.purpose == purpose)
    if after is not None:
        beyond = files.c.number > after if ascending else files.c.number < after
        query = query.where(beyond)
    order = files.c.number if ascending else files.c.number.desc()
    return connection.execute(query.order_by(order).limit(limit)).all()


def find_number(connection: Connection, file_id: str, tenant: str) -> int | None:
    """Where a file of the tenant stands, or stood if it was deleted lately."""
    queries = (
        select(table.c.number).where(table.c.id == file_id, table.c.tenant == tenant)
        for table in (files, gone_files)
    )
    return connection.execute(union_all(*queries).limit(1)).scalar()


def remember_gone(connection: Connection, gone: ColumnElement[bool], now_s: float) -> None:
    """Keep where these files stand, which are about to be deleted, for `find_number`."""
    found = select(files.c.id, files.c.tenant, files.c.number, literal(now_s)).where(gone)
    names = ["id", "tenant", "number", "gone_at_s"]
    connection.execute(insert(gone_files).from_select(names, found))


def forget_gone(connection: Connection, now_s: float) -> None:
    """Nobody goes on with a list after that long."""
    connection.execute(delete(gone_files).where(gone_files.c.gone_at_s < now_s - _REMEMBER_S))


def count_files(connection: Connection, tenant: str) -> tuple[int, int]:
    """How many files a tenant has, and the bytes of them and of what open batches have answered."""
    counts = select(func.count(), func.coalesce(func.sum(files.c.num_bytes), 0))
    found = connection.execute(counts.where(files.c.tenant == tenant, _IS_KEPT)).one()
    num_bytes = func.sum(batches.c.output_bytes + batches.c.error_bytes)
    answered = select(func.coalesce(num_bytes, 0)).where(
        batches.c.tenant == tenant, batches.c.status.in_(_OPEN)
    )
    return int(found[0]), int(found[1]) + int(connection.execute(answered).scalar_one())


def stored_bytes(connection: Connection, tenants: Collection[str]) -> dict[str, int]:
    """Bytes of the files of each of these tenants that has any."""
    query = select(files.c.tenant, func.sum(files.c.num_bytes)).group_by(files.c.tenant)
    found = connection.execute(query.where(files.c.tenant.in_(tenants), _IS_KEPT))
    return {tenant: int(num_bytes) for tenant, num_bytes in found}


def open_batch_of(connection: Connection, file_id: str) -> str | None:
    """Id of a batch that still reads this file, if there is one."""
    query = select(batches.c.id).where(
        batches.c.input_file_id == file_id, batches.c.status.in_(_OPEN)
    )
    return connection.execute(query).scalar()


def delete_file(connection: Connection, file: FileRow, now_s: float) -> None:
    """Nobody sees the file from now on; of its content `delete_records` or `Blobs.delete` rids us.

    Not of records whose file is gone: its batch was retried, and they stand in its next one.
    """
    ours = files.c.number == file.number
    remember_gone(connection, ours & (files.c.expires_at_s != _GONE_AT_S), now_s)
    if file.source not in OUTCOME_OF_SOURCE:
        connection.execute(delete(files).where(ours))
        return
    # Nobody retries the batch meanwhile, nor later without this file.
    batch = select(batches.c.number).where(batches.c.number == file.batch_number)
    connection.execute(batch.with_for_update())
    connection.execute(update(files).where(ours).values(expires_at_s=_GONE_AT_S))


def delete_records(connection: Connection, file: FileRow) -> bool:
    """Delete some records of an output or error file that nobody sees any more, and its row with
    the last; whether any are left.
    """
    ours = (files.c.number == file.number) & (files.c.expires_at_s == _GONE_AT_S)
    # Other servers may be at it too, or be done.
    if connection.execute(select(files.c.number).where(ours).with_for_update()).first() is None:
        return False
    outcome, num_records = OUTCOME_OF_SOURCE[file.source], _records_in(file, _DELETE_BYTES)
    records = (lines.c.batch_number == file.batch_number) & (lines.c.outcome == outcome)
    query = select(lines.c.position).where(records).order_by(lines.c.position).limit(num_records)
    positions = connection.execute(query).scalars().all()
    if positions:
        connection.execute(delete(lines).where(records, lines.c.position <= positions[-1]))
    if len(positions) == num_records:
        return True
    connection.execute(delete(files).where(ours))
    return False


def extend_file(connection: Connection, file_id: str, until_s: float) -> None:
    """Keep an input file at least until its batch ends."""
    connection.execute(
        update(files)
        .where(files.c.id == file_id, files.c.expires_at_s < until_s)
        .values(expires_at_s=until_s)
    )


def expired_files(connection: Connection, now_s: float) -> Sequence[FileRow]:
    """Files whose time is over, by their batches, as which they are locked."""
    query = select(files).where(files.c.expires_at_s <= now_s).order_by(files.c.batch_number)
    return connection.execute(query).all()


def blob_ids(connection: Connection) -> set[str]:
    """Ids of all files whose content is a blob."""
    return set(connection.execute(select(files.c.id).where(files.c.source == "blob")).scalars())


def record_slices(database: Database, file: FileRow) -> Iterator[bytes]:
    """Content of an output or error file: its batch's records, about a megabyte at a time."""
    num_each = min(_records_in(file, _SLICE_BYTES), 2000)
    position = -1
    while True:
        query = (
            select(lines.c.position, lines.c.record)
            .where(
                lines.c.batch_number == file.batch_number,
                lines.c.position > position,
                lines.c.outcome == OUTCOME_OF_SOURCE[file.source],
            )
            .order_by(lines.c.position)
            .limit(num_each)
        )
        with database.read() as connection:
            found = connection.execute(query).all()
        if not found:
            return
        position = found[-1].position
        yield b"".join(row.record + b"\n" for row in found)


def _records_in(file: FileRow, num_bytes: int) -> int:
    return max(1, num_bytes * int(file.num_lines) // max(1, int(file.num_bytes)))


def _visible(tenant: str, now_s: float) -> Select[Any]:
    is_alive = or_(files.c.expires_at_s.is_(None), files.c.expires_at_s > now_s)
    return select(files).where(files.c.tenant == tenant, is_alive)
