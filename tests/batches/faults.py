"""Faults to be provoked: lost connections, errors that come once, lines that do not end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import Response
from fastapi.responses import JSONResponse
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from echo_sgl.batches.dispatch.active_job import ActiveJob
from echo_sgl.batches.dispatch.dispatcher import Dispatcher
from echo_sgl.batches.store import work
from eval.servers.stub_server import StubModel


class HoldingModel(StubModel):
    """Answers "hold" when it is `released` or aborted, and "huge" with a count beyond 64 bits."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.released = asyncio.Event()
        self.num_held = 0

    async def _reply(self, body: dict[str, Any], prompt: str, aborted: asyncio.Event) -> Any:
        if prompt.startswith("hold"):
            waits = [asyncio.create_task(event.wait()) for event in (aborted, self.released)]
            self.num_held += 1
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.num_held -= 1
                for wait in waits:
                    wait.cancel()
        reply = await super()._reply(body, "slow" if aborted.is_set() else prompt, aborted)
        if prompt == "huge":
            content = bytes(reply.body).replace(b":10,", b":%d," % (2**64 - 1))
            return Response(content, media_type="application/json")
        return reply


class FullModel(StubModel):
    """Answers so many requests at a time, a line of `n` as so many, and refuses all others."""

    def __init__(self, most: int) -> None:
        super().__init__(0.001)
        self._most = most
        self._num_inside = 0
        self.num_refused = 0

    async def _reply(self, body: dict[str, Any], *given: Any) -> Any:
        num_requests = body.get("n", 1)
        if self._num_inside + num_requests <= self._most:
            self._num_inside += num_requests
            try:
                return await super()._reply(body, *given)
            finally:
                self._num_inside -= num_requests
        self.num_refused += 1
        return JSONResponse({"message": "The request queue is full."}, status_code=503)


class GivingBackModel(StubModel):
    """Answers when it is `released`, unless it gives back what it has before."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.released = asyncio.Event()
        self._turn: asyncio.Future[str] | None = None

    def give_back(self, reason: str) -> None:
        """Refuse all that it has."""
        assert self._turn is not None
        self._turn.set_result(reason)
        self._turn = None

    async def _reply(self, *given: Any) -> Any:
        self._turn = turn = self._turn or asyncio.get_running_loop().create_future()
        released = asyncio.create_task(self.released.wait())
        await asyncio.wait([turn, released], return_when=asyncio.FIRST_COMPLETED)
        released.cancel()
        if turn.done():
            return JSONResponse({"message": turn.result()}, status_code=503)
        return await super()._reply(*given)


def connection_lost() -> OperationalError:
    return OperationalError("made up", None, OSError("the connection is lost"))


def failing_once(function: Callable[..., Any], fault: Exception) -> Callable[..., Any]:
    faults = iter([fault])

    def fail_once(*given: Any, **options: Any) -> Any:
        if found := next(faults, None):
            raise found
        return function(*given, **options)

    return fail_once


def lose_connection(connection: Connection) -> None:
    """As when the server of the database restarts."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    raise connection_lost()


def lose_first_release(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The connection is lost when ranges are given back the first time."""
    release, lost = work.release_spans, []

    def fail_once(connection: Connection, *given: Any, is_done: bool = False) -> None:
        if not is_done and not lost:
            lost.append(connection)
            lose_connection(connection)
        release(connection, *given, is_done=is_done)

    monkeypatch.setattr(work, "release_spans", fail_once)
    return lost


def async_(condition: Callable[[], bool]) -> Any:
    async def holds() -> bool:
        return condition()

    return holds


def jobs_of(dispatcher: Dispatcher) -> list[ActiveJob]:
    return list(dispatcher._table.jobs.values())
