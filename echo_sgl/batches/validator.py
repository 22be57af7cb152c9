"""Check the files of new batches in the background, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from echo_sgl.batches.check_upload import CheckRules
from echo_sgl.batches.line_engine import LineEngine
from echo_sgl.batches.store import batch_rows, work
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.job_store import JobStore
from echo_sgl.batches.validation import validate_batch

LOOK_INTERVAL_S = 0.25
logger = logging.getLogger(__name__)


class Validator:
    """Takes batches from `validating` on. `ending` are numbers of batches that need no check."""

    def __init__(
        self,
        store: JobStore,
        engine: LineEngine,
        threads: Executor,
        *,
        max_lines: int,
        on_checked: Callable[[], None],
    ) -> None:
        """`threads` run what is short; the check itself has a thread of its own."""
        self._store = store
        self._engine = engine
        self._threads = threads
        self._max_lines = max_lines
        self._on_checked = on_checked
        self._checking = ThreadPoolExecutor(1, "echo-validation")
        self.is_stopping = False
        self.ending: set[int] = set()

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await safely(self._check_waiting)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def close(self) -> None:
        self._checking.shutdown()

    async def _check_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.is_stopping:
            batch = await loop.run_in_executor(self._threads, self._claim)
            if batch is None:
                return
            is_wanted = partial(self._is_wanted, batch.number)
            try:
                models = await self._engine.models()
                rules = CheckRules(batch.endpoint, models, self._max_lines)
                await loop.run_in_executor(
                    self._checking, validate_batch, self._store, batch, rules, is_wanted
                )
            finally:
                await loop.run_in_executor(self._threads, self._release, batch)
            self._on_checked()

    def _is_wanted(self, number: int) -> bool:
        return not self.is_stopping and number not in self.ending

    def _claim(self) -> BatchRow | None:
        with self._store.database.read() as connection:
            rows = batch_rows.open_batches(connection)
        if not any(row.status == "validating" for row in rows):
            return None
        with self._store.database.write() as connection:
            live = work.live_servers(connection, self._store.clock()) | {self._store.server_id}
            return batch_rows.claim_batch(connection, self._store.server_id, live, ("validating",))

    def _release(self, batch: BatchRow) -> None:
        with self._store.database.write() as connection:
            batch_rows.release_batch(connection, batch.number, self._store.server_id)


async def safely(step: Callable[[], Awaitable[Any]]) -> None:
    """Do a step; a failure is logged with its cause, and the step comes round again."""
    try:
        await step()
    except (SQLAlchemyError, OSError) as error:
        logger.error("the job store fails; trying again: %s", getattr(error, "orig", error))
    except Exception:
        logger.exception("the batch service failed at a step; trying again")
