"""Says in a shared database that this server is alive, whatever it is busy with, and its models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from echo_sgl.batches.dispatch.line_engine import LineEngine
from echo_sgl.batches.dispatch.validator import safely
from echo_sgl.batches.store import offers, work
from echo_sgl.batches.store.job_store import JobStore

LEASE_S = 30.0
RENEW_S = LEASE_S / 5


def renew(store: JobStore) -> None:
    """Say that this server is alive; blocks."""
    with store.database.write() as connection:
        now_s = store.clock()
        work.renew_lease(connection, store.server_id, now_s + LEASE_S)
    store.peers.note_renewal(now_s, now_s + LEASE_S)


class Lease:
    """Renewed in a thread of its own: who seems dead loses its ranges to other servers.

    A private database needs none, because no other server looks at it.
    """

    def __init__(self, store: JobStore, engine: LineEngine) -> None:
        self._store = store
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "echo-lease")
        self._is_held = asyncio.Event()
        self._is_wanted = store.database.is_shared
        if not store.database.is_shared:
            self._is_held.set()

    async def keep(self) -> None:
        """Renew until cancelled, or not wanted any more."""
        while self._is_wanted:
            await safely(self._renew)
            await safely(self._say_models)
            await asyncio.sleep(RENEW_S)

    async def once_held(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do a step, but claim nothing for a server that nobody knows to be alive."""
        await self._is_held.wait()
        await step()

    def let_lapse(self) -> None:
        """Renew it no more: other servers take over what this one has."""
        self._is_wanted = False

    def close(self) -> None:
        self._thread.shutdown()

    async def _renew(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, renew, self._store)
        self._is_held.set()

    async def _say_models(self) -> None:
        """The lease does not wait for long for a server that does not answer."""
        asked_at_s = self._store.clock()
        async with asyncio.timeout(RENEW_S):
            models = await self._engine.models()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._write_models, models, asked_at_s)

    def _write_models(self, models: Iterable[str], asked_at_s: float) -> None:
        with self._store.database.write() as connection:
            offers.say_models(connection, self._store.server_id, models, asked_at_s)
