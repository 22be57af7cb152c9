"""The `--url` of a server as users write it."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from echo_sgl.errors import EchoError


class ServerUrlError(EchoError, ValueError):
    """A `--url` that no server can be reached by."""

    def __init__(self, given: str, reason: str) -> None:
        super().__init__(
            f"--url is {given!r}: {reason}. Write it as http://HOST:PORT, without a path"
        )


def server_roots(urls: Sequence[str]) -> list[str]:
    """The same for several servers.

    Errors: `ServerUrlError` also when one is named twice, which would double its window.
    """
    roots = [server_root(url) for url in urls]
    for index, root in enumerate(roots):
        if root in roots[:index]:
            raise ServerUrlError(urls[index], "it is named twice; name each server once")
    return roots


def server_root(url: str) -> str:
    """Drop a trailing slash and OpenAI's `/v1`, which users copy from `base_url`.

    Errors: `ServerUrlError` when scheme or host are missing or the port is not a number.
    """
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ServerUrlError(url, str(error)) from error
    if parts.scheme not in ("http", "https"):
        raise ServerUrlError(url, "it does not start with http:// or https://")
    if not parts.hostname or not port_is_valid:
        raise ServerUrlError(url, "it names no host or port")
    if not _can_be_asked(url):
        raise ServerUrlError(url, f"{parts.hostname!r} is no name of a host")
    return url.rstrip("/").removesuffix("/v1")


def _can_be_asked(url: str) -> bool:
    """Whether the host is one that the HTTP client and the system's resolver can write down."""
    import httpx

    try:
        parsed = httpx.URL(url)
        return bool(parsed.host) and bool(parsed.raw_host.decode("ascii").encode("idna"))
    except (httpx.InvalidURL, UnicodeError):
        return False
