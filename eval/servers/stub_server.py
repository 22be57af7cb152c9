"""A server with the batch service and no model: `python -m eval.servers.stub_server`.

Store, routes and dispatcher are the real ones, and lines go through the same ASGI interface as
on SGLang; only the answers are made up. It starts in a second, so it can be killed many times.
Without a state directory it is a plain OpenAI-compatible endpoint that takes no batches.

What a prompt says decides its answer: "refuse N" and "break N" are turned away that many times
(503, 500) before they are answered, "bad" is answered with 400, "slow" after a minute, and "die"
ends the server. Any model's name is answered, as by SGLang, and stands in the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from echo_sgl.batches.assembly import add_batch_service
from echo_sgl.batches.dispatch.line_engine import AsgiEngine
from echo_sgl.batches.http.tenants import Tenants
from echo_sgl.batches.lines.job_line import CHAT_URL, COMPLETIONS_URL
from echo_sgl.batches.store.job_store import open_store
from echo_sgl.config import BatchesConfig, load_config

MODEL = "stub"
SLOW_S = 60.0


class StubModel:
    """Answers prompts while `opened`; `calls` gets one line per answer, which survives a kill."""

    def __init__(
        self,
        delay_s: float,
        calls: Path | None = None,
        *,
        name: str | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        self._delay_s = delay_s
        self.name = name or MODEL
        self.adapters = adapters
        self._times: Counter[str] = Counter()
        self.opened = asyncio.Event()
        self.opened.set()
        self._running: dict[str, asyncio.Event] = {}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._calls = os.open(calls, flags, 0o600) if calls else None
        self.num_running = 0
        self.max_running = 0
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, body: dict[str, Any]) -> JSONResponse:
        """One completion."""
        prompt = str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])
        aborted = self._running[body.get("rid", "")] = asyncio.Event()
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await self.opened.wait()
            return await self._reply(body, prompt, aborted)
        finally:
            self.num_running -= 1
            self._running.pop(body.get("rid", ""), None)

    def abort(self, rid: str) -> None:
        if rid in self._running:
            self._running[rid].set()

    async def _reply(
        self, body: dict[str, Any], prompt: str, aborted: asyncio.Event
    ) -> JSONResponse:
        delay_s = SLOW_S if "slow" in prompt else self._delay_s
        if delay_s:
            try:
                async with asyncio.timeout(delay_s):
                    await aborted.wait()
            except TimeoutError:
                pass
            else:
                return _completion(body, "", "abort")
        if prompt.startswith("die"):
            os._exit(1)
        if status := self._failure(prompt):
            return JSONResponse({"message": f"made up: {prompt}"}, status_code=status)
        if self._calls is not None:
            os.write(self._calls, f"{prompt}\n".encode())
        return _completion(body, prompt[::-1], "stop")

    def _failure(self, prompt: str) -> int | None:
        kind, _, times = prompt.partition(" ")
        if kind == "bad":
            return 400
        self._times[prompt] += 1
        status = {"refuse": 503, "break": 500}.get(kind)
        return status if status and self._times[prompt] <= int(times) else None


def _completion(body: dict[str, Any], text: str, reason: str) -> JSONResponse:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    choice = {"index": 0, "text": text, "finish_reason": reason}
    content = {"id": body.get("rid"), "object": "text_completion", "model": body.get("model")}
    return JSONResponse({**content, "choices": [choice], "usage": usage})


def create_app(
    state_dir: Path,
    *,
    model: StubModel,
    config: BatchesConfig,
    database_url: str | None = None,
    tenants: Tenants | None = None,
    with_metrics: bool = False,
) -> FastAPI:
    """The stub with the batch service on it."""
    app = create_plain_app(model)
    engine = AsgiEngine(
        app,
        endpoints=(CHAT_URL, COMPLETIONS_URL),
        api_key=None,
        is_ready=lambda: True,
        abort=model.abort,
    )
    store = open_store(state_dir, database_url)
    add_batch_service(
        app, store, config, engine, tenants or Tenants(None), with_metrics=with_metrics
    )
    return app


def create_plain_app(model: StubModel) -> FastAPI:
    """The stub as an endpoint that answers requests and knows no batches."""
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """As SGLang lists a model and its LoRA adapters."""
        common = {"object": "model", "owned_by": "sglang"}
        adapters = [{"id": name, "parent": model.name, **common} for name in model.adapters]
        return {"object": "list", "data": [{"id": model.name, "parent": None, **common}, *adapters]}

    @app.post(COMPLETIONS_URL)
    @app.post(CHAT_URL)
    async def completions(request: Request) -> JSONResponse:
        return await model.answer(await request.json())

    return app


def main() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser(prog="python -m eval.servers.stub_server", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--state-dir", type=Path)
    parser.add_argument("--database-url")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--calls", type=Path)
    parser.add_argument("--api-key", help="the batch service asks for it")
    parser.add_argument("--adapter", action="append", default=[], help="a LoRA adapter to list")
    given = parser.parse_args()
    serve(
        given.port,
        given.state_dir,
        delay_s=given.delay_ms / 1000,
        calls=given.calls,
        config=load_config(given.config).batches if given.config else BatchesConfig(),
        database_url=given.database_url,
        api_key=given.api_key,
        adapters=given.adapter,
    )


def serve(
    port: int,
    state_dir: Path | None,
    *,
    delay_s: float,
    calls: Path | None,
    config: BatchesConfig,
    database_url: str | None = None,
    api_key: str | None = None,
    adapters: Sequence[str] = (),
) -> None:
    """Serve in this process until it ends."""
    model = StubModel(delay_s, calls, adapters=adapters)
    app = create_plain_app(model)
    if state_dir is not None:
        app = create_app(
            state_dir,
            model=model,
            config=config,
            database_url=database_url,
            tenants=Tenants(api_key),
        )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
