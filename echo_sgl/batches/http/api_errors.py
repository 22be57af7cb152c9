"""Errors as OpenAI's clients read them: a status and `{"error": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from echo_sgl.errors import EchoError

OUR_PATHS = ("/v1/files", "/v1/batches", "/echo/")
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(EchoError):
    """What a route answers instead of what was asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}

    def as_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def not_found(kind: str, given: str, param: str) -> ApiError:
    """404; the same whether it does not exist or is another tenant's."""
    shown = given[:80].encode(errors="replace").decode()
    return ApiError(404, f"no {kind} has the id {shown!r}", code="not_found", param=param)


def wrong_key() -> ApiError:
    """401 for a key that is nobody's."""
    message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
    return ApiError(401, message, code="invalid_api_key")


def route_path(scope: Message) -> str:
    """The path of a request without the one that the server stands at (--fastapi-root-path)."""
    return str(scope["path"].removeprefix(scope.get("root_path", "")))


class EnvelopedRefusals:
    """ASGI around a server: a key that is refused before our routes is refused in OpenAI's form.

    SGLang's middleware does so with `{"error": "Unauthorized"}`, in which OpenAI's clients and
    ours find no message.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        is_ours = scope["type"] == "http" and route_path(scope).startswith(OUR_PATHS)
        await self._app(scope, receive, _Mended(send) if is_ours else send)


class _Mended:
    """Sends an answer on; one with 401 when it is whole, and in OpenAI's form."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 401:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._refuse(self._start)

    async def _refuse(self, start: Message) -> None:
        if not _has_envelope(self._body):
            self._body = json.dumps(wrong_key().as_json()).encode()
            length = str(len(self._body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", length)]
            start = {**start, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": self._body})


def _has_envelope(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body)["error"], dict)
    except (ValueError, KeyError, TypeError):
        return False
