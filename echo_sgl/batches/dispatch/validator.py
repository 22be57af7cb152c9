"""Check the files of new batches in the background, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from echo_sgl.batches.dispatch.line_engine import LineEngine
from echo_sgl.batches.dispatch.served import LeftToOthers
from echo_sgl.batches.dispatch.validation import NotOursError, Validation
from echo_sgl.batches.dispatch.window import backoff_s
from echo_sgl.batches.lines.check_upload import CheckRules
from echo_sgl.batches.store import batch_rows, offers
from echo_sgl.batches.store.batch_rows import BatchRow
from echo_sgl.batches.store.job_store import JobStore

LOOK_INTERVAL_S = 0.25
MAX_FAULTS = 3
RETRY_BASE_S = 1.0
RETRY_CAP_S = 30.0
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Trouble:
    """Checks of a batch that broke off; `num_faults` of them would break off again."""

    num_tries: int = 0
    num_faults: int = 0
    retry_at_s: float = 0.0


class Validator:
    """Takes batches from `validating` on. `ending` are numbers of batches that need no check.

    Tenants take turns, so that one with many large files does not keep the others waiting. A batch
    whose check breaks off comes again later, and others go first. A store that fails only delays
    it; with any other error it fails after `MAX_FAULTS`.
    """

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
        self._held: int | None = None
        self._troubles: dict[int, _Trouble] = {}
        self._left = LeftToOthers(store.server_id)
        self._turns: dict[str, int] = {}  # of tenants with a batch that waits: their last one
        self._num_turns = 0
        self._rng = random.Random()  # jitter only
        self.is_stopping = False
        self.ending: set[int] = set()

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await safely(self._check_waiting)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def close(self) -> None:
        """Only after `run` ended, and its check with it: this waits for the thread."""
        self._checking.shutdown()

    async def _check_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.is_stopping:
            batch = await loop.run_in_executor(self._threads, self._claim)
            if batch is None:
                return
            try:
                models = await self._engine.models()
                elsewhere = self._left.models_of_others(batch)
                max_requests = self._engine.max_requests
                rules = CheckRules(batch.endpoint, models, self._max_lines, elsewhere, max_requests)
                await safely(partial(self._check, batch, Validation(self._store, batch, rules)))
            finally:
                await loop.run_in_executor(self._threads, self._release)
            self._on_checked()

    async def _check(self, batch: BatchRow, validation: Validation) -> None:
        try:
            await self._finish(batch, validation)
            if validation.is_elsewhere:
                self._left.leave(batch)
        except Exception as error:
            trouble = self._troubles.setdefault(batch.number, _Trouble())
            self._put_off(batch, trouble, error)
            if trouble.num_faults >= MAX_FAULTS:
                await asyncio.get_running_loop().run_in_executor(
                    self._threads, _give_up, validation, error
                )
            raise

    async def _finish(self, batch: BatchRow, validation: Validation) -> None:
        """Run the check to its end, which comes at once when it is not wanted any more."""
        loop = asyncio.get_running_loop()
        ended = loop.run_in_executor(self._checking, validation.run)
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=LOOK_INTERVAL_S)
                if not self._is_wanted(batch.number):
                    validation.stop()
        except asyncio.CancelledError:
            validation.stop()
            await asyncio.wait([ended])
            raise
        ended.result()

    def _is_wanted(self, number: int) -> bool:
        return not self.is_stopping and number not in self.ending

    def _put_off(self, batch: BatchRow, trouble: _Trouble, error: Exception) -> None:
        delay_s = backoff_s(trouble.num_tries, self._rng, base_s=RETRY_BASE_S, cap_s=RETRY_CAP_S)
        trouble.num_tries += 1
        trouble.num_faults += not _is_passing(error)
        trouble.retry_at_s = self._store.clock() + delay_s
        logger.error("the check of %s broke off (try %d)", batch.id, trouble.num_tries)

    def _claim(self) -> BatchRow | None:
        self._release()
        with self._store.database.read() as connection:
            rows = batch_rows.open_batches(connection)
            judged_at_s = self._store.peers.judged_at_s(self._store.clock())
            found = offers.live_offers(connection, judged_at_s)
        tenants = {row.number: row.tenant for row in rows if row.status == "validating"}
        waiting = set(tenants)
        elsewhere = {row.number for row in rows if row.endpoint not in self._engine.endpoints}
        elsewhere |= self._left.look(found, rows)
        put_off = self._still_put_off(waiting) | (waiting & elsewhere)
        if waiting <= put_off:
            return None
        present = set(tenants.values())
        self._turns = {name: turn for name, turn in self._turns.items() if name in present}
        ours = self._store.server_id
        with self._store.database.write() as connection:
            live = self._store.peers.live(connection, self._store.clock())
            batch = batch_rows.claim_batch(
                connection, ours, live, ("validating",), but_not=put_off, turns=self._turns
            )
            self._held = None if batch is None else batch.number
        if batch is not None:
            self._num_turns += 1
            self._turns[batch.tenant] = self._num_turns
        return batch

    def _still_put_off(self, waiting: set[int]) -> set[int]:
        now_s = self._store.clock()
        self._troubles = {
            number: trouble for number, trouble in self._troubles.items() if number in waiting
        }
        return {number for number, trouble in self._troubles.items() if trouble.retry_at_s > now_s}

    def _release(self) -> None:
        if self._held is not None:
            with self._store.database.write() as connection:
                batch_rows.release_batch(connection, self._held, self._store.server_id)
            self._held = None


def _is_passing(error: Exception) -> bool:
    """Whether it is the store's trouble, as a full disk, and not what this file holds."""
    is_store = isinstance(error, (SQLAlchemyError, OSError))
    return is_store and not isinstance(error, (DataError, IntegrityError))


def _give_up(validation: Validation, error: Exception) -> None:
    message = (
        f"the file could not be checked in {MAX_FAULTS} tries: an error of the server "
        f"({type(error).__name__}), whose log says more. Create the batch again, or split the file"
    )
    with contextlib.suppress(NotOursError):
        validation.fail("file_not_checked", message)


async def safely(step: Callable[[], Awaitable[Any]]) -> None:
    """Do a step; a failure is logged with its cause, and the step comes round again."""
    try:
        await step()
    except (SQLAlchemyError, OSError) as error:
        logger.error("the job store fails; trying again: %s", getattr(error, "orig", error))
    except Exception:
        logger.exception("the batch service failed at a step; trying again")


async def wait_for(event: asyncio.Event, at_most_s: float) -> None:
    """Return when the event is set, or after so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await event.wait()
