"""Clients that send by chance for some seconds, and a count of how their requests ended."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import orjson

from eval.fuzz.requests import beams, draw_body, draw_job, draw_turns

ANSWER_LIMIT_S = 300.0
MOST_AT_ONCE = (10, 30, 60)
POLL_S = 0.2
MOST_PAUSE_S = 0.5
SESSION_CHARS = 10**6
LIVE = ("validating", "in_progress", "finalizing", "cancelling")


class Clients:
    """Of one server; `has_jobs`: its batch service is on."""

    def __init__(
        self, url: str, rng: random.Random, pool_tokens: int, *, has_jobs: bool = False
    ) -> None:
        self._url, self._rng, self._pool_tokens = url, rng, pool_tokens
        self._has_jobs, self._num_sent = has_jobs, 0
        self.adapters: tuple[str, ...] = ()
        self.ends: Counter[str] = Counter()
        self.broken: list[str] = []

    async def play(self, seconds: float) -> None:
        """Errors: those of httpx where the server gives no answer."""
        limits = httpx.Limits(max_connections=None)
        until_s = time.monotonic() + seconds
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=ANSWER_LIMIT_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            tasks: set[asyncio.Task[None]] = set()
            while time.monotonic() < until_s:
                for _ in range(self._rng.choice((1, 1, 4, 12))):
                    if len(tasks) < self._rng.choice(MOST_AT_ONCE):
                        tasks.add(task := group.create_task(self._draw_sender()(client)))
                        task.add_done_callback(tasks.discard)
                if self._rng.random() < 0.05:
                    await self._disturb(client)
                await asyncio.sleep(self._rng.choice((0.0, 0.02, 0.1, 0.4)))

    def _draw_sender(self) -> Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]:
        chance = self._rng.random()
        if self._has_jobs and chance < 0.03:
            return self._job
        return self._session if chance < 0.06 else self._one

    async def _disturb(self, client: httpx.AsyncClient) -> None:
        """What an operator does: flush, pause for a moment, end one request or all."""
        match self._rng.randrange(5):
            case 0:
                await client.post("/flush_cache")
            case 1:
                mode = self._rng.choice(("in_place", "retract", "abort"))
                await client.post("/pause_generation", json={"mode": mode})
                await asyncio.sleep(self._rng.uniform(0.0, MOST_PAUSE_S))
                await client.post("/continue_generation", json={})
            case 2 if self._rng.random() < 0.3:
                await client.post("/abort_request", json={"abort_all": True})
            case _:
                rid = f"fuzz-{self._rng.randrange(max(1, self._num_sent - 20), self._num_sent + 1)}"
                await client.post("/abort_request", json={"rid": rid})

    async def _one(self, client: httpx.AsyncClient) -> None:
        path, body = "/v1/completions", draw_body(self._rng, self._pool_tokens)
        if self.adapters and self._rng.random() < 0.7:
            body["lora_path"] = self._rng.choice(self.adapters)
        if self._rng.random() < 0.02:
            path, body = "/generate", beams(body)
        elif isinstance(body["prompt"], str) and "n" not in body:
            self._num_sent += 1
            body["rid"] = f"fuzz-{self._num_sent}"
        await self._send(client, path, body)

    async def _send(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> bool:
        """Whether the client stayed for the answer."""
        leaves_after_s = self._rng.uniform(0.01, 1.5) if self._rng.random() < 0.12 else None
        try:
            async with asyncio.timeout(leaves_after_s):
                reply = await client.post(path, json=body)
        except TimeoutError:
            self.ends["left"] += 1
            return False
        self.ends[f"answered {reply.status_code}"] += 1
        # Whose request is ended gets a 503 from SGLang.
        if reply.status_code >= 500 and b"bort" not in reply.content:
            self.broken.append(f"{reply.status_code} {reply.text[:300]}")
        return True

    async def _session(self, client: httpx.AsyncClient) -> None:
        opening = {"capacity_of_str_len": SESSION_CHARS, "streaming": self._rng.random() < 0.3}
        session_id = (await client.post("/open_session", json=opening)).json()
        for body in draw_turns(self._rng, self._pool_tokens, session_id):
            if not await self._send(client, "/v1/completions", body):
                break
        await client.post("/close_session", json={"session_id": session_id})
        self.ends["session"] += 1

    async def _job(self, client: httpx.AsyncClient) -> None:
        """Sent, perhaps cancelled, and looked at when it has ended."""
        content, num_lines = draw_job(self._rng, self._pool_tokens)
        files = {"file": ("job.jsonl", content)}
        reply = await client.post("/v1/files", files=files, data={"purpose": "batch"})
        job = {
            "input_file_id": reply.raise_for_status().json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch = (await client.post("/v1/batches", json=job)).raise_for_status().json()
        path, is_cancelled = f"/v1/batches/{batch['id']}", self._rng.random() < 0.3
        if is_cancelled:
            await asyncio.sleep(self._rng.uniform(0.0, 2.0))
            await client.post(f"{path}/cancel")
        async with asyncio.timeout(ANSWER_LIMIT_S):
            while batch["status"] in LIVE:
                await asyncio.sleep(POLL_S)
                batch = (await client.get(path)).json()
        self.ends[f"job {batch['status']}"] += 1
        if not (is_cancelled and batch["status"] == "cancelled"):
            await self._look_at(client, batch, num_lines)

    async def _look_at(
        self, client: httpx.AsyncClient, batch: dict[str, Any], num_lines: int
    ) -> None:
        """Every line is answered once, or said to have failed."""
        ids = []
        for key in ("output_file_id", "error_file_id"):
            if batch.get(key):
                content = (await client.get(f"/v1/files/{batch[key]}/content")).content
                ids += [orjson.loads(line)["custom_id"] for line in content.splitlines()]
        is_whole = batch["status"] == "completed" and len(set(ids)) == len(ids) == num_lines
        if not is_whole or batch["request_counts"]["total"] != num_lines:
            self.broken.append(f"job of {num_lines} lines with {len(ids)} in its files: {batch}")
