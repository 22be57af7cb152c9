"""Ask a running server's own `/echo` routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echo_sgl.errors import EchoError

FETCH_TIMEOUT_S = 60.0
MAX_SHOWN_CHARS = 300
_OF_EACH_REPLICA = ("replica", "columns", "rows")
_NOT_OURS = "with JSON that is not Echo's"


class ServerRouteError(EchoError, RuntimeError):
    """The server gave no answer that can be used; the message says what to do."""


def fetch(
    url: str,
    path: str,
    api_key: str | None = None,
    *,
    needs: Sequence[str] = (),
    **params: object,
) -> dict[str, Any]:
    """The JSON object that the server answers on a path; it holds at least what it `needs`.

    Errors: `ServerRouteError` when it cannot be reached, refuses, or does not know the route; those
    of `open_blocking_client`.
    """
    import httpx

    from echo_sgl.cli.connection import open_blocking_client

    query: dict[str, Any] = dict(params)
    try:
        with open_blocking_client(url, api_key, FETCH_TIMEOUT_S) as client:
            reply = client.get(path, params=query)
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise ServerRouteError(
            f"no server answers at {url} ({error}). Is it running, and is --url right?"
        ) from error
    if reply.status_code != httpx.codes.OK:
        raise ServerRouteError(_refusal(url, path, reply))
    try:
        answer: dict[str, Any] = reply.json()
    except ValueError:
        raise ServerRouteError(_unknown_route(url, path, "with no JSON")) from None
    if not holds(answer, needs):
        raise ServerRouteError(_unknown_route(url, path, _NOT_OURS))
    return answer


def fetch_replicas(
    url: str,
    path: str,
    api_key: str | None = None,
    *,
    needs: Sequence[str] = (),
    **params: object,
) -> list[dict[str, Any]]:
    """The same of a route that answers for each replica: number, columns, rows, what it `needs`."""
    answer = fetch(url, path, api_key, needs=("replicas",), **params)
    replicas: list[dict[str, Any]] = answer["replicas"]
    wanted = (*_OF_EACH_REPLICA, *needs)
    if not (
        isinstance(replicas, list) and replicas and all(holds(one, wanted) for one in replicas)
    ):
        raise ServerRouteError(_unknown_route(url, path, _NOT_OURS))
    return replicas


def failure(address: str, reply: Any) -> str:
    """What to say of a 5xx."""
    text = " ".join(reply.text.split())[:MAX_SHOWN_CHARS] or reply.reason_phrase
    return (
        f"{address} answers {reply.status_code}: {text}. The server, or a proxy before it, failed; "
        "its log says why"
    )


def holds(answer: object, names: Sequence[str]) -> bool:
    """Whether an answer is a JSON object with these names."""
    return isinstance(answer, dict) and all(name in answer for name in names)


def _refusal(url: str, path: str, reply: Any) -> str:
    if reply.status_code == 401:
        return f"{url} wants an API key; give it with --api-key"
    if message := _own_message(reply):
        return message
    if reply.status_code >= 500:
        return failure(f"{url}{path}", reply)
    return _unknown_route(url, path, reply.status_code)


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
