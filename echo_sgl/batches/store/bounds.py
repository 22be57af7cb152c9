"""What keeps a tenant's part of the store bounded: one change at a time, and an end to old rows."""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, select

from echo_sgl.batches.store.batch_rows import TERMINAL
from echo_sgl.batches.store.schema import batches, files, lines, ranges

# Any constant will do, as long as all servers of a fleet use the same.
_TENANT_LOCK = 0x6563686F
_MAX_FORGOTTEN = 100


def lock_tenant(connection: Connection, tenant: str) -> None:
    """Until the transaction ends, no other one counts what this tenant has and adds to it.

    On SQLite there is one writer at a time anyway.
    """
    if connection.dialect.name == "postgresql":
        key = func.hashtext(tenant)
        connection.execute(select(func.pg_advisory_xact_lock(_TENANT_LOCK, key)))


def forget_batches(connection: Connection, tenant: str, before_s: float) -> None:
    """Delete batches that ended before then and whose results are gone; not all at once."""
    ended_at_s = func.coalesce(
        batches.c.completed_at_s,
        batches.c.failed_at_s,
        batches.c.expired_at_s,
        batches.c.cancelled_at_s,
    )
    has_results = select(files.c.number).where(files.c.batch_number == batches.c.number).exists()
    query = (
        select(batches.c.number)
        .where(batches.c.tenant == tenant, batches.c.status.in_(TERMINAL))
        .where(ended_at_s < before_s, ~has_results)
        .limit(_MAX_FORGOTTEN)
    )
    numbers = connection.execute(query).scalars().all()
    for column in (lines.c.batch_number, ranges.c.batch_number, batches.c.number):
        connection.execute(delete(column.table).where(column.in_(numbers)))
