"""Takes away what deleted and expired files held, beside all else: a large one takes a while."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from echo_sgl.batches.dispatch.ending import delete_expired_files
from echo_sgl.batches.dispatch.validator import safely, wait_for
from echo_sgl.batches.store.job_store import JobStore

FILES_INTERVAL_S = 60.0
DELETE_PAUSE_S = 0.1  # who waits for SQLite's lock looks that often


class Deleter:
    """One task of the dispatcher's; `woken` says that a file was deleted just now."""

    def __init__(self, store: JobStore, threads: Executor) -> None:
        self._store, self._threads = store, threads
        self.woken = asyncio.Event()

    async def run(self) -> None:
        """Without end, in parts between which others write."""
        while True:
            self.woken.clear()
            await safely(self._delete)
            await wait_for(self.woken, FILES_INTERVAL_S)

    async def _delete(self) -> None:
        loop, parts = asyncio.get_running_loop(), delete_expired_files(self._store)
        while await loop.run_in_executor(self._threads, next, parts, None) is not None:
            await asyncio.sleep(DELETE_PAUSE_S)
