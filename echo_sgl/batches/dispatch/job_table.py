"""The batches that this server works on, and the ranges of their lines that are its own."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from echo_sgl.batches.dispatch.active_job import ActiveJob
from echo_sgl.batches.dispatch.fairness import Applicant, choose_active
from echo_sgl.batches.dispatch.line_engine import LineEngine
from echo_sgl.batches.dispatch.served import ServedBatches
from echo_sgl.batches.dispatch.validator import safely
from echo_sgl.batches.http.limits import FullTenants
from echo_sgl.batches.store import batch_rows, work
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.work import Span

MAX_ACTIVE_JOBS = 16
ABORT_TIMES_S = (0.0, 1.0, 3.0)  # an id is known to the engine only a while after it is sent
ABORT_GRACE_S = 5.0
REFUSED_S = 30.0  # of refusals alone, after which a job is left to other servers for as long
_EXPIRING = ("validating", "in_progress")
logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Look:
    """The open batches, what this server has claimed of them, how many servers there are, and
    which tenants may store no more answers.
    """

    rows: Sequence[BatchRow]
    owned: Sequence[tuple[int, Span]]
    num_servers: int
    full_tenants: Set[str]


class JobTable:
    """Follows the batches' states: new ones are taken up, ended and paused ones let go."""

    def __init__(
        self, store: JobStore, engine: LineEngine, threads: Executor, *, max_stored_bytes: int
    ) -> None:
        self._store = store
        self._engine = engine
        self._threads = threads
        self._served = ServedBatches(engine)
        self._storage = FullTenants(max_stored_bytes)
        self._is_closed = False
        self._left_until_s: dict[int, float] = {}
        self.jobs: dict[int, ActiveJob] = {}
        self.num_servers = 1
        self.full_tenants: Set[str] = frozenset()

    async def follow(self, lines_per_s: float | None) -> Sequence[BatchRow]:
        """Look at the open batches, which are returned; not twice at a time.

        `lines_per_s` is the rate of all servers together.
        """
        known = self._held()
        look = await self._run(self._look_up)
        self.num_servers, self.full_tenants = look.num_servers, look.full_tenants
        rows = {row.number: row for row in look.rows}
        is_ready = self._engine.is_ready()
        foreign = await self._served.foreign(look.rows) if is_ready else set()
        full = {row.number for row in look.rows if row.tenant in look.full_tenants}
        wanted = self._wanted(rows, foreign | full | self._left_to_others(), lines_per_s)
        await self._take_up(rows, wanted, is_ready=is_ready)
        await self._free_forgotten(look.owned, known | self._held())
        return look.rows

    def close(self) -> None:
        """Take up nothing more, and end what is in the engine; its lines stay in the queue."""
        self._is_closed = True
        for job in self.jobs.values():
            self._drop(job, abort=True)

    async def let_go_all(self) -> None:
        for job in list(self.jobs.values()):
            await safely(partial(self._let_go, job))

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _look_up(self) -> _Look:
        """Expires what is over on the way."""
        now_s, ours = self._store.clock(), self._store.server_id
        with self._store.database.read() as connection:
            rows = batch_rows.open_batches(connection)
            owned = work.owned_ranges(connection, ours)
            servers = self._store.peers.live(connection, now_s)
            full_tenants = self._storage.look(connection, rows, now_s)
        if any(row.expires_at_s <= now_s and row.status in _EXPIRING for row in rows):
            with self._store.database.write() as connection:
                batch_rows.expire_batches(connection, now_s)
                rows = batch_rows.open_batches(connection)
        return _Look(rows, owned, len(servers), full_tenants)

    async def _take_up(
        self, rows: Mapping[int, BatchRow], wanted: dict[int, ActiveJob], *, is_ready: bool
    ) -> None:
        """Work on what is wanted, and on nothing else."""
        for number, job in list(self.jobs.items()):
            job.is_exhausted = False  # another server may have left lines
            if number in wanted:
                job.lines_left = wanted[number].lines_left
                job.is_dropped = job.is_aborted
            else:
                row = rows.get(number)
                self._drop(job, abort=row is None or row.status != "in_progress")
            if job.is_dropped and job.is_idle:
                await safely(partial(self._let_go, job))
        if not self._is_closed and is_ready:
            self.jobs = wanted | self.jobs

    def _wanted(
        self, rows: Mapping[int, BatchRow], but_not: set[int], lines_per_s: float | None
    ) -> dict[int, ActiveJob]:
        """Batches to work on: not too many, so that what is claimed of them stays bounded."""
        jobs = {
            number: ActiveJob.of_row(row, self._served.names, self._engine.max_requests)
            for number, row in rows.items()
            if row.status == "in_progress" and row.paused_at_s is None and number not in but_not
        }
        active = {number for number, job in self.jobs.items() if not job.is_dropped}
        applicants = [
            Applicant(job.load, rows[number].tenant, number in active)
            for number, job in jobs.items()
        ]
        chosen = choose_active(applicants, MAX_ACTIVE_JOBS, self._store.clock(), lines_per_s)
        return {one.load.number: jobs[one.load.number] for one in chosen}

    def _left_to_others(self) -> Set[int]:
        """Jobs that this server refuses, where others have room perhaps and could not get at what
        it holds.
        """
        now_s = self._store.clock()
        for number, job in self.jobs.items():
            if job.refused_since_s is not None and now_s - job.refused_since_s >= REFUSED_S:
                job.refused_since_s = None
                self._left_until_s[number] = now_s + REFUSED_S
        self._left_until_s = {
            number: until_s
            for number, until_s in self._left_until_s.items()
            if until_s > now_s and self.num_servers > 1
        }
        return self._left_until_s.keys()

    def _held(self) -> set[tuple[int, int]]:
        """Batch number and start of each range that this server knows to be its own."""
        return {(number, start) for number, job in self.jobs.items() for start in job.holds}

    async def _free_forgotten(
        self, owned: Iterable[tuple[int, Span]], known: set[tuple[int, int]]
    ) -> None:
        """Give back ranges that a lost connection or an error left claimed and unknown.

        `known` also holds what was known before the look: it may have been recorded meanwhile.
        """
        forgotten: defaultdict[int, list[Span]] = defaultdict(list)
        for number, span in owned:
            job = self.jobs.get(number)
            if (number, span.start) not in known and not (job and job.is_claiming):
                forgotten[number].append(span)
        for number, spans in forgotten.items():
            logger.warning("%d ranges of batch %d were claimed in vain", len(spans), number)
            await self._run(self._release, number, spans)

    def _drop(self, job: ActiveJob, *, abort: bool) -> None:
        job.is_dropped = True
        if abort and not job.is_aborted:
            job.is_aborted = True
            job.forget_lines()
            loop = asyncio.get_running_loop()
            for rid, task in job.in_flight.items():
                for delay_s in ABORT_TIMES_S:
                    loop.call_later(delay_s, self._abort, rid, task)
                loop.call_later(ABORT_GRACE_S, task.cancel)

    def _abort(self, rid: str, task: asyncio.Task[None]) -> None:
        if not task.done():
            self._engine.abort(rid)

    async def _let_go(self, job: ActiveJob) -> None:
        """Give claimed ranges back; a paused or stopped batch goes on from there.

        The job stays until that is written, and is not taken up again in between: the write may
        have been done although the connection is lost.
        """
        job.is_aborted = True
        spans = [hold.span for hold in job.holds.values()]
        if spans:
            await self._run(self._release, job.number, spans)
        self.jobs.pop(job.number, None)

    def _release(self, number: int, spans: Sequence[Span]) -> None:
        with self._store.database.write() as connection:
            batch_rows.lock_batch(connection, number)
            work.release_spans(connection, number, self._store.server_id, spans)
