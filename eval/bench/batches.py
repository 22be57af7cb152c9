"""What the batch service itself costs: lines per second, and memory for the largest job.

A stub answers at once, so that store and dispatcher are all that is measured. Stock SGLang has no
batches to compare with. Each part runs in a process of its own: `python -m eval.bench.batches
rate 20000` and `... memory 50000` run a job of so many lines and print one JSON object.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
from fastapi import FastAPI

from echo_sgl.batches.assembly import add_batch_service
from echo_sgl.batches.http.tenants import Tenants
from echo_sgl.batches.lines.job_line import COMPLETIONS_URL
from echo_sgl.batches.lines.replies import Reply
from echo_sgl.batches.store.job_store import open_store
from echo_sgl.config import BatchesConfig
from eval.servers.machine import machine, peak_bytes

MODEL = "stub"
RATE_LINES = 20_000
RATE_LINE_BYTES = 300
MEMORY_LINES = 50_000
MEMORY_LINE_BYTES = 4000
WINDOW_LINES = 1024
ANSWER = orjson.dumps(
    {
        "id": "cmpl",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "x" * 200, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150},
    }
)


class InstantEngine:
    """Answers every line at once, as HTTP would bring it."""

    max_requests = None
    endpoints = (COMPLETIONS_URL,)

    def is_ready(self) -> bool:
        return True

    async def models(self) -> dict[str, str]:
        return {MODEL: MODEL}

    async def send(self, url: str, content: bytes, within_s: float) -> Reply:
        return Reply.parse(200, ANSWER)

    def abort(self, rid: str) -> None:
        """Nothing runs for long enough."""


def run() -> list[dict[str, Any]]:
    """Rows for `eval.bench`."""
    rate, memory = measured("rate", RATE_LINES), measured("memory", MEMORY_LINES)
    rows = [
        ("batches: lines through store and dispatcher", rate["lines_per_s"], "lines/s", RATE_LINES),
        ("batches: CPU time of a line", rate["cpu_us_per_line"], "us", RATE_LINES),
        (
            f"batches: extra memory, {memory['num_bytes'] / 1e6:,.0f} MB job, server",
            memory["server_mb"],
            "MB",
            MEMORY_LINES,
        ),
        ("batches: the same, process that checks it", memory["checker_mb"], "MB", MEMORY_LINES),
    ]
    return [
        {
            "name": name,
            "ours": value,
            "stock": None,
            "ratio": None,
            "unit": unit,
            "n": count,
            "machine": machine(),
        }
        for name, value, unit, count in rows
    ]


async def measure_rate(num_lines: int) -> dict[str, float]:
    """From the first line that is sent to the last that is on disk."""
    async with _Server() as server:
        batch_id = await server.submit(num_lines, RATE_LINE_BYTES, paused=True)
        while (await server.batch(batch_id))["status"] == "validating":
            await asyncio.sleep(0.02)
        cpu_s, start_s = time.process_time(), time.perf_counter()
        await server.http.post(f"/v1/batches/{batch_id}/resume")
        batch = await server.ended(batch_id)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    assert batch["request_counts"]["completed"] == num_lines
    return {"lines_per_s": num_lines / wall_s, "cpu_us_per_line": 1e6 * cpu_s / num_lines}


async def measure_memory(num_lines: int) -> dict[str, float]:
    """Growth of the server's peak memory over upload, check, run and download of a job."""
    async with _Server() as server:
        before_mb = peak_bytes() / 1e6
        batch_id = await server.submit(num_lines, MEMORY_LINE_BYTES)
        batch = await server.ended(batch_id)
        async with server.http.stream("GET", f"/v1/files/{batch['input_file_id']}") as answer:
            await answer.aread()
            num_bytes = answer.json()["bytes"]
    assert batch["request_counts"]["completed"] == num_lines
    return {
        "server_mb": peak_bytes() / 1e6 - before_mb,
        # Of any process that this one started, and at least what this one held then.
        "checker_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6,
        "num_bytes": num_bytes,
    }


class _Server:
    """The batch service with the instant engine, in this process."""

    async def __aenter__(self) -> _Server:
        self._folder = tempfile.TemporaryDirectory()
        app = FastAPI()
        config = BatchesConfig(window_lines=WINDOW_LINES)
        store = open_store(Path(self._folder.name))
        add_batch_service(app, store, config, InstantEngine(), Tenants(None))
        self._life = app.router.lifespan_context(app)
        await self._life.__aenter__()
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://stub", timeout=None)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()
        await self._life.__aexit__(None, None, None)
        self._folder.cleanup()

    async def submit(self, num_lines: int, line_bytes: int, *, paused: bool = False) -> str:
        headers = {"Content-Type": "multipart/form-data; boundary=echo"}
        form = _form(num_lines, line_bytes)
        uploaded = await self.http.post("/v1/files", content=form, headers=headers)
        body = {"input_file_id": uploaded.json()["id"], "endpoint": COMPLETIONS_URL}
        created = await self.http.post("/v1/batches", json={**body, "completion_window": "24h"})
        batch_id = str(created.json()["id"])
        if paused:
            await self.http.post(f"/v1/batches/{batch_id}/pause")
        return batch_id

    async def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"/v1/batches/{batch_id}")).json()
        return found

    async def ended(self, batch_id: str) -> dict[str, Any]:
        while (batch := await self.batch(batch_id))["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.05)
        return batch


async def _form(num_lines: int, line_bytes: int) -> AsyncIterator[bytes]:
    """A multipart upload, made piece by piece."""
    yield b'--echo\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    yield b'--echo\r\nContent-Disposition: form-data; name="file"; filename="job"\r\n\r\n'
    for index in range(num_lines):
        prompt = f"document {index // 50} ".ljust(line_bytes - 160, "x") + f" question {index}"
        yield (
            orjson.dumps(
                {
                    "custom_id": f"line-{index}",
                    "method": "POST",
                    "url": COMPLETIONS_URL,
                    "body": {"model": MODEL, "prompt": prompt, "max_tokens": 64},
                }
            )
            + b"\n"
        )
    yield b"\r\n--echo--\r\n"


def measured(part: str, num_lines: int) -> dict[str, float]:
    """A part over a job of so many lines, in a process that has held nothing before."""
    command = [sys.executable, "-m", "eval.bench.batches", part, str(num_lines)]
    found: dict[str, float] = orjson.loads(subprocess.check_output(command))
    return found


if __name__ == "__main__":
    measure = {"rate": measure_rate, "memory": measure_memory}[sys.argv[1]]
    print(orjson.dumps(asyncio.run(measure(int(sys.argv[2])))).decode())
