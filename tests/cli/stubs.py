"""Stub servers as processes of their own, to be killed and started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from eval.servers.server import LOCAL, free_port
from tests.cli.jobs import wait_until


class StubServer:
    """`eval.servers.stub_server` on a port that it keeps, with the prompts that it answered."""

    def __init__(self, folder: Path, *args: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._calls = folder / "calls.txt"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "eval.servers.stub_server", "--port", str(port)]
        self._command = [*command, "--calls", str(self._calls), *args]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it answers."""
        self.launch()
        self.wait_up()

    def launch(self) -> None:
        """Return at once; it may end before it answers anything."""
        self.process = subprocess.Popen(self._command)

    def wait_up(self) -> None:
        wait_until(self._is_up, "the stub server answers")

    def kill(self) -> None:
        """End it with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it, if it runs."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)

    def answered(self) -> list[str]:
        """Prompts in the order of their answers, over all its lives."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def _is_up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None
        try:
            return LOCAL.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False
