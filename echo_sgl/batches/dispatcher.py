"""Works through all open batches: looks, claims, sends, records, ends. One per server process.

Everything here runs on the server's event loop and never blocks it: what touches database or
disk runs in `threads`. A line holds its place in the window until its result is on disk, so a
crash costs at most a window of answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from echo_sgl.batches import ending
from echo_sgl.batches.active_job import ActiveJob, Claim, Line, claim_lines
from echo_sgl.batches.fairness import choose_job
from echo_sgl.batches.line_engine import LineEngine, with_rid
from echo_sgl.batches.metrics import JobMetrics
from echo_sgl.batches.recorder import Finished, RateMeter, Recorder
from echo_sgl.batches.replies import Reply, Usage, Verdict, new_request_id
from echo_sgl.batches.store import batch_rows, work
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.work import Result
from echo_sgl.batches.validator import Validator, safely
from echo_sgl.batches.window import SendLimit, backoff_s
from echo_sgl.config import BatchesConfig

LOOK_INTERVAL_S = 1.0
LEASE_S = 30.0
FOREVER_S = 1e12
FILES_INTERVAL_S = 60.0
MAX_ACTIVE_JOBS = 16
MAX_CLAIM_BYTES = 4_000_000
REFUSED_BACKOFF_CAP_S = 10.0
ABORT_TIMES_S = (0.0, 1.0, 3.0)  # an id is known to the engine only a while after it is sent
ABORT_GRACE_S = 5.0
DRAIN_S = 30.0
NOTE_AGAIN_S = 1.0
_EXPIRING = ("validating", "in_progress")
_BATCH_ENDS = ("finalizing", "cancelling")
logger = logging.getLogger(__name__)
T = TypeVar("T")


class Dispatcher:
    """Keeps a bounded window of lines of all open batches in the engine."""

    def __init__(
        self, store: JobStore, config: BatchesConfig, engine: LineEngine, metrics: JobMetrics
    ) -> None:
        self._store = store
        self._config = config
        self._engine = engine
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(4, "echo-batches")
        self._jobs: dict[int, ActiveJob] = {}
        self._limit = SendLimit(config.window_lines, config.window_tokens)
        self._rng = random.Random()  # jitter only: lines must not come back in step
        self._rate = RateMeter()
        self._look = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._validator = Validator(
            store, engine, self._threads, max_lines=config.max_lines, on_checked=self._look.set
        )
        self._recorder = Recorder(store, self._threads, self._after_recorded)
        self._tasks: list[asyncio.Task[None]] = []
        self._claims: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._next_lease_s = 0.0

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._engine.endpoints

    @property
    def lines_per_s(self) -> float | None:
        """Measured rate of this server."""
        return self._rate.lines_per_s

    def wake(self) -> None:
        """Look at the batches now; may be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look.set)

    def start(self) -> None:
        """Begin to work; call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        loops = (self._watch, self._validator.run, self._delete_files, self._recorder.run)
        self._tasks = [asyncio.create_task(loop()) for loop in loops]

    def begin_stop(self) -> None:
        """Send nothing more, and end what is in the engine; its lines stay in the queue."""
        self._is_stopping = True
        self._validator.is_stopping = True
        for job in list(self._jobs.values()):
            self._drop(job, abort=True)

    async def stop(self) -> None:
        """Stop in order: what is answered is recorded, all other lines wait for the next start."""
        self.begin_stop()
        sends = [task for job in self._jobs.values() for task in job.in_flight.values()]
        if sends:
            await asyncio.wait(sends, timeout=ABORT_GRACE_S)
        for task in sends:
            task.cancel()
        await asyncio.gather(*sends, *self._claims, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._recorder.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in list(self._jobs.values()):
            await self._let_go(job)
        self._threads.shutdown()
        self._validator.close()

    async def _run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(function, *args, **kwargs))

    async def _watch(self) -> None:
        """Follow the batches' states: new ones are taken up, ended and paused ones let go."""
        while True:
            self._look.clear()
            await safely(self._follow)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await self._look.wait()

    async def _follow(self) -> None:
        rows = await self._run(self._look_up)
        self._metrics.show_batches(rows)
        wanted = self._wanted(rows)
        self._validator.ending = {row.number for row in rows if row.status in _BATCH_ENDS}
        for job in list(self._jobs.values()):
            job.is_exhausted = False  # another server may have left lines
            if job.number not in wanted:
                status = next((row.status for row in rows if row.number == job.number), "gone")
                self._drop(job, abort=status != "in_progress")
            if job.is_dropped and job.is_idle:
                await self._let_go(job)
        for number, row in wanted.items():
            if number not in self._jobs and not self._is_stopping and self._engine.is_ready():
                self._jobs[number] = ActiveJob.of_row(row)
        if any(row.status in _BATCH_ENDS for row in rows):
            ended = await self._run(
                ending.end_batches, self._store, output_days=self._config.file_days
            )
            if ended:
                logger.info("%d batches ended", ended)
        self._fill()
        self._metrics.show_in_flight(self._limit.num_requests)

    def _look_up(self) -> Sequence[BatchRow]:
        """The open batches; renews the lease and expires what is over on the way."""
        now_s = self._store.clock()
        with self._store.database.read() as connection:
            rows = batch_rows.open_batches(connection)
        is_over = any(row.expires_at_s <= now_s and row.status in _EXPIRING for row in rows)
        lease_s = LEASE_S if self._store.database.is_shared else FOREVER_S
        if is_over or now_s >= self._next_lease_s:
            with self._store.database.write() as connection:
                work.renew_lease(connection, self._store.server_id, now_s + lease_s)
                batch_rows.expire_batches(connection, now_s)
                rows = batch_rows.open_batches(connection)
            self._next_lease_s = now_s + lease_s / 5
        return rows

    def _wanted(self, rows: Sequence[BatchRow]) -> dict[int, BatchRow]:
        """Batches to work on: not too many, so that what is claimed of them stays bounded."""
        running = [row for row in rows if row.status == "in_progress" and row.paused_at_s is None]
        running.sort(key=lambda row: (row.number not in self._jobs, row.expires_at_s, row.number))
        return {row.number: row for row in running[:MAX_ACTIVE_JOBS]}

    def _drop(self, job: ActiveJob, *, abort: bool) -> None:
        job.is_dropped = True
        job.pending.clear()
        if abort and not job.is_aborted:
            job.is_aborted = True
            loop = asyncio.get_running_loop()
            for rid, task in job.in_flight.items():
                for delay_s in ABORT_TIMES_S:
                    loop.call_later(delay_s, self._abort, rid, task)
                loop.call_later(ABORT_GRACE_S, task.cancel)

    def _abort(self, rid: str, task: asyncio.Task[None]) -> None:
        if not task.done():
            self._engine.abort(rid)

    async def _let_go(self, job: ActiveJob) -> None:
        """Give claimed ranges back; a paused or stopped batch goes on from there."""
        self._jobs.pop(job.number, None)
        await self._run(self._release, job)

    def _release(self, job: ActiveJob) -> None:
        with self._store.database.write() as connection:
            batch_rows.lock_batch(connection, job.number)
            work.release_spans(
                connection, job.number, self._store.server_id, list(job.left_in_span)
            )

    def _fill(self) -> None:
        """Send as many lines as the window takes; claim ahead for jobs that run low."""
        while not self._is_stopping:
            ready = {job.number: job for job in self._jobs.values() if job.pending}
            if not ready:
                break
            loads = [job.load for job in ready.values()]
            chosen = choose_job(loads, self._store.clock(), self._rate.lines_per_s)
            job = ready[chosen.number]
            if not self._limit.fits(job.pending[0].tokens, job.pending[0].num_crashes):
                break
            self._send(job, job.pending.popleft())
        for job in self._jobs.values():
            is_low = job.is_low(self._config.window_lines)
            if is_low and not (job.is_claiming or job.is_exhausted or job.is_dropped):
                self._start_claim(job)

    def _start_claim(self, job: ActiveJob) -> None:
        job.is_claiming = True
        task = asyncio.create_task(self._claim(job))
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)

    async def _claim(self, job: ActiveJob) -> None:
        try:
            claim = await self._run(
                claim_lines,
                self._store,
                job,
                max_lines=self._config.window_lines,
                max_bytes=MAX_CLAIM_BYTES,
            )
        except (SQLAlchemyError, OSError) as error:
            logger.error("lines of %s cannot be claimed now: %s", job.batch_id, error)
            return
        finally:
            job.is_claiming = False
        job.is_exhausted = claim is None
        if claim is not None:
            self._take_claim(job, claim)
            self._fill()
        elif not job.in_flight:
            self._look.set()  # it may just have come to its end

    def _take_claim(self, job: ActiveJob, claim: Claim) -> None:
        job.add(claim)
        for result in claim.results:
            self._put(Finished(job, result, claim.span, None))
        if job.is_dropped:
            job.pending.clear()

    def _send(self, job: ActiveJob, line: Line) -> None:
        self._limit.take(line.tokens, line.num_crashes)
        self._rate.start(time.monotonic())
        job.tokens_in_flight += line.tokens
        rid = new_request_id()
        job.in_flight[rid] = asyncio.create_task(self._answer(job, line, rid))

    async def _answer(self, job: ActiveJob, line: Line, rid: str) -> None:
        """Send one line once, and see to what becomes of it."""
        result: Result | None = None
        try:
            result = await self._try(job, line, rid)
        finally:
            del job.in_flight[rid]
            job.tokens_in_flight -= line.tokens
            if result is not None:
                self._put(Finished(job, result, line.span, line))
            else:
                self._limit.give(line.tokens, line.num_crashes)
                if job.is_dropped and job.is_idle:
                    self._look.set()

    async def _try(self, job: ActiveJob, line: Line, rid: str) -> Result | None:
        """The line's result, or None when it is to be sent again or is not wanted any more."""
        if line.is_last_try and not await self._note_last_try(job, line, is_sent=True):
            self._again(job, line, NOTE_AGAIN_S)
            return None
        result: Result | None = None
        try:
            within_s = job.deadline_s - self._store.clock()
            reply = await self._engine.send(job.url, with_rid(line.head, rid), within_s)
            result = self._judge(job, line, reply)
        except asyncio.CancelledError:
            pass  # aborted, and the engine did not let go of it in time
        except Exception as error:
            logger.exception("line %s of %s failed in the server", line.custom_id, job.batch_id)
            message = f"an error of the server ({type(error).__name__}); its log says more"
            result = self._judge(job, line, Reply(500, {"error": {"message": message}}))
        if line.is_last_try and result is None:
            await self._note_last_try(job, line, is_sent=False)
        return result

    async def _note_last_try(self, job: ActiveJob, line: Line, *, is_sent: bool) -> bool:
        """Whether it could be written that the line is now in the engine, alone, or is not."""

        def note() -> None:
            with self._store.database.write() as connection:
                work.note_last_try(connection, job.number, line.position, is_sent=is_sent)

        try:
            await self._run(note)
        except (SQLAlchemyError, OSError) as error:
            logger.error("line %s of %s is not tried now: %s", line.custom_id, job.batch_id, error)
            return False
        return True

    def _put(self, finished: Finished) -> None:
        finished.job.num_unrecorded += 1
        self._recorder.put(finished)

    def _judge(self, job: ActiveJob, line: Line, reply: Reply) -> Result | None:
        """The line's result, or None when it is to be sent again or is not wanted any more."""
        verdict = reply.verdict
        if job.is_aborted and verdict is not Verdict.ANSWERED:
            return None
        if verdict is Verdict.REFUSED:
            self._limit.shrink()
            line.num_refused += 1
            delay_s = backoff_s(line.num_refused, self._rng, cap_s=REFUSED_BACKOFF_CAP_S)
            self._again(job, line, delay_s)
            return None
        self._limit.grow()
        if verdict is Verdict.BROKEN:
            line.num_broken += 1
            if line.num_broken < self._config.max_line_attempts:
                self._again(job, line, backoff_s(line.num_broken, self._rng))
                return None
        is_ok = verdict is Verdict.ANSWERED
        record = line.record(reply)
        return Result(line.position, is_ok, record, Usage.of_body(reply.body) if is_ok else Usage())

    def _again(self, job: ActiveJob, line: Line, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._put_back, job, line)

    def _put_back(self, job: ActiveJob, line: Line) -> None:
        if not job.is_dropped:
            job.pending.appendleft(line)
            self._fill()

    def _after_recorded(self, group: list[Finished]) -> None:
        for item in group:
            item.job.lines_left -= 1
            item.job.num_unrecorded -= 1
            if item.sent is not None:
                self._limit.give(item.sent.tokens, item.sent.num_crashes)
        self._metrics.count_lines(item.result.is_ok for item in group)
        self._rate.add(len(group), time.monotonic(), is_busy=self._limit.num_requests > 0)
        jobs = {item.job.number: item.job for item in group}
        if any(job.lines_left <= 0 or job.is_dropped for job in jobs.values()):
            self._look.set()
        self._fill()
        self._metrics.show_in_flight(self._limit.num_requests)

    async def _delete_files(self) -> None:
        while True:
            await safely(partial(self._run, ending.delete_expired_files, self._store))
            await asyncio.sleep(FILES_INTERVAL_S)
