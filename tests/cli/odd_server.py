"""A web server that answers whatever a test says, and a command that asks it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from echo_sgl.cli import app

SERVER = {"max_context_tokens": 256, "max_total_tokens": 1000, "vocab": 100}
REPLICA: dict[str, Any] = {
    "replica": 0,
    "server": SERVER,
    "config": {"steps": {"limit": "budget"}},
    "num_running": 0,
    "num_waiting": 0,
    "num_offline": 0,
    "num_started": 0,
    "num_steps": 0,
    "columns": ["time_s"],
    "rows": [[0.5]],
}


class OddServer:
    """Answers every path with `usual`, but those in `paths`; None loses the connection."""

    def __init__(self) -> None:
        self.url = ""
        self.usual: tuple[int, str] | None = (200, "{}")
        self.paths: dict[str, tuple[int, str] | None] = {}
        self.keys: dict[str, str | None] = {}  # what was last sent to each as `Authorization`
        self.bodies: dict[str, list[bytes]] = {}


@contextlib.contextmanager
def serving_odd() -> Iterator[OddServer]:
    """One that runs on a free port for the length of the block."""
    server = OddServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            server.bodies.setdefault(path, []).append(body)
            answer = server.paths.get(path, server.usual)
            server.keys[path] = self.headers.get("Authorization")
            if answer is None:
                return
            self.send_response(answer[0])
            self.end_headers()
            self.wfile.write(answer[1].encode())

        do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    http.shutdown()
    thread.join()
    http.server_close()


def run(server: OddServer, command: str) -> Result:
    arguments = [*command.split(), "--url", server.url]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)
