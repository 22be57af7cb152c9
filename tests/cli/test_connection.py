"""Connections that a server ends while they are idle."""

from __future__ import annotations

import asyncio
import socketserver
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from echo_sgl.cli.connection import open_blocking_client, open_client

# uvicorn's `timeout_keep_alive`, which SGLang's server leaves as it is.
SGLANG_IDLE_S = 5.0
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class OneAnswer(socketserver.StreamRequestHandler):
    """Answers one request and ends the connection at the next, as a server out of patience."""

    def handle(self) -> None:
        for reply in (REPLY, b""):
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            self.wfile.write(reply)


@pytest.fixture
def url() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OneAnswer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def let_pass(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)


def test_a_request_never_goes_out_on_a_connection_that_the_server_is_about_to_end(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_blocking_client(url, None, 30) as client:
        assert client.post("/").status_code == 200
        let_pass(monkeypatch, 0.6 * SGLANG_IDLE_S)
        assert client.post("/").status_code == 200


def test_nor_does_one_of_a_job(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def twice() -> list[int]:
        async with open_client(url, None, 4) as client:
            first = await client.post("/")
            let_pass(monkeypatch, 0.6 * SGLANG_IDLE_S)
            return [first.status_code, (await client.post("/")).status_code]

    assert asyncio.run(twice()) == [200, 200]


def test_a_busy_connection_is_kept(url: str) -> None:
    with open_blocking_client(url, None, 30) as client:
        assert client.post("/").status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            client.post("/")
