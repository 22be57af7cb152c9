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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from echo_sgl.batches.dispatch import ending
from echo_sgl.batches.dispatch.active_job import ActiveJob, Claim, Line, claim_lines, fault_result
from echo_sgl.batches.dispatch.deleter import Deleter
from echo_sgl.batches.dispatch.fairness import ShareLevel, choose_job
from echo_sgl.batches.dispatch.job_table import ABORT_GRACE_S, JobTable
from echo_sgl.batches.dispatch.lease import Lease
from echo_sgl.batches.dispatch.line_engine import LineEngine
from echo_sgl.batches.dispatch.metrics import JobMetrics
from echo_sgl.batches.dispatch.recorder import Finished, RateMeter, Recorder
from echo_sgl.batches.dispatch.refusals import RefusalJudge
from echo_sgl.batches.dispatch.validator import Validator, safely, wait_for
from echo_sgl.batches.dispatch.window import SendLimit, backoff_s
from echo_sgl.batches.lines.replies import Reply, Usage, Verdict, new_request_id
from echo_sgl.batches.store import work
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.work import Result
from echo_sgl.config import BatchesConfig

LOOK_INTERVAL_S = 1.0
MAX_CLAIM_BYTES = 4_000_000
MAX_AHEAD_BYTES = 64_000_000  # of requests that wait for the window, beside one claim of each job
REFUSED_BACKOFF_CAP_S = 10.0
DRAIN_S = 30.0
NOTE_AGAIN_S = 1.0
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
        self._table = JobTable(
            store, engine, self._threads, max_stored_bytes=config.max_stored_bytes
        )
        # A line that needs all of the server's room goes when nothing else of ours is there.
        max_requests = min(config.window_lines, engine.max_requests or config.window_lines)
        self._limit = SendLimit(max_requests, config.window_tokens)
        self._level = ShareLevel()
        self._refusals = RefusalJudge()
        self._rng = random.Random()  # jitter only: lines must not come back in step
        self._rate = RateMeter()
        self._look = asyncio.Event()
        self._ends = asyncio.Event()
        self._lease = Lease(store, engine)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._validator = Validator(
            store, engine, self._threads, max_lines=config.max_lines, on_checked=self._look.set
        )
        self._deleter = Deleter(store, self._threads)
        self._ender = ending.Ender(store, output_days=config.file_days)
        self._recorder = Recorder(store, self._threads, self._after_recorded)
        self._tasks: list[asyncio.Task[None]] = []
        self._claims: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._engine.endpoints

    @property
    def lines_per_s(self) -> float | None:
        """Measured rate of this server."""
        return self._rate.lines_per_s

    def wake(self) -> None:
        """Look at the batches now; may be called from any thread."""
        self._wake(self._look)

    def wake_deleter(self) -> None:
        """Take away now what deleted files held; may be called from any thread."""
        self._wake(self._deleter.woken)

    def start(self) -> None:
        """Begin to work; call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        loops = (
            self._watch,
            self._end,
            self._validator.run,
            self._deleter.run,
            self._recorder.run,
        )
        steps = [self._lease.keep(), *(self._lease.once_held(loop) for loop in loops)]
        self._tasks = [asyncio.create_task(step) for step in steps]
        for task in self._tasks:
            task.add_done_callback(self._stop_if_failed)

    def begin_stop(self) -> None:
        """Send nothing more, and end what is in the engine; its lines stay in the queue."""
        self._is_stopping = True
        self._validator.is_stopping = True
        self._table.close()

    async def stop(self) -> None:
        """Stop in order: what is answered is recorded, all other lines wait for the next start."""
        self.begin_stop()
        sends = [task for job in self._table.jobs.values() for task in job.in_flight.values()]
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
        await self._table.let_go_all()
        self._threads.shutdown()
        self._lease.close()
        self._validator.close()

    def _stop_if_failed(self, task: asyncio.Task[None]) -> None:
        """Without one of its tasks the service would only seem to work."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.critical(
            "the batch service has stopped; start the server again. Others that share its "
            "database take over its lines",
            exc_info=error,
        )
        self._lease.let_lapse()
        self.begin_stop()

    def _wake(self, event: asyncio.Event) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(event.set)

    async def _run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(function, *args, **kwargs))

    async def _watch(self) -> None:
        """Follow the batches' states: new ones are taken up, ended and paused ones let go."""
        while True:
            self._look.clear()
            await safely(self._follow)
            await wait_for(self._look, LOOK_INTERVAL_S)

    async def _follow(self) -> None:
        rows = await self._table.follow(self._fleet_lines_per_s)
        self._metrics.show_batches(rows, self._table.full_tenants)
        self._validator.ending = {row.number for row in rows if row.status in _BATCH_ENDS}
        if self._validator.ending:
            self._ends.set()
        self._fill()
        self._metrics.show_in_flight(self._limit.num_lines)

    @property
    def _fleet_lines_per_s(self) -> float | None:
        """As if all servers that share the database were as fast as this one."""
        rate = self._rate.lines_per_s
        return rate and rate * self._table.num_servers

    def _fill(self) -> None:
        """Send as many lines as the window takes; claim ahead for jobs that run low."""
        while not self._is_stopping:
            ready = {job.number: job for job in self._table.jobs.values() if job.may_send}
            if not ready:
                break
            level_tokens = self._level.among(job.sent_tokens for job in ready.values())
            for job in ready.values():
                job.sent_tokens = max(job.sent_tokens, level_tokens)
            loads = [job.load for job in ready.values()]
            chosen = choose_job(loads, self._store.clock(), self._fleet_lines_per_s)
            job = ready[chosen.number]
            if not self._limit.fits(job.pending[0].weight):
                break
            self._send(job, job.take_line())
        for job in self._table.jobs.values():
            if self._may_claim(job):
                self._start_claim(job)

    def _may_claim(self, job: ActiveJob) -> bool:
        if job.is_claiming or job.is_exhausted or job.is_dropped:
            return False
        if not job.pending:
            return True
        ahead_bytes = sum(
            job.pending_bytes + MAX_CLAIM_BYTES * job.is_claiming
            for job in self._table.jobs.values()
        )
        return job.is_low(self._config.window_lines) and ahead_bytes < MAX_AHEAD_BYTES

    def _start_claim(self, job: ActiveJob) -> None:
        job.is_claiming = True
        task = asyncio.create_task(self._claim(job))
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)

    async def _claim(self, job: ActiveJob) -> None:
        claim: Claim | None = None
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
        except Exception:
            logger.exception("lines of %s cannot be claimed now", job.batch_id)
        finally:
            job.is_claiming = False
        job.is_exhausted = claim is None  # or cannot be claimed: until the next look
        if claim is not None:
            self._take_claim(job, claim)
            self._fill()
        if job.is_dropped and job.is_idle:
            self._look.set()

    def _take_claim(self, job: ActiveJob, claim: Claim) -> None:
        job.add(claim)
        for result in claim.results:
            self._put(Finished(job, result, claim.hold, None))
        if job.is_aborted:
            job.forget_lines()

    def _send(self, job: ActiveJob, line: Line) -> None:
        self._limit.take(line.weight)
        line.number = job.pace.take(line.num_requests)
        now_s = time.monotonic()
        self._refusals.send(line.tries, now_s)
        self._rate.start(now_s)
        job.sent_tokens += line.tokens
        rid = new_request_id()
        job.in_flight[rid] = asyncio.create_task(self._answer(job, line, rid))

    async def _answer(self, job: ActiveJob, line: Line, rid: str) -> None:
        """Send one line once, and see to what becomes of it."""
        result: Result | None = None
        try:
            result = await self._try(job, line, rid)
        except Exception as error:
            logger.exception("line %s of %s failed in the service", line.custom_id, job.batch_id)
            result = fault_result(line.position, line.custom_id, error)
        finally:
            del job.in_flight[rid]
            job.pace.give(line.num_requests)
            if result is not None:
                self._put(Finished(job, result, line.hold, line))
            else:
                self._limit.give(line.weight)
                self._count_lines(0)
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
            reply = await self._engine.send(job.url, line.request(rid), within_s)
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
            if self._is_server_full(job, line, reply):
                num_refused = line.tries.num_refused
                delay_s = backoff_s(num_refused, self._rng, cap_s=REFUSED_BACKOFF_CAP_S)
                self._again(job, line, delay_s)
                return None
            verdict = Verdict.BROKEN
        else:
            job.pace.grow(line.num_requests)
            job.refused_since_s = None
        if verdict is Verdict.BROKEN:
            line.num_broken += 1
            if line.num_broken < self._config.max_line_attempts:
                self._again(job, line, backoff_s(line.num_broken, self._rng))
                return None
        is_ok = verdict is Verdict.ANSWERED
        if is_ok:
            self._refusals.answer(line.tries)
        record = line.record(reply)
        return Result(line.position, is_ok, record, Usage.of_body(reply.body) if is_ok else Usage())

    def _is_server_full(self, job: ActiveJob, line: Line, reply: Reply) -> bool:
        """Count a refusal; whether it leaves open that the line is taken some time."""
        tries = line.tries
        is_own = self._refusals.refuse(tries, reply, time.monotonic())
        if is_own and tries.is_to_blame:
            job.pace.raise_to(tries.pace_before)
            return False
        if job.refused_since_s is None:
            job.refused_since_s = self._store.clock()
        if not (is_own or reply.says_handed_back):
            tries.pace_before = max(tries.pace_before, job.pace.limit)
            job.pace.shrink(line.number)
        return True

    def _again(self, job: ActiveJob, line: Line, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._put_back, job, line)

    def _put_back(self, job: ActiveJob, line: Line) -> None:
        job.put_back(line)
        self._fill()

    def _after_recorded(self, group: list[Finished]) -> None:
        for item in group:
            if item.sent is not None:
                self._limit.give(item.sent.weight)
        self._metrics.count_lines(item.result.is_ok for item in group)
        self._count_lines(len(group))
        if any(item.job.is_dropped or not item.job.holds for item in group):
            self._look.set()
        self._fill()
        self._metrics.show_in_flight(self._limit.num_lines)

    def _count_lines(self, num_lines: int) -> None:
        """Lines have given their places back, recorded or given up."""
        self._rate.add(num_lines, time.monotonic(), is_busy=self._limit.num_lines > 0)

    async def _end(self) -> None:
        """End batches, beside all else: a large one takes a while."""
        while True:
            await self._ends.wait()
            self._ends.clear()
            await safely(self._end_batches)

    async def _end_batches(self) -> None:
        while not self._is_stopping and await self._run(self._ender.end_one):
            logger.info("a batch has ended")
