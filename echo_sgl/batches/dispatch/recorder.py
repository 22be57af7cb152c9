"""Write results to the store, one disk flush for all that wait, and measure the rate."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import orjson
from sqlalchemy.exc import DataError, SQLAlchemyError

from echo_sgl.batches.dispatch.active_job import ActiveJob, Hold, Line, fault_result
from echo_sgl.batches.store import work
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.store.work import Result, Span

MAX_GROUP = 1000
MAX_BACKOFF_S = 30.0
MIN_MEASURED_LINES = 20
MIN_MEASURED_S = 1.0
MEMORY_S = 600.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finished:
    """A line that has its result; `sent` is the line while it holds a place in the window."""

    job: ActiveJob
    result: Result
    hold: Hold
    sent: Line | None


class RateMeter:
    """Lines recorded in a second of work, over about the last ten minutes of it."""

    def __init__(self) -> None:
        self._lines = 0.0
        self._busy_s = 0.0
        self._last_s: float | None = None

    @property
    def lines_per_s(self) -> float | None:
        """None until enough was measured to say."""
        if self._lines < MIN_MEASURED_LINES or self._busy_s < MIN_MEASURED_S:
            return None
        return self._lines / self._busy_s

    def start(self, now_s: float) -> None:
        """Work begins, if it was not going on."""
        if self._last_s is None:
            self._last_s = now_s

    def add(self, num_lines: int, now_s: float, *, is_busy: bool) -> None:
        """Lines were recorded, or given up; `is_busy` says whether more work is under way."""
        if self._last_s is not None:
            self._busy_s += now_s - self._last_s
        self._lines += num_lines
        self._last_s = now_s if is_busy else None
        if self._busy_s > MEMORY_S:
            self._busy_s /= 2
            self._lines /= 2


class Recorder:
    """Takes finished lines from the event loop and returns them when they are on disk."""

    def __init__(
        self, store: JobStore, threads: Executor, on_recorded: Callable[[list[Finished]], None]
    ) -> None:
        self._store = store
        self._threads = threads
        self._on_recorded = on_recorded
        self._queue: list[Finished] = []
        self._arrived = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, finished: Finished) -> None:
        self._queue.append(finished)
        self._empty.clear()
        self._arrived.set()

    async def run(self) -> None:
        """Record until cancelled. What cannot be written now stays, and is tried again.

        Errors: whatever keeps even the note that a line failed from being written.
        """
        try:
            while True:
                await self._arrived.wait()
                group, self._queue = self._queue[:MAX_GROUP], self._queue[MAX_GROUP:]
                if not self._queue:
                    self._arrived.clear()
                self._tell(await self._record(group))
                if not self._queue:
                    self._empty.set()
        finally:
            self._empty.set()  # nobody is to wait for what will never be recorded

    async def drain(self) -> None:
        """Return when all that was put is recorded, or nothing is recorded any more."""
        await self._empty.wait()

    def _tell(self, group: list[Finished]) -> None:
        try:
            self._on_recorded(group)
        except Exception:
            logger.exception("an error after %d lines were recorded; going on", len(group))

    async def _record(self, group: list[Finished]) -> list[Finished]:
        """What was written: the group, but of a line that cannot be, that it failed."""
        try:
            await self._write_until_done(group)
            return group
        except Exception:
            logger.exception("results cannot be written together; now one by one")
        return [await self._record_alone(item) for item in group]

    async def _record_alone(self, item: Finished) -> Finished:
        try:
            await self._write_until_done([item])
            return item
        except Exception as error:
            custom_id = orjson.loads(item.result.record)["custom_id"]
            logger.exception("the result of line %s of %s fails", custom_id, item.job.batch_id)
            result = fault_result(item.result.position, custom_id, error)
        failed = replace(item, result=result)
        await self._write_until_done([failed])
        return failed

    async def _write_until_done(self, group: list[Finished]) -> None:
        """Write results, however long the database cannot.

        Errors: those that waiting does not mend.
        """
        by_job: defaultdict[int, list[Finished]] = defaultdict(list)
        for item in group:
            by_job[item.job.number].append(item)
        delay_s = 0.1
        while not await self._try_write(by_job, delay_s):
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_BACKOFF_S)
        for item in group:
            item.job.count_written(item.hold)

    async def _try_write(self, by_job: dict[int, list[Finished]], delay_s: float) -> bool:
        loop = asyncio.get_running_loop()
        done = {
            number: items[0].job.done_with(item.hold for item in items)
            for number, items in by_job.items()
        }
        try:
            await loop.run_in_executor(self._threads, self._write, by_job, done)
        except DataError:
            raise  # a value that the database does not take, now or later
        except (SQLAlchemyError, OSError) as error:
            logger.error(
                "results cannot be written, next try in %.1f s; nothing new is sent until then: %s",
                delay_s,
                getattr(error, "orig", error),
            )
            return False
        return True

    def _write(self, by_job: dict[int, list[Finished]], done: dict[int, list[Span]]) -> None:
        with self._store.database.write() as connection:
            for number in sorted(by_job):  # one order for all servers: no deadlock
                work.record_results(
                    connection,
                    number,
                    self._store.server_id,
                    [item.result for item in by_job[number]],
                    done=done[number],
                    now_s=self._store.clock(),
                )
