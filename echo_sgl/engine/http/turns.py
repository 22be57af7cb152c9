"""Offline requests are taken in one at a time, so that nobody waits behind a flood of them.

To parse and tokenise a request takes milliseconds of the one thread that serves HTTP. A job that
is sent at once would be taken in as a whole before the next online request is looked at.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

import orjson

from echo_sgl.batches.http.api_errors import route_path
from echo_sgl.engine.http.envelope import refusal
from echo_sgl.engine.requests.tasks import is_offline_input
from echo_sgl.engine.requests.terms import TIER_KEY, custom_params_of
from echo_sgl.types import OFFLINE_SERVICE_TIER

RESPONSES_PATH = "/v1/responses"
PATHS = ("/v1/chat/completions", "/v1/completions", "/generate", "/invocations", RESPONSES_PATH)
STOPPING = "The server is shutting down; send this offline request again later or elsewhere."
NO_CLASS = "/v1/responses has no offline class; send it to /v1/chat/completions instead."
# Bodies without it need not be parsed: in a prompt its quotation marks stand behind a backslash.
_OFFLINE = re.compile(rb'"service_tier"\s*:\s*"%s"' % OFFLINE_SERVICE_TIER.encode())


class Turn:
    """The right of one request to be taken in; it ends once, when it is passed on."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock: asyncio.Lock | None = lock

    def pass_on(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


_current: ContextVar[Turn | None] = ContextVar("turn", default=None)


def pass_turn_on() -> None:
    """The request of this context is tokenised; what is left to do for it costs little."""
    if (turn := _current.get()) is not None:
        turn.pass_on()


async def one_prompt_at_a_time(original: Any, manager: Any, obj: Any) -> Any:
    """Around the tokenisation of a prompt: before each offline one, all that came goes first.

    A request may hold thousands of prompts, or choices, which SGLang tokenises without a pause.
    """
    if is_offline_input(obj):
        if not hasattr(manager, "echo_prompts"):
            manager.echo_prompts = asyncio.Lock()
        async with manager.echo_prompts:
            await asyncio.sleep(0)
    return await original(manager, obj)


class OfflineTurns:
    """ASGI middleware; the class that a body names decides on the turn, and on refusals: while
    the server stops, and where SGLang knows no class.
    """

    is_stopping = False

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or route_path(scope) not in PATHS:
            await self._app(scope, receive, send)
            return
        messages = await _body_messages(receive)
        left = iter(messages)

        async def replay() -> Any:
            message = next(left, None)
            return message if message is not None else await receive()

        body = b"".join(message.get("body", b"") for message in messages)
        if not names_offline(route_path(scope), body):
            await self._app(scope, replay, send)
            return
        if route_path(scope) == RESPONSES_PATH:
            await refusal(HTTPStatus.BAD_REQUEST, NO_CLASS, TIER_KEY)(scope, replay, send)
            return
        async with self._turn():
            if OfflineTurns.is_stopping:
                await refusal(HTTPStatus.SERVICE_UNAVAILABLE, STOPPING)(scope, replay, send)
            else:
                await self._app(scope, replay, send)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for it; it ends with the request at the latest."""
        await self._lock.acquire()
        turn = Turn(self._lock)
        token = _current.set(turn)
        try:
            # Once around the event loop: all that came meanwhile goes first.
            await asyncio.sleep(0)
            yield
        finally:
            _current.reset(token)
            turn.pass_on()


def names_offline(path: str, body: bytes) -> bool:
    """Whether a body asks for the offline class: in OpenAI's requests a key of its own, which
    schemas and metadata in it may have as well, or of its `custom_params`, where it has none; in
    `/generate` one deep in its parameters.
    """
    if not _OFFLINE.search(body):
        return False
    if path == "/generate":
        return True
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return True  # What is no JSON, or Python's alone (NaN), is SGLang's to refuse.
    if not isinstance(content, dict):
        return False
    tier = content.get(TIER_KEY)
    if tier is None and path != RESPONSES_PATH:
        tier = custom_params_of(content).get(TIER_KEY)
    return bool(tier == OFFLINE_SERVICE_TIER)


async def _body_messages(receive: Any) -> list[Any]:
    """All that the client sends of its body, or until it goes away."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())
    return messages
