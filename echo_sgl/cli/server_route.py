"""Ask a running server's own `/echo` routes."""

from __future__ import annotations

from typing import Any

from echo_sgl.errors import EchoError

FETCH_TIMEOUT_S = 60.0


class ServerRouteError(EchoError, RuntimeError):
    """The server gave no answer that can be used; the message says what to do."""


def fetch(url: str, path: str, api_key: str | None = None, **params: object) -> dict[str, Any]:
    """The JSON that the server answers on a path.

    Errors: `ServerRouteError` when it cannot be reached, refuses, or does not know the route.
    """
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    query: dict[str, Any] = dict(params)
    try:
        reply = httpx.get(f"{url}{path}", params=query, headers=headers, timeout=FETCH_TIMEOUT_S)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ServerRouteError(
            f"no server answers at {url} ({error}). Is it running, and is --url right?"
        ) from error
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        raise ServerRouteError(f"{url} wants an API key; give it with --api-key")
    if reply.status_code != httpx.codes.OK:
        raise ServerRouteError(_own_message(reply) or _unknown_route(url, path, reply.status_code))
    try:
        answer: dict[str, Any] = reply.json()
    except ValueError:
        raise ServerRouteError(_unknown_route(url, path, "with no JSON")) from None
    return answer


def _own_message(reply: Any) -> str | None:
    """What our routes say in OpenAI's error envelope; None for the answers of others."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _unknown_route(url: str, path: str, status: object) -> str:
    return (
        f"{url}{path} answers {status}. "
        "Start the server with Echo: echo-sgl serve --config echo <SGLang's arguments>"
    )
