"""The stub server in this process, and OpenAI's own client on it without a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
from openai.types import Batch

from echo_sgl.batches.http.tenants import Tenants
from echo_sgl.config import BatchesConfig
from eval.servers.stub_server import MODEL, StubModel, create_app

WAIT_S = 300.0
ENDED = ("failed", "completed", "expired", "cancelled")


def line(custom_id: str, prompt: str = "hello", **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": MODEL, "prompt": prompt, "max_tokens": 4},
    }
    return orjson.dumps(fields | changes)


def job(prompts: Sequence[str]) -> bytes:
    return b"\n".join(line(f"line-{index}", prompt) for index, prompt in enumerate(prompts))


class Stub:
    """A running stub server: its model, and clients for it."""

    def __init__(self, app: Any, model: StubModel) -> None:
        self.app = app
        self.model = model
        self.client = self.client_with("none")

    def client_with(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=key,
            base_url="http://stub/v1",
            max_retries=0,
            http_client=self.http(),
            _strict_response_validation=True,
        )

    def http(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://stub", timeout=60)

    async def upload(self, content: bytes, name: str = "jobs.jsonl") -> str:
        uploaded = await self.client.files.create(file=(name, content), purpose="batch")
        return uploaded.id

    async def create(self, content: bytes, window: str = "24h") -> Batch:
        return await self.client.batches.create(
            input_file_id=await self.upload(content),
            endpoint="/v1/completions",
            completion_window=window,  # type: ignore[arg-type]
        )

    async def ended(self, batch_id: str) -> Batch:
        return await self.until(batch_id, lambda batch: batch.status in ENDED)

    async def until(self, batch_id: str, condition: Callable[[Batch], bool]) -> Batch:
        found: list[Batch] = []

        async def holds() -> bool:
            found[:] = [await self.client.batches.retrieve(batch_id)]
            return condition(found[0])

        await until(holds)
        return found[0]

    async def records(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """An output file's records by custom_id, each of which it must hold once."""
        if file_id is None:
            return {}
        content = (await self.client.files.content(file_id)).content
        found = [orjson.loads(item) for item in content.splitlines()]
        by_id = {item["custom_id"]: item for item in found}
        assert len(by_id) == len(found)
        return by_id


def error_of(batch: Batch) -> str | None:
    """Of a batch that failed."""
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    return batch.errors.data[0].code


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not await condition():
        assert time.monotonic() < deadline_s, "it never happened"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def running_stub(
    state_dir: Path,
    *,
    delay_s: float = 0.0,
    database_url: str | None = None,
    tenants: Tenants | None = None,
    model: StubModel | None = None,
    with_metrics: bool = False,
    **bounds: Any,
) -> AsyncIterator[Stub]:
    model = model or StubModel(delay_s)
    config = BatchesConfig(**({"max_uploads_per_minute": 10_000} | bounds))
    app = create_app(
        state_dir,
        model=model,
        config=config,
        database_url=database_url,
        tenants=tenants,
        with_metrics=with_metrics,
    )
    async with app.router.lifespan_context(app):
        yield Stub(app, model)
