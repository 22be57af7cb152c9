"""The server as the dispatcher sees it; the real one is its own routes, in the same process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import httpx
import orjson

from echo_sgl.batches.lines.job_line import EMBEDDINGS_URL, BatchLine
from echo_sgl.batches.lines.model_names import model_names, with_adapters
from echo_sgl.batches.lines.replies import Reply
from echo_sgl.types import OFFLINE_SERVICE_TIER

_JSON = {"Content-Type": "application/json"}
DEADLINE_HEADER = "x-echo-deadline-s"
# What is sent in the last moment of its window is late, not without sense.
LEAST_DEADLINE_S = 0.001


class LineEngine(Protocol):
    """Answers lines."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs that the served model answers."""

    @property
    def max_requests(self) -> int | None:
        """How many may wait in it at a time; None where that has no bound."""

    def is_ready(self) -> bool:
        """Whether lines may be sent."""

    async def models(self) -> Mapping[str, str]:
        """Names of the served models, and the ones to send for them."""

    async def send(self, url: str, content: bytes, within_s: float) -> Reply:
        """The reply to a request that should end in so many seconds.

        Never raises for what the engine does.
        """

    def abort(self, rid: str) -> None:
        """End a request that was sent with this id; its `send` then returns."""


class AsgiEngine:
    """Sends lines to an ASGI app as a client would, without a socket.

    So a line behaves exactly as the same request from outside: the same checks, templates,
    tags and errors.
    """

    def __init__(
        self,
        app: Any,
        *,
        endpoints: tuple[str, ...],
        api_key: str | None,
        is_ready: Callable[[], bool],
        abort: Callable[[str], None],
        unlisted: Callable[[], Collection[str]] = tuple,
        max_requests: int | None = None,
    ) -> None:
        """`unlisted` names adapters that the app answers for, but does not list now."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://echo-sgl",
            headers=headers,
            timeout=None,
        )
        self.endpoints = endpoints
        self.max_requests = max_requests
        self.is_ready = is_ready
        self.abort = abort
        self._unlisted = unlisted

    async def models(self) -> dict[str, str]:
        answer = await self._client.get("/v1/models")
        listed = Reply.parse(answer.status_code, answer.content).body
        names = model_names(listed.get("data") if isinstance(listed, dict) else None)
        return with_adapters(names, self._unlisted())

    async def send(self, url: str, content: bytes, within_s: float) -> Reply:
        headers = {**_JSON, DEADLINE_HEADER: f"{max(LEAST_DEADLINE_S, within_s):.3f}"}
        answer = await self._client.post(url, content=content, headers=headers)
        request_id = answer.headers.get("x-request-id", "")
        return Reply.parse(answer.status_code, answer.content, request_id)


def request_head(line: BatchLine, names: Mapping[str, str]) -> bytes:
    """The body of a line, marked as offline and open at its end for `with_rid`.

    `names` are the ones to send for models that go by another.
    """
    body = {key: value for key, value in line.body.items() if key != "rid"}
    body["model"] = names.get(line.model, line.model)
    if line.url != EMBEDDINGS_URL:
        body["service_tier"] = OFFLINE_SERVICE_TIER
    return orjson.dumps(body)[:-1]


def takes_rid(line: BatchLine) -> bool:
    """SGLang refuses one id for several embeddings; without one, only a closed call ends them."""
    return not (line.url == EMBEDDINGS_URL and isinstance(line.body.get("input"), list))


def with_rid(head: bytes, rid: str) -> bytes:
    """A whole request; the id is new each time it is sent."""
    return b'%b,"rid":"%b"}' % (head, rid.encode())


def without_rid(head: bytes) -> bytes:
    """A whole request, to which the server gives ids of its own."""
    return head + b"}"
