"""Offline requests that the scheduler has are handed back: they end with 503."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from echo_sgl.engine.requests.tasks import is_offline_input

# A request that came just before may not be at the scheduler yet, which ends those that it has.
AGAIN_S = 0.5
# It should be gone long before.
TELL_AGAIN_S = 10.0
# Each takes the scheduler the twentieth part of a millisecond, in which no step is planned.
SLICE, PAUSE_S = 100, 0.01


class HandBack:
    """Tells the scheduler to end offline requests, each of them once.

    A pool of 50,000 is handed back in slices: told at once it would keep this process from its
    streams, and the scheduler from its steps, until all are told.

    `concerns`: which of them, by what the tokenizer manager holds of a request; None: all.
    """

    def __init__(
        self, manager: Any, message: str, concerns: Callable[[Any], bool] | None = None
    ) -> None:
        self._manager, self._message, self._concerns = manager, message, concerns
        # By id, with the request itself: clients choose ids, and may send one again.
        self._told: dict[str, tuple[Any, float]] = {}

    async def go_on(self, *, while_paused: bool) -> None:
        """End those that are there and those that come, until cancelled."""
        while while_paused or not self._manager.is_pause:
            await self.end_all()
            await asyncio.sleep(AGAIN_S)

    @contextlib.asynccontextmanager
    async def meanwhile(self, *, while_paused: bool) -> AsyncIterator[None]:
        """`go_on` as long as what is done within lasts."""
        ending = asyncio.create_task(self.go_on(while_paused=while_paused))
        try:
            yield
        finally:
            ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ending

    async def end_all(self) -> None:
        """End those that the scheduler has and that were not told yet."""
        states = list(self._manager.rid_to_state.items())
        rids = [rid for rid, state in states if self._is_due(rid, state)]
        for start in range(0, len(rids), SLICE):
            for rid in rids[start : start + SLICE]:
                self._end(rid)
            await asyncio.sleep(PAUSE_S)

    def _is_due(self, rid: str, state: Any) -> bool:
        told, told_s = self._told.get(rid, (None, 0.0))
        is_told = told is state and time.monotonic() - told_s < TELL_AGAIN_S
        if is_told or not (state.dispatched and is_offline_input(state.obj)):
            return False
        return self._concerns is None or self._concerns(state.obj)

    def _end(self, rid: str) -> None:
        if (state := self._manager.rid_to_state.get(rid)) is None:
            return  # it ended meanwhile
        self._told[rid] = state, time.monotonic()
        reason = {
            "type": "abort",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "message": self._message,
        }
        abort = AbortReq(rid=rid, abort_message=self._message, finished_reason=reason)
        self._manager._dispatch_to_scheduler(abort)
