"""Job files, and `echo-sgl` run as users run it: as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from eval.servers.server import LOCAL

WAIT_S = 300.0
POLL_S = 0.02


def completion_line(custom_id: str, prompt: str = "def main", **body: Any) -> bytes:
    """One greedy job line that always generates `max_tokens` (4 unless told)."""
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return orjson.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": fields | {"ignore_eos": True} | body,
        }
    )


def chat_line(custom_id: str, content: str, **body: Any) -> bytes:
    """The same as a chat of one turn."""
    line = orjson.loads(completion_line(custom_id, **body))
    line["url"] = "/v1/chat/completions"
    del line["body"]["prompt"]
    line["body"]["messages"] = [{"role": "user", "content": content}]
    return orjson.dumps(line)


def write_job(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def names(path: Path) -> list[str]:
    return [record["custom_id"] for record in records(path)]


def num_posts(log: str) -> int:
    """Requests for work in a server's access log."""
    return log.count('"POST /v1/completions') + log.count('"POST /v1/chat/completions')


def served_model(url: str) -> str:
    return str(LOCAL.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"])


def start_cli(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "echo_sgl.cli", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
        preexec_fn=heed_interrupts,  # noqa: PLW1509
    )


def heed_interrupts() -> None:
    """A shell that puts the suite into the background lets its children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_cli(*args: object) -> subprocess.CompletedProcess[str]:
    with start_cli(*args) as process:
        try:
            stdout, stderr = process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return when it holds; fail with `what` when it does not within minutes."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {WAIT_S:.0f} s for: {what}")
        time.sleep(POLL_S)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
