"""Lines as work: put in, claimed by a server, recorded once.

A server claims a contiguous range of positions, which is a range of the prompts' prefix tree, so
lines that share a prefix stay on one server. The result of a line and its state are written
together, and only if nobody wrote them before.

A range whose owner is dead holds what may have killed it: its lines count one crash more, and are
claimed in fewer at a time (`max_together`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    Connection,
    Row,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from echo_sgl.batches.dispatch.window import MAX_CRASHES, max_together
from echo_sgl.batches.lines.replies import Usage
from echo_sgl.batches.store.batch_rows import end_lines_if_done, lock_batch
from echo_sgl.batches.store.schema import COMPLETED, FAILED, batches, lines, ranges, servers

FORGET_AFTER_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Span:
    """Positions `start` to `end` (not included) of one batch."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """A line that is to be sent, and where its request stands in the input file."""

    position: int
    custom_id: str
    offset_bytes: int
    num_bytes: int
    tokens: int
    num_crashes: int


@dataclass(frozen=True, slots=True)
class Result:
    """What becomes of a line: its record for the output or the error file."""

    position: int
    is_ok: bool
    record: bytes
    usage: Usage = field(default_factory=Usage)


def insert_lines(connection: Connection, number: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add lines of a batch that is being validated."""
    if rows:
        connection.execute(insert(lines), [{"batch_number": number, **row} for row in rows])


def delete_lines(connection: Connection, number: int) -> None:
    """Forget what an earlier validation, cut short, has put in."""
    connection.execute(delete(lines).where(lines.c.batch_number == number))


def claim_lines(
    connection: Connection,
    number: int,
    owner: str,
    live: set[str],
    *,
    near: int | None,
    max_lines: int,
    max_bytes: int,
    now_s: float,
) -> tuple[Span, list[WaitingLine]] | None:
    """Take the next waiting lines of a batch, in prefix order; None when none is free.

    `near` is where this server's last claim of the batch ended. `max_bytes` bounds the requests'
    size; one line is always given.
    """
    batch = lock_batch(connection, number)
    if batch.status != "in_progress" or batch.paused_at_s is not None:
        return None
    found = connection.execute(select(ranges).where(ranges.c.batch_number == number)).all()
    taken = [row for row in found if row.owner in live]
    free = [Span(row.start, row.end) for row in found if row.owner not in live]
    has_others = any(row.owner != owner for row in taken)
    _count_crashes(connection, number, [row for row in found if row.owner not in {None, *live}])
    while free:
        start = choose_start(free, near=near, has_others=has_others, max_lines=max_lines)
        whole = next(span for span in free if span.start <= start < span.end)
        waiting = _waiting(connection, number, Span(start, whole.end), max_lines, max_bytes)
        claimed = Span(start, waiting[-1].position + 1 if waiting else whole.end)
        _replace(connection, number, whole, claimed, owner if waiting else None)
        if waiting:
            return claimed, waiting
        free.remove(whole)
        free += [Span(whole.start, start)] if start > whole.start else []
    end_lines_if_done(connection, number, now_s)
    return None


def choose_start(
    free: Sequence[Span], *, near: int | None, has_others: bool, max_lines: int
) -> int:
    """Where to go on: at the end of the last claim; else far away from where others work."""
    if near is not None and any(span.start == near for span in free):
        return near
    largest = max(free, key=lambda span: (len(span), -span.start))
    if has_others and len(largest) >= 2 * max_lines:
        return largest.start + len(largest) // 2
    return largest.start


def note_last_try(connection: Connection, number: int, position: int, *, is_sent: bool) -> None:
    """Say before a line is sent alone that it is, and when it was survived, that it is not.

    A server that dies in between leaves the line with `MAX_CRASHES`: it is to blame.
    """
    connection.execute(
        update(lines)
        .where(lines.c.batch_number == number, lines.c.position == position)
        .where(lines.c.outcome.is_(None))
        .values(crashes=MAX_CRASHES if is_sent else MAX_CRASHES - 1)
    )


def record_results(
    connection: Connection,
    number: int,
    owner: str,
    results: Sequence[Result],
    *,
    done: Iterable[Span] = (),
    now_s: float,
) -> int:
    """Write results and let go of ranges that are `done`; how many results were new."""
    lock_batch(connection, number)
    fresh = _without_record(connection, number, results)
    _write(connection, number, fresh)
    release_spans(connection, number, owner, done, is_done=True)
    end_lines_if_done(connection, number, now_s)
    return len(fresh)


def release_spans(
    connection: Connection, number: int, owner: str, spans: Iterable[Span], *, is_done: bool = False
) -> None:
    """Let go of claimed ranges: for good when they are done, else for whoever comes next."""
    spans = list(spans)
    starts = [span.start for span in spans]
    if not starts:
        return
    ours = (
        (ranges.c.batch_number == number) & ranges.c.start.in_(starts) & (ranges.c.owner == owner)
    )
    if is_done:
        connection.execute(delete(ranges).where(ours))
        return
    connection.execute(update(ranges).where(ours).values(owner=None))
    held = or_(
        *(and_(lines.c.position >= span.start, lines.c.position < span.end) for span in spans)
    )
    not_sent = (lines.c.batch_number == number) & held & lines.c.outcome.is_(None)
    to_blame = not_sent & (lines.c.crashes >= MAX_CRASHES)
    connection.execute(update(lines).where(to_blame).values(crashes=MAX_CRASHES - 1))


def unanswered(
    connection: Connection, number: int, *, after: int, limit: int
) -> Sequence[tuple[int, str]]:
    """Position and custom_id of lines behind position `after` that have no record."""
    query = (
        select(lines.c.position, lines.c.custom_id)
        .where(lines.c.batch_number == number, lines.c.position > after, lines.c.outcome.is_(None))
        .order_by(lines.c.position)
        .limit(limit)
    )
    return [(row.position, row.custom_id) for row in connection.execute(query)]


def renew_lease(connection: Connection, server: str, until_s: float) -> None:
    """Say that a server is alive until then."""
    ours = servers.c.id == server
    changed = connection.execute(update(servers).where(ours).values(lease_until_s=until_s))
    if not changed.rowcount:
        connection.execute(insert(servers).values(id=server, lease_until_s=until_s))
        long_dead = servers.c.lease_until_s < until_s - FORGET_AFTER_S
        connection.execute(delete(servers).where(long_dead))


def live_servers(connection: Connection, now_s: float) -> set[str]:
    """Ids of the servers whose lease runs."""
    query = select(servers.c.id).where(servers.c.lease_until_s > now_s)
    return set(connection.execute(query).scalars())


def forget_servers(connection: Connection, server: str | None = None) -> None:
    """End the lease of one server, or of all: nobody else can be alive on a private database."""
    query = delete(servers)
    connection.execute(query if server is None else query.where(servers.c.id == server))


def last_seen_s(connection: Connection) -> float:
    """The latest time that this database knows of."""
    times = [
        connection.execute(select(func.max(column))).scalar()
        for column in (batches.c.created_at_s, batches.c.in_progress_at_s)
    ]
    return max((value for value in times if value is not None), default=0.0)


def _waiting(
    connection: Connection, number: int, span: Span, max_lines: int, max_bytes: int
) -> list[WaitingLine]:
    query = (
        select(
            lines.c.position,
            lines.c.custom_id,
            lines.c.offset_bytes,
            lines.c.num_bytes,
            lines.c.tokens,
            lines.c.crashes,
        )
        .where(
            lines.c.batch_number == number,
            lines.c.position >= span.start,
            lines.c.position < span.end,
            lines.c.outcome.is_(None),
        )
        .order_by(lines.c.position)
        .limit(max_lines)
    )
    found: list[WaitingLine] = []
    num_bytes = 0
    for row in connection.execute(query):
        num_bytes += row.num_bytes
        if found and (num_bytes > max_bytes or not _goes_with(found, row.crashes, max_lines)):
            break
        found.append(WaitingLine(*row))
    return found


def _goes_with(found: Sequence[WaitingLine], num_crashes: int, max_lines: int) -> bool:
    """Suspects are claimed by themselves, no more than may be sent together."""
    suspicion = found[0].num_crashes
    return num_crashes == suspicion and len(found) < max_together(suspicion, max_lines)


def _count_crashes(connection: Connection, number: int, lost: Sequence[Row[Any]]) -> None:
    """Take ranges from servers that died. The last crash is counted by `note_last_try` alone."""
    for row in lost:
        connection.execute(
            update(lines)
            .where(lines.c.batch_number == number, lines.c.outcome.is_(None))
            .where(lines.c.position >= row.start, lines.c.position < row.end)
            .where(lines.c.crashes < MAX_CRASHES - 1)
            .values(crashes=lines.c.crashes + 1)
        )
        ours = (ranges.c.batch_number == number) & (ranges.c.start == row.start)
        connection.execute(update(ranges).where(ours).values(owner=None))


def _replace(
    connection: Connection, number: int, whole: Span, claimed: Span, owner: str | None
) -> None:
    """Cut a claim out of a free range; what holds no waiting line (`owner` None) goes."""
    connection.execute(
        delete(ranges).where(ranges.c.batch_number == number, ranges.c.start == whole.start)
    )
    parts = [
        (Span(whole.start, claimed.start), None),
        (claimed if owner else Span(0, 0), owner),
        (Span(claimed.end, whole.end), None),
    ]
    rows = [
        {"batch_number": number, "start": span.start, "end": span.end, "owner": who}
        for span, who in parts
        if len(span)
    ]
    if rows:
        connection.execute(insert(ranges), rows)


def _without_record(connection: Connection, number: int, results: Sequence[Result]) -> list[Result]:
    query = select(lines.c.position).where(
        lines.c.batch_number == number,
        lines.c.position.in_([result.position for result in results]),
        lines.c.outcome.is_(None),
    )
    waiting = set(connection.execute(query).scalars())
    return [result for result in results if result.position in waiting]


def _write(connection: Connection, number: int, results: Sequence[Result]) -> None:
    if not results:
        return
    connection.execute(
        update(lines)
        .where(lines.c.batch_number == number, lines.c.position == bindparam("place"))
        .values(outcome=bindparam("result"), record=bindparam("content")),
        [
            {
                "place": result.position,
                "result": COMPLETED if result.is_ok else FAILED,
                "content": result.record,
            }
            for result in results
        ],
    )
    sums = _sums(results)
    connection.execute(
        update(batches)
        .where(batches.c.number == number)
        .values({name: batches.c[name] + value for name, value in sums.items()})
    )


def _sums(results: Sequence[Result]) -> dict[str, int]:
    answered = [result for result in results if result.is_ok]
    refused = [result for result in results if not result.is_ok]
    usages = [result.usage for result in results]
    return {
        "completed": len(answered),
        "failed": len(refused),
        "output_bytes": sum(len(result.record) + 1 for result in answered),
        "error_bytes": sum(len(result.record) + 1 for result in refused),
        "input_tokens": sum(usage.prompt_tokens for usage in usages),
        "cached_tokens": sum(usage.cached_tokens or 0 for usage in usages),
        "output_tokens": sum(usage.generated_tokens for usage in usages),
        "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages),
    }


def owned_ranges(connection: Connection, owner: str) -> Sequence[tuple[int, Span]]:
    """Every range that a server has claimed, with the number of its batch."""
    query = select(ranges).where(ranges.c.owner == owner)
    return [(row.batch_number, Span(row.start, row.end)) for row in connection.execute(query)]
