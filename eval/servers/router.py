"""SGLang's own router (package sglang-router) before servers, from an environment of its own."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from eval.servers.server import LOCAL, ServerStartError, free_port

READY_TIMEOUT_S = 120.0
PROBED_PATHS = ("/v1/models", "/v1/files", "/v1/batches", "/engine_metrics")


@contextlib.contextmanager
def running_router(python: Path, urls: Sequence[str], log_path: Path) -> Iterator[str]:
    """Run the router until the block ends; gives its URL. `python` has sglang_router installed.

    Errors: `ServerStartError` when it does not become ready.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--worker-urls", *urls], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait_ready(url, process, log_path)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def version_of(python: Path) -> str:
    """Which sglang-router that is."""
    code = "from importlib.metadata import version; print(version('sglang-router'))"
    return subprocess.check_output([str(python), "-c", code], text=True).strip()


def probe(url: str, model: str) -> dict[str, Any]:
    """What of the servers can be reached through the router."""
    with httpx.Client(base_url=url, timeout=60) as client:
        statuses = {path: client.get(path).status_code for path in PROBED_PATHS}
        fields = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        for tier in ("auto", "flex"):
            answer = client.post("/v1/chat/completions", json={**fields, "service_tier": tier})
            statuses[f"/v1/chat/completions, {tier}"] = answer.status_code
        page = client.get("/engine_metrics").text
    classes = [f'task="{name}"' in page for name in ("online", "offline")]
    return {"statuses": statuses, "metrics_by_class": all(classes) and "worker_addr" in page}


def _wait_ready(url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            if LOCAL.get(f"{url}/readiness", timeout=10).status_code == 200:
                return
        time.sleep(0.2)
    log = log_path.read_text(encoding="utf-8", errors="replace")
    raise ServerStartError(f"the router is not ready; the end of its log:\n{log[-2000:]}")
