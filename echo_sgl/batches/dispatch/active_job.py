"""A batch that this server works on: its claimed lines, and which ranges of them are done."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from echo_sgl.batches.dispatch.fairness import JobLoad
from echo_sgl.batches.dispatch.line_engine import request_head, takes_rid, with_rid, without_rid
from echo_sgl.batches.dispatch.refusals import Tries
from echo_sgl.batches.dispatch.window import MAX_CRASHES, Pace, Weight
from echo_sgl.batches.lines.job_line import parse_line, shortened, too_many_answers
from echo_sgl.batches.lines.model_names import is_served
from echo_sgl.batches.lines.replies import (
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

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Hold:
    """One claim of a range, and how many of its lines have no written result yet.

    A range that another server took and gave back may be claimed again: that is another hold.
    """

    span: Span
    num_left: int


@dataclass(slots=True)
class Line:
    """A claimed line: `head` is its request without id, `hold` the claim that it came with.

    `number` is its job's `Pace`'s, of its last try.
    """

    position: int
    custom_id: str
    head: bytes
    tokens: int
    hold: Hold
    num_requests: int = 1
    num_crashes: int = 0
    num_broken: int = 0
    number: int = 0
    takes_rid: bool = True
    tries: Tries = field(default_factory=Tries)

    def request(self, rid: str) -> bytes:
        """What is sent, under this id where it can have one."""
        return with_rid(self.head, rid) if self.takes_rid else without_rid(self.head)

    @property
    def weight(self) -> Weight:
        return Weight(self.tokens, self.num_requests, self.num_crashes)

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
    """What one look into the store gave: lines to send, and results of those that cannot be."""

    hold: Hold
    lines: Sequence[Line]
    results: Sequence[Result]


@dataclass(slots=True)
class ActiveJob:
    """One open batch, whose `holds` are found by where their ranges start.

    `model_names` are the ones to send for models that go by another, as they were when it was taken
    up: an adapter that is gone since is refused under its full name, the base does not answer.
    A line of more than `max_requests` is not sent: see `too_many_answers`.
    `refused_since_s`: when the server began to refuse all of its lines, in Unix seconds.
    `is_dropped` means: send nothing more for now; `is_aborted`: never again, nor keep failures.
    """

    number: int
    batch_id: str
    url: str
    input_file_id: str
    deadline_s: float
    window_s: float
    lines_left: int
    model_names: Mapping[str, str] = field(default_factory=dict)
    max_requests: int | None = None
    pending: deque[Line] = field(default_factory=deque)
    in_flight: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    holds: dict[int, Hold] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    pending_bytes: int = 0
    sent_tokens: int = 0
    num_unrecorded: int = 0
    near: int | None = None
    refused_since_s: float | None = None
    is_claiming: bool = False
    is_exhausted: bool = False
    is_dropped: bool = False
    is_aborted: bool = False

    @classmethod
    def of_row(
        cls, batch: BatchRow, model_names: Mapping[str, str], max_requests: int | None = None
    ) -> ActiveJob:
        return cls(
            number=batch.number,
            batch_id=batch.id,
            url=batch.endpoint,
            input_file_id=batch.input_file_id,
            deadline_s=batch.expires_at_s,
            window_s=batch.completion_window_s,
            lines_left=batch.total - batch.completed - batch.failed,
            model_names=model_names,
            max_requests=max_requests,
        )

    @property
    def load(self) -> JobLoad:
        return JobLoad(
            self.number, self.deadline_s, self.window_s, self.lines_left, self.sent_tokens
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is in the engine, on its way to disk, or being claimed."""
        return not (self.in_flight or self.num_unrecorded or self.is_claiming)

    @property
    def may_send(self) -> bool:
        """Whether it has a line that may go now, if the window takes it."""
        if self.is_dropped or not self.pending:
            return False
        return self.pace.fits(self.pending[0].num_requests)

    def is_low(self, window_lines: int) -> bool:
        """Whether to claim ahead; not beside suspects, which a crash would suspect even more."""
        if self.pending and self.pending[-1].num_crashes:
            return False
        return 2 * len(self.pending) < window_lines

    def add(self, claim: Claim) -> None:
        self.near = claim.hold.span.end
        self.holds[claim.hold.span.start] = claim.hold
        self.pending.extend(claim.lines)
        self.pending_bytes += sum(len(line.head) for line in claim.lines)

    def take_line(self) -> Line:
        """The next line to send."""
        line = self.pending.popleft()
        self.pending_bytes -= len(line.head)
        return line

    def put_back(self, line: Line) -> None:
        """Send a line again, before all others."""
        self.pending.appendleft(line)
        self.pending_bytes += len(line.head)

    def forget_lines(self) -> None:
        self.pending.clear()
        self.pending_bytes = 0

    def done_with(self, holds: Iterable[Hold]) -> list[Span]:
        """Ranges that are done when one result more in each of these holds is written.

        Not those of which another claim is held now: its lines are counted by themselves.
        """
        return [
            hold.span
            for hold, num_results in Counter(holds).items()
            if hold.num_left == num_results and self.holds.get(hold.span.start) is hold
        ]

    def count_written(self, hold: Hold) -> None:
        """The result of one line of `hold` is on disk."""
        self.lines_left -= 1
        self.num_unrecorded -= 1
        hold.num_left -= 1
        if not hold.num_left and self.holds.get(hold.span.start) is hold:
            del self.holds[hold.span.start]


def claim_lines(store: JobStore, job: ActiveJob, *, max_lines: int, max_bytes: int) -> Claim | None:
    """Claim the job's next lines and read their requests; blocks on database and disk."""
    with store.database.write() as connection:
        found = work.claim_lines(
            connection,
            job.number,
            store.server_id,
            store.peers.live(connection, store.clock()),
            near=job.near,
            max_lines=max_lines,
            max_bytes=max_bytes,
            now_s=store.clock(),
        )
    if found is None:
        return None
    span, waiting = found
    hold = Hold(span, len(waiting))
    try:
        contents = _contents(store, job, waiting)
        pairs = zip(waiting, contents, strict=True)
        prepared = [_prepare(job, item, content, hold) for item, content in pairs]
    except BaseException:
        with store.database.write() as connection:
            work.release_spans(connection, job.number, store.server_id, [span])
        raise
    lines = [item for item in prepared if isinstance(item, Line)]
    return Claim(hold, lines, [item for item in prepared if isinstance(item, Result)])


def _contents(store: JobStore, job: ActiveJob, waiting: Sequence[WaitingLine]) -> list[bytes]:
    """The lines as they stand in the input file; empty ones when it is gone."""
    places = [(line.offset_bytes, line.num_bytes) for line in waiting]
    try:
        return store.blobs.read(job.input_file_id, places)
    except FileNotFoundError:
        return [b""] * len(waiting)


def _prepare(job: ActiveJob, item: WaitingLine, content: bytes, hold: Hold) -> Line | Result:
    """The line, or the result of one that is not to be sent or cannot be."""
    try:
        return _line(job, item, content, hold) if item.num_crashes < MAX_CRASHES else _crashed(item)
    except ValueError:
        return _unreadable(item)
    except Exception as error:
        logger.exception("line %s cannot be prepared for the engine", item.custom_id)
        return fault_result(item.position, item.custom_id, error)


def _line(job: ActiveJob, item: WaitingLine, content: bytes, hold: Hold) -> Line | Result:
    line = parse_line(content)
    if line.custom_id != item.custom_id:
        raise ValueError("another line stands there")
    if job.model_names and not is_served(line.model, job.model_names):
        return _not_served(item, line.model)
    if error := too_many_answers(line, job.max_requests):  # checked by a server with more room
        return _failed(item, error.code, str(error))
    return Line(
        item.position,
        item.custom_id,
        request_head(line, job.model_names),
        item.tokens,
        hold,
        line.num_requests,
        item.num_crashes,
        takes_rid=takes_rid(line),
    )


def _crashed(item: WaitingLine) -> Result:
    return Result(item.position, is_ok=False, record=crashed_record(item.custom_id))


def _not_served(item: WaitingLine, model: str) -> Result:
    """Only of a batch that was checked before all of its models were kept; SGLang would answer."""
    message = (
        f"body.model is {shortened(repr(model))}, which the server that took the line does not "
        "have. Hand the line over in a new batch: that is left to servers that have all its models"
    )
    return _failed(item, "model_not_found", message)


def _unreadable(item: WaitingLine) -> Result:
    message = "the line cannot be read any more: the stored input file was damaged or removed"
    return _failed(item, "input_damaged", message)


def _failed(item: WaitingLine, code: str, message: str) -> Result:
    record = unanswered_record(item.custom_id, code, message)
    return Result(item.position, is_ok=False, record=record)


def fault_result(position: int, custom_id: str, error: Exception) -> Result:
    """The result of a line on which the batch service itself failed; the log says more."""
    message = (
        f"an error of the batch service on this line ({type(error).__name__}); the server's log "
        "says more. Retry the batch once it is mended"
    )
    record = unanswered_record(custom_id, "internal_error", message)
    return Result(position, is_ok=False, record=record)
