"""Rows of the table `batches`, and each step from one of OpenAI's eight states to the next.

    validating -> in_progress -> finalizing -> completed | expired
        |             |
        +-> failed    +-> cancelling -> cancelled          (validating -> cancelling too)

A step is one transaction that looks at the state first, so that two of them cannot both happen.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, case, delete, func, insert, literal, or_, select, update

from echo_sgl.batches.dispatch.window import MAX_CRASHES
from echo_sgl.batches.store.files import extend_file, new_file_id, remember_gone
from echo_sgl.batches.store.schema import FAILED, batches, files, lines, ranges

TERMINAL = ("failed", "completed", "expired", "cancelled")
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
RETRYABLE = ("completed", "expired", "cancelled")
BatchRow = Row[Any]


def insert_batch(connection: Connection, **values: Any) -> BatchRow:
    """Add a batch that is to be validated."""
    batch_id = f"batch_{secrets.token_hex(16)}"
    connection.execute(insert(batches).values(id=batch_id, status="validating", **values))
    extend_file(connection, values["input_file_id"], values["expires_at_s"])
    return connection.execute(select(batches).where(batches.c.id == batch_id)).one()


def find_batch(
    connection: Connection, batch_id: str, tenant: str, *, to_change: bool = False
) -> BatchRow | None:
    """The tenant's batch of that id; `to_change` locks it until the transaction ends."""
    query = select(batches).where(batches.c.id == batch_id, batches.c.tenant == tenant)
    return connection.execute(query.with_for_update() if to_change else query).first()


def lock_batch(connection: Connection, number: int) -> BatchRow:
    """The batch, which nobody else changes until the transaction ends."""
    query = select(batches).where(batches.c.number == number)
    return connection.execute(query.with_for_update()).one()


def list_batches(
    connection: Connection, tenant: str, *, after: BatchRow | None, limit: int
) -> Sequence[BatchRow]:
    """One page of the tenant's batches, newest first."""
    query = select(batches).where(batches.c.tenant == tenant)
    if after is not None:
        query = query.where(batches.c.number < after.number)
    return connection.execute(query.order_by(batches.c.number.desc()).limit(limit)).all()


def open_batches(connection: Connection) -> Sequence[BatchRow]:
    """All batches of all tenants that have not ended, oldest first."""
    query = select(batches).where(batches.c.status.in_(OPEN)).order_by(batches.c.number)
    return connection.execute(query).all()


def count_open(connection: Connection, tenant: str) -> int:
    query = select(func.count()).where(batches.c.tenant == tenant, batches.c.status.in_(OPEN))
    return int(connection.execute(query).scalar_one())


def num_waiting_lines(connection: Connection) -> int:
    """Lines of all open batches without a result; of files not yet validated, line ends."""
    left = batches.c.total - batches.c.completed - batches.c.failed
    known = select(func.coalesce(func.sum(left), 0)).where(batches.c.status == "in_progress")
    unread = select(func.coalesce(func.sum(files.c.num_lines), 0)).where(
        files.c.id == batches.c.input_file_id, batches.c.status == "validating"
    )
    return sum(int(connection.execute(query).scalar_one()) for query in (known, unread))


def try_hold(
    connection: Connection, number: int, owner: str, statuses: Sequence[str] = ("validating",)
) -> bool:
    """Whether `owner` still has this batch to validate, or end; then until the transaction ends."""
    query = select(batches.c.number).where(
        batches.c.number == number, batches.c.status.in_(statuses), batches.c.owner == owner
    )
    return connection.execute(query.with_for_update()).first() is not None


def fail_batch(
    connection: Connection, number: int, errors: Sequence[Mapping[str, Any]], now_s: float
) -> None:
    """validating -> failed, unless it was cancelled meanwhile."""
    is_failed = _step(
        connection,
        number,
        ("validating",),
        status="failed",
        errors=list(errors),
        failed_at_s=now_s,
        owner=None,
        paused_at_s=None,
    )
    if is_failed:
        connection.execute(delete(lines).where(lines.c.batch_number == number))


def start_batch(
    connection: Connection,
    number: int,
    *,
    total: int,
    model: str | None,
    models: Sequence[str],
    now_s: float,
) -> None:
    """validating -> in_progress, unless it was cancelled meanwhile.

    `model` is the one that is shown, `models` are all that a server must have for it.
    """
    is_started = _step(
        connection,
        number,
        ("validating",),
        status="in_progress",
        in_progress_at_s=now_s,
        total=total,
        model=model,
        models=list(models),
        owner=None,
    )
    if is_started:
        connection.execute(insert(ranges).values(batch_number=number, start=0, end=total))


def cancel_batch(connection: Connection, number: int, now_s: float) -> None:
    """validating or in_progress -> cancelling."""
    _step(
        connection,
        number,
        ("validating", "in_progress"),
        status="cancelling",
        ends_as="cancelled",
        cancelling_at_s=now_s,
    )


def expire_batches(connection: Connection, now_s: float) -> int:
    """Batches whose window is over -> finalizing, to end as expired; how many."""
    changed = connection.execute(
        update(batches)
        .where(batches.c.status.in_(("validating", "in_progress")), batches.c.expires_at_s <= now_s)
        .values(status="finalizing", ends_as="expired", finalizing_at_s=now_s)
    )
    return changed.rowcount


def end_lines_if_done(connection: Connection, number: int, now_s: float) -> None:
    """in_progress -> finalizing once no range of lines is left."""
    left = select(func.count()).where(ranges.c.batch_number == number)
    if connection.execute(left).scalar_one() == 0:
        _step(
            connection,
            number,
            ("in_progress",),
            status="finalizing",
            ends_as="completed",
            finalizing_at_s=now_s,
        )


def finish_batch(
    connection: Connection, number: int, now_s: float, *, output_days: float
) -> BatchRow:
    """finalizing -> completed or expired, cancelling -> cancelled; makes the files visible."""
    batch = lock_batch(connection, number)
    if batch.status not in ("finalizing", "cancelling"):
        return batch
    lifetime_s = batch.output_expires_s or output_days * 86_400.0
    output = _add_output(connection, batch, "completed", now_s, lifetime_s)
    errors = _add_output(connection, batch, "failed", now_s, lifetime_s)
    connection.execute(delete(ranges).where(ranges.c.batch_number == number))
    connection.execute(
        update(batches)
        .where(batches.c.number == number)
        .values(
            {
                "status": batch.ends_as,
                f"{batch.ends_as}_at_s": now_s,
                "owner": None,
                "paused_at_s": None,
                "output_file_id": output,
                "error_file_id": errors,
            }
        )
    )
    return lock_batch(connection, number)


def set_paused(connection: Connection, number: int, paused_at_s: float | None) -> None:
    connection.execute(
        update(batches).where(batches.c.number == number).values(paused_at_s=paused_at_s)
    )


def reopen_batch(connection: Connection, batch: BatchRow, now_s: float) -> None:
    """A batch that ended -> in_progress with its failed lines to do again, in a new window.

    Its files go, because together they would hold lines that are not answered yet; the answers
    stay and stand in the new output file. A line that killed its server is sent alone once more.
    """
    ours = lines.c.batch_number == batch.number
    failed = ours & (lines.c.outcome == FAILED)
    span = select(func.min(lines.c.position), func.max(lines.c.position)).where(failed)
    first, last = connection.execute(span).one()
    to_blame = failed & (lines.c.crashes >= MAX_CRASHES)
    connection.execute(update(lines).where(to_blame).values(crashes=MAX_CRASHES - 1))
    connection.execute(update(lines).where(failed).values(outcome=None, record=None))
    connection.execute(insert(ranges).values(batch_number=batch.number, start=first, end=last + 1))
    results = files.c.batch_number == batch.number
    remember_gone(connection, results, now_s)
    connection.execute(delete(files).where(results))
    expires_at_s = now_s + batch.completion_window_s
    extend_file(connection, batch.input_file_id, expires_at_s)
    ended = ("finalizing", "completed", "expired", "cancelling", "cancelled")
    connection.execute(
        update(batches)
        .where(batches.c.number == batch.number)
        .values(
            {f"{name}_at_s": None for name in ended}
            | {"status": "in_progress", "in_progress_at_s": now_s, "expires_at_s": expires_at_s}
            | {"ends_as": None, "failed": 0, "error_bytes": 0}
            | {"output_file_id": None, "error_file_id": None}
        )
    )


def claim_batch(
    connection: Connection,
    owner: str,
    live: set[str],
    statuses: Sequence[str],
    *,
    but_not: Collection[int] = (),
    turns: Mapping[str, int] | None = None,
) -> BatchRow | None:
    """Take the oldest batch in one of these states that no live server works on.

    `but_not` are numbers of batches that are left where they are; `turns` says of tenants when
    they had theirs, the lowest goes first and 0 is everybody else's. A batch that ends is free
    only when every server has let go of its lines.
    """
    turn = case(turns, value=batches.c.tenant, else_=0) if turns else literal(0)
    query = (
        select(batches)
        .where(
            batches.c.status.in_(statuses),
            batches.c.number.not_in(but_not),
            or_(batches.c.owner.is_(None), batches.c.owner.not_in(live)),
            ~select(ranges.c.start)
            .where(ranges.c.batch_number == batches.c.number, ranges.c.owner.in_(live))
            .exists(),
        )
        .order_by(turn, batches.c.number)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    batch = connection.execute(query).first()
    if batch is not None:
        connection.execute(
            update(batches).where(batches.c.number == batch.number).values(owner=owner)
        )
    return batch


def release_batch(connection: Connection, number: int, owner: str) -> None:
    """Let others have a batch whose validation or end did not work out."""
    ours = (batches.c.number == number) & (batches.c.owner == owner)
    connection.execute(update(batches).where(ours).values(owner=None))


def _add_output(
    connection: Connection, batch: BatchRow, source: str, now_s: float, lifetime_s: float
) -> str | None:
    """Add the output or error file; None when it would hold no line."""
    num_lines = batch.completed if source == "completed" else batch.failed
    if not num_lines:
        return None
    file_id = new_file_id()
    name = "output" if source == "completed" else "error"
    connection.execute(
        insert(files).values(
            id=file_id,
            tenant=batch.tenant,
            purpose="batch_output",
            filename=f"{batch.id}_{name}.jsonl",
            num_bytes=batch.output_bytes if source == "completed" else batch.error_bytes,
            num_lines=num_lines,
            created_at_s=now_s,
            expires_at_s=now_s + lifetime_s,
            source=source,
            batch_number=batch.number,
        )
    )
    return file_id


def _step(connection: Connection, number: int, allowed: Sequence[str], **values: Any) -> bool:
    is_allowed = (batches.c.number == number) & batches.c.status.in_(allowed)
    return connection.execute(update(batches).where(is_allowed).values(**values)).rowcount == 1
