"""The server as a batch run sees it: which models it has, and whether it is there at all."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from echo_sgl.batches.dispatch.window import backoff_s
from echo_sgl.batches.lines.model_names import is_served, model_names
from echo_sgl.batches.lines.replies import Reply
from echo_sgl.errors import EchoError

PROBE_TIMEOUT_S = 30.0  # SGLang's own health check gives up after 20 s
CONNECT_TIMEOUT_S = 10.0
# SGLang ends a connection that was idle for 5 s: a request that goes out just then gets no answer.
IDLE_S = 2.0
# An answer may take hours, so there is no read timeout; a host that vanished is found by TCP.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", socket.TCP_KEEPINTVL), 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
Say = Callable[[str], None]
T = TypeVar("T")


class ServerError(EchoError, RuntimeError):
    """The server is there but cannot be used for this job."""


class ApiKeyError(EchoError, ValueError):
    """A key that no request can carry."""


class ProxyError(EchoError, ValueError):
    """A proxy in the environment that no request can go through."""


class NotReadyError(Exception):
    """The server is there but cannot take work yet."""


NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
LOST = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException, NotReadyError)


def bearer(api_key: str | None) -> dict[str, str]:
    """The headers that carry a key. Errors: `ApiKeyError`, which does not show it."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise ApiKeyError(
            "the API key holds a character that cannot be sent; allowed are ASCII letters, digits "
            "and signs. Set the right one with --api-key, ECHO_SGL_API_KEY or OPENAI_API_KEY"
        )
    return {"Authorization": f"Bearer {api_key}"}


def open_client(url: str, api_key: str | None, max_connections: int) -> httpx.AsyncClient:
    """A client that waits for answers without limit and notices a dead host within a minute."""
    limits = httpx.Limits(
        max_connections=max_connections,
        max_keepalive_connections=max_connections,
        keepalive_expiry=IDLE_S,
    )
    return httpx.AsyncClient(
        base_url=url,
        headers=bearer(api_key),
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=_KEEPALIVE),
    )


def open_blocking_client(url: str, api_key: str | None, timeout_s: float) -> httpx.Client:
    """A client for calls one after the other, or of a few threads.

    Errors: `ApiKeyError`, `ProxyError`.
    """
    limits, headers = httpx.Limits(keepalive_expiry=IDLE_S), bearer(api_key)
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=timeout_s, limits=limits)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ProxyError(
            f"the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names cannot be used ({error}). "
            "Name one as http://HOST:PORT, or unset the variable"
        ) from error


@dataclass(frozen=True, slots=True)
class Loss:
    """The server went away before it answered; `was_sent` says whether it may be because of it."""

    was_sent: bool


class Connection:
    """Posts requests to one server; while it is away, one probe waits for it on behalf of all."""

    def __init__(self, client: httpx.AsyncClient, *, say: Say, rng: random.Random) -> None:
        self._client = client
        self._say = say
        self._rng = rng
        self._checking_loss = asyncio.Lock()
        self._returning: asyncio.Task[None] | None = None
        self._num_returns = 0
        self.needed_models: Collection[str] = ()
        self.names: Mapping[str, str] = {}  # to send for the needed models

    @property
    def url(self) -> str:
        return str(self._client.base_url)

    @property
    def is_away(self) -> bool:
        return self._returning is not None and not self._returning.done()

    def begin(self) -> None:
        """Look whether the server is there and has the models; `wait_there` tells."""
        self._returning = asyncio.create_task(self._return())

    async def wait_there(self) -> None:
        """Return when the server may be asked.

        Errors: `ServerError` when it came back as one that cannot be used.
        """
        if self._returning is not None:
            await asyncio.shield(self._returning)

    async def close(self) -> None:
        """Stop waiting for the server."""
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.gather(self._returning, return_exceptions=True)

    async def post(self, url: str, content: bytes) -> Reply | Loss:
        """Send one request.

        A connection that is lost while the server stays counts as a broken reply: the request
        may be its cause.
        """
        num_returns = self._num_returns
        try:
            answer = await self._client.post(
                url, content=content, headers={"Content-Type": "application/json"}
            )
        except LOST as error:
            if await self._has_gone(num_returns, error):
                return Loss(was_sent=not isinstance(error, NEVER_SENT))
            return Reply(500, {"error": {"message": f"connection lost: {_named(error)}"}})
        if answer.status_code == 401:
            raise _key_refused(self._client.base_url)
        return Reply.parse(
            answer.status_code, answer.content, answer.headers.get("x-request-id", "")
        )

    async def models(self) -> dict[str, str]:
        """Names of the server's models, and the ones to send for them.

        Errors: one of `LOST` when it is away, `ServerError` when it is not an OpenAI server.
        """
        # SGLang answers before its warm-up is over, and ends when the warm-up is refused because
        # of our requests; its /health says when it is. Other servers may have none: 404 is fine.
        await self._get_ready("/health")
        answer = await self._get_ready("/v1/models")
        if answer.status_code in (401, 403):
            raise _key_refused(self._client.base_url)
        reply = Reply.parse(answer.status_code, answer.content)
        listed = reply.body.get("data") if isinstance(reply.body, dict) else None
        if answer.status_code != 200 or not isinstance(listed, list):
            raise ServerError(
                f"{self._client.base_url} does not list its models (GET /v1/models answers "
                f"{reply.status_code}); --url must name an OpenAI-compatible server"
            )
        return model_names(listed)

    async def _get_ready(self, path: str) -> httpx.Response:
        answer = await self._client.get(path, timeout=PROBE_TIMEOUT_S)
        if answer.status_code in (429, 502, 503, 504):
            raise NotReadyError(f"{path} answers {answer.status_code}")
        return answer

    async def wait_models(self) -> dict[str, str]:
        """The same, waiting for as long as the server is away."""
        for attempt in itertools.count():
            try:
                models = await self.models()
            except LOST as error:
                await self._pause(attempt, f"no server is ready at {self._client.base_url}", error)
            else:
                if attempt:
                    self._say(f"the server at {self.url} is there; carrying on")
                return models
        raise AssertionError("unreachable: the count has no end")

    async def _has_gone(self, num_returns: int, error: Exception) -> bool:
        """Whether the server is away, or was since that many returns."""
        async with self._checking_loss:
            if self.is_away or num_returns != self._num_returns:
                return True
            try:
                await self._check_models(await self.models())
            except LOST:
                self._say(
                    f"lost the server at {self.url} ({_named(error)}); unanswered lines will be "
                    "sent again"
                )
                self.begin()
                return True
            return False

    async def _return(self) -> None:
        await self._check_models(await self.wait_models())
        self._num_returns += 1

    async def _check_models(self, models: Mapping[str, str]) -> None:
        for attempt in itertools.count():
            missing = [name for name in self.needed_models if not is_served(name, models)]
            if not missing:
                self.names = models
                return
            what = f"{self.url} has {', '.join(models)} instead of {', '.join(missing)}"
            await self._pause(attempt, what)
            models = await self.wait_models()

    async def _pause(self, attempt: int, what: str, error: Exception | None = None) -> None:
        delay_s = backoff_s(attempt, self._rng)
        reason = f" ({_named(error)})" if error else ""
        self._say(f"{what}{reason}; waiting for it, next look in {delay_s:.1f} s")
        await asyncio.sleep(delay_s)


async def first_of(calls: Collection[Awaitable[T]]) -> T:
    """What the first that ends gives; the others are cancelled. Errors are its errors."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return min(done, key=tasks.index).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _key_refused(url: Any) -> ServerError:
    return ServerError(
        f"{url} refuses the API key; set the right one with --api-key, ECHO_SGL_API_KEY or "
        "OPENAI_API_KEY. Finished lines are kept"
    )
