"""A batch that this server works on: its claimed lines, and which ranges of them are done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from echo_sgl.batches.fairness import JobLoad
from echo_sgl.batches.line_engine import request_head
from echo_sgl.batches.lines import LineError, parse_line
from echo_sgl.batches.replies import (
    Reply,
    Verdict,
    crashed_record,
    output_record,
    unanswered_record,
)
from echo_sgl.batches.store import work
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.work import Result, Span, WaitingLine
from echo_sgl.batches.window import MAX_CRASHES


@dataclass(slots=True)
class Line:
    """A claimed line: `head` is its request without id, `span` the range it was claimed in."""

    position: int
    custom_id: str
    head: bytes
    tokens: int
    span: Span
    num_crashes: int = 0
    num_broken: int = 0
    num_refused: int = 0

    @property
    def is_last_try(self) -> bool:
        """Whether the line is to blame when the server dies with it, alone as it is, once more."""
        return self.num_crashes >= MAX_CRASHES - 1

    def record(self, reply: Reply) -> bytes:
        """What stands in the output or error file for this reply."""
        if reply.status_code < 400 and reply.verdict is not Verdict.ANSWERED:
            # The engine gave up a request that nobody cancelled: no HTTP error to show.
            return unanswered_record(self.custom_id, "request_aborted", reply.reason)
        return output_record(self.custom_id, reply)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one look into the store gave: lines to send, and results of unreadable ones."""

    span: Span
    lines: Sequence[Line]
    results: Sequence[Result]


@dataclass(slots=True)
class ActiveJob:
    """One open batch. `is_dropped` means: send nothing more; `is_aborted`: nor keep answers."""

    number: int
    batch_id: str
    url: str
    input_file_id: str
    deadline_s: float
    window_s: float
    lines_left: int
    pending: deque[Line] = field(default_factory=deque)
    in_flight: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    left_in_span: dict[Span, int] = field(default_factory=dict)
    tokens_in_flight: int = 0
    num_unrecorded: int = 0
    near: int | None = None
    is_claiming: bool = False
    is_exhausted: bool = False
    is_dropped: bool = False
    is_aborted: bool = False

    @classmethod
    def of_row(cls, batch: BatchRow) -> ActiveJob:
        return cls(
            number=batch.number,
            batch_id=batch.id,
            url=batch.endpoint,
            input_file_id=batch.input_file_id,
            deadline_s=batch.expires_at_s,
            window_s=batch.completion_window_s,
            lines_left=batch.total - batch.completed - batch.failed,
        )

    @property
    def load(self) -> JobLoad:
        return JobLoad(
            self.number, self.deadline_s, self.window_s, self.lines_left, self.tokens_in_flight
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is in the engine, on its way to disk, or being claimed."""
        return not (self.in_flight or self.num_unrecorded or self.is_claiming)

    def is_low(self, window_lines: int) -> bool:
        """Whether to claim ahead; not beside suspects, which a crash would suspect even more."""
        if self.pending and self.pending[-1].num_crashes:
            return False
        return 2 * len(self.pending) < window_lines

    def add(self, claim: Claim) -> None:
        self.near = claim.span.end
        self.left_in_span[claim.span] = len(claim.lines) + len(claim.results)
        self.pending.extend(claim.lines)

    def count_done(self, spans: Iterable[Span]) -> list[Span]:
        """Count one result in each given span; the spans that are done by it."""
        done = []
        for span in spans:
            self.left_in_span[span] -= 1
            if not self.left_in_span[span]:
                del self.left_in_span[span]
                done.append(span)
        return done


def claim_lines(store: JobStore, job: ActiveJob, *, max_lines: int, max_bytes: int) -> Claim | None:
    """Claim the job's next lines and read their requests; blocks on database and disk."""
    with store.database.write() as connection:
        live = work.live_servers(connection, store.clock())
        found = work.claim_lines(
            connection,
            job.number,
            store.server_id,
            live | {store.server_id},
            near=job.near,
            max_lines=max_lines,
            max_bytes=max_bytes,
            now_s=store.clock(),
        )
    if found is None:
        return None
    span, waiting = found
    try:
        contents = _contents(store, job, waiting)
    except BaseException:
        with store.database.write() as connection:
            work.release_spans(connection, job.number, store.server_id, [span])
        raise
    lines, results = [], []
    for item, content in zip(waiting, contents, strict=True):
        try:
            if item.num_crashes < MAX_CRASHES:
                lines.append(_line(item, content, span))
            else:
                results.append(_crashed(item))
        except (LineError, ValueError):
            results.append(_unreadable(item))
    return Claim(span, lines, results)


def _contents(store: JobStore, job: ActiveJob, waiting: Sequence[WaitingLine]) -> list[bytes]:
    """The lines as they stand in the input file; empty ones when it is gone."""
    places = [(line.offset_bytes, line.num_bytes) for line in waiting]
    try:
        return store.blobs.read(job.input_file_id, places)
    except FileNotFoundError:
        return [b""] * len(waiting)


def _line(item: WaitingLine, content: bytes, span: Span) -> Line:
    line = parse_line(content)
    if line.custom_id != item.custom_id:
        raise ValueError("another line stands there")
    head = request_head(line)
    return Line(item.position, item.custom_id, head, item.tokens, span, item.num_crashes)


def _crashed(item: WaitingLine) -> Result:
    return Result(item.position, is_ok=False, record=crashed_record(item.custom_id))


def _unreadable(item: WaitingLine) -> Result:
    message = "the line cannot be read any more: the stored input file was damaged or removed"
    record = unanswered_record(item.custom_id, "input_damaged", message)
    return Result(item.position, is_ok=False, record=record)
