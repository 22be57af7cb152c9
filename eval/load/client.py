"""An asynchronous client for both kinds of load: open loop on a schedule, closed loop by window.

aiohttp and not httpx, whose connection pool walks over all connections for each request that
comes or goes: with a thousand in flight the client is late by seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from echo_sgl.types import Task
from eval.load.records import Record, Status

HEADERS = {"Content-Type": "application/json"}
CONNECT_TIMEOUT_S = 30.0
# Less than a server waits for the next request: it would close the connection in its face.
KEEP_ALIVE_S = 2.0
HTTP_OK = 200


@dataclass(frozen=True, slots=True)
class Request:
    """A request ready to send: encoding it during the run would make the client late."""

    id: str
    task: Task
    url: str
    content: bytes
    stream: bool


def make_request(
    id: str, task: Task, url: str, body: Mapping[str, Any], *, stream: bool = True
) -> Request:
    """Encode an OpenAI body, asking a streamed answer to report its usage at the end."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return Request(id, task, url, orjson.dumps({**body, **options}), stream)


@asynccontextmanager
async def load_client(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client for one class: unlimited kept-alive connections, no limit on the answer's time.

    A request's `trace_request_ctx` is called when its body is on its way.
    """

    async def on_sent(_session: Any, context: Any, _params: Any) -> None:
        context.trace_request_ctx()

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(on_sent)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(
        url, connector=connector, timeout=timeout, trace_configs=[trace]
    ) as client:
        yield client


class Phase:
    """One stretch of load on a server: its own clock from 0 and the records of all it sent.

    `on_end` is called with every record that ends, for progress displays.
    """

    def __init__(self, url: str, on_end: Callable[[Record], None] | None = None) -> None:
        self.records: list[Record] = []
        self._url = url
        self._on_end = on_end
        self._origin_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._origin_s

    async def open_loop(self, schedule: Iterable[tuple[float, Request]], *, limit_s: float) -> None:
        """Send each request at its time (s from now), whatever became of those before.

        Ends when all are answered, or `limit_s` from now: then the rest is cancelled. The
        schedule may be endless; no request is sent after `limit_s`.
        """
        start_s = self.now_s()
        async with load_client(self._url) as client, _cancelled_at_end() as tasks:
            for at_s, request in schedule:
                if at_s >= limit_s:
                    break
                await asyncio.sleep(start_s + at_s - self.now_s())
                record = self._record(request, start_s + at_s)
                tasks.append(asyncio.create_task(self._send(client, request, record)))
            await _finished(tasks, start_s + limit_s - self.now_s())

    async def closed_loop(
        self, requests: Iterable[Request], *, window: int, limit_s: float, gap_s: float = 0.0
    ) -> None:
        """Keep `window` requests in flight until all are answered, or `limit_s` from now.

        `gap_s`: between the first ones, so that they reach the server in their order.
        """
        start_s = self.now_s()
        queue = iter(requests)
        async with load_client(self._url) as client, _cancelled_at_end() as tasks:
            for _ in range(window):
                tasks.append(asyncio.create_task(self._work(client, queue)))
                await asyncio.sleep(gap_s)
            await _finished(tasks, start_s + limit_s - self.now_s())

    async def _work(self, client: aiohttp.ClientSession, queue: Iterator[Request]) -> None:
        for request in queue:
            await self._send(client, request, self._record(request, self.now_s()))

    def _record(self, request: Request, scheduled_s: float) -> Record:
        record = Record(request.id, request.task, scheduled_s)
        self.records.append(record)
        return record

    async def _send(self, client: aiohttp.ClientSession, request: Request, record: Record) -> None:
        def note_sent() -> None:
            record.sent_s = self.now_s()

        try:
            async with client.post(
                request.url, data=request.content, headers=HEADERS, trace_request_ctx=note_sent
            ) as response:
                await self._receive(response, request, record)
        except aiohttp.ClientError as error:
            record.end(Status.ERROR, self.now_s(), f"{type(error).__name__}: {error}")
        finally:
            # Nothing ended it: the task is being cancelled.
            record.end(Status.CANCELLED, self.now_s())
            if self._on_end:
                self._on_end(record)

    async def _receive(
        self, response: aiohttp.ClientResponse, request: Request, record: Record
    ) -> None:
        if response.status != HTTP_OK:
            text = await response.text(errors="replace")
            record.end(Status.ERROR, self.now_s(), f"HTTP {response.status}: {text[:300]}")
        elif request.stream:
            await self._receive_stream(response, record)
        else:
            answer = orjson.loads(await response.read())
            _take_usage(record, answer, self.now_s())

    async def _receive_stream(self, response: aiohttp.ClientResponse, record: Record) -> None:
        """Read server-sent events; what arrives in one piece has one time."""
        rest = b""
        async for piece in response.content.iter_any():
            now_s = self.now_s()
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                _take_event(record, event, now_s)
        if record.status is Status.PENDING:
            record.end(Status.ERROR, self.now_s(), "the stream ended without its usage")


def _take_event(record: Record, event: bytes, now_s: float) -> None:
    if not event.startswith(b"data: {"):  # "[DONE]", or a comment that keeps the line alive
        return
    chunk = orjson.loads(event.removeprefix(b"data: "))
    if "error" in chunk:
        record.end(Status.ERROR, now_s, str(chunk["error"])[:300])
    elif chunk.get("choices"):
        _take_token(record, chunk["choices"][0], now_s)
    elif chunk.get("usage"):
        _take_usage(record, chunk, now_s)


def _take_token(record: Record, choice: Mapping[str, Any], now_s: float) -> None:
    """Note a token's time. Chat puts a chunk without text before and after its tokens."""
    if record.first_token_s is None:
        record.first_token_s = now_s
    if "delta" in choice and not choice["delta"].get("content"):
        return
    if record.last_token_s is not None:
        record.gaps_s.append(now_s - record.last_token_s)
    record.last_token_s = now_s


def _take_usage(record: Record, answer: Mapping[str, Any], now_s: float) -> None:
    """Take the server's token counts and close the record."""
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details")
    if details is None:
        message = "no cached tokens in the usage; start the server with --enable-cache-report"
        record.end(Status.ERROR, now_s, message)
        return
    record.prompt_tokens = usage["prompt_tokens"]
    record.completion_tokens = usage["completion_tokens"]
    record.cached_tokens = details["cached_tokens"]
    record.end(Status.OK, now_s)


@asynccontextmanager
async def _cancelled_at_end() -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks: list[asyncio.Task[None]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        # Our own cancelling is expected; anything else is a defect of this client.
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


async def _finished(tasks: list[asyncio.Task[None]], timeout_s: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_EXCEPTION)
