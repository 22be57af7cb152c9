"""Mixed load for a long time on a small pool, SGLang's strict memory check on.

    python -m eval.soak --minutes 20
    python -m eval.soak --name soak-host-tier \\
        --server-args="--enable-hierarchical-cache --hicache-ratio 3"

Chat and job requests over shared documents, with aborts, clients that go away and flushes in
between. SGLang ends the server when free, cached and locked tokens do not add up to the pool
after a step; at the end nothing may run or wait, and after a flush nothing may be held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from echo_sgl.types import OFFLINE_SERVICE_TIER
from eval.options import folder_name, positive
from eval.paths import LOGS_DIR, RESULTS_DIR
from eval.servers.machine import device_args, provenance
from eval.servers.models import demo_model
from eval.servers.server import LOCAL, Server, running_server

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
POOL_TOKENS = 6000
SERVER_ARGS = (
    "--max-total-tokens",
    f"{POOL_TOKENS}",
    "--max-running-requests",
    "24",
    "--chunked-prefill-size",
    "256",
    "--enable-metrics",
)
NUM_DOCUMENTS = 12
DOCUMENT_WORDS = 250
NUM_CLIENTS = 24
IDLE_LIMIT_S = 120.0


class Soak:
    """What the clients do, and a count of how each of their requests ended."""

    def __init__(self, server: Server, seed: int, until_s: float) -> None:
        self.url, self.random, self.until_s = server.url, random.Random(seed), until_s
        self.ends: Counter[str] = Counter()
        words = ["def", "class", "return", "import", "self", "value", "index", "for"]
        self.documents = [
            f"{number} " + " ".join(self.random.choices(words, k=DOCUMENT_WORDS))
            for number in range(NUM_DOCUMENTS)
        ]

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            clients = [self.client(client) for _ in range(NUM_CLIENTS)]
            await asyncio.gather(*clients, self.disturb(client))

    async def client(self, client: httpx.AsyncClient) -> None:
        actions: list[Callable[[httpx.AsyncClient], Awaitable[None]]]
        actions = [self.chat, self.job_line, self.job_line, self.leave]
        while time.monotonic() < self.until_s:
            await self.random.choice(actions)(client)

    async def chat(self, client: httpx.AsyncClient) -> None:
        await asyncio.sleep(self.random.expovariate(1.0))
        await self.complete(client, self.body(self.random.randrange(30)))

    async def job_line(self, client: httpx.AsyncClient) -> None:
        await self.complete(client, self.body(250) | {"service_tier": OFFLINE_SERVICE_TIER})

    async def leave(self, client: httpx.AsyncClient) -> None:
        """A client that hangs up before its answer is there."""
        tier = {"service_tier": self.random.choice(["auto", OFFLINE_SERVICE_TIER])}
        call = self.complete(client, self.body(200) | tier)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call, self.random.uniform(0.01, 2.0))
            return
        self.ends["left"] += 1

    async def disturb(self, client: httpx.AsyncClient) -> None:
        """Abort everything or ask for a flush, now and then."""
        while time.monotonic() < self.until_s:
            await asyncio.sleep(self.random.uniform(2, 15))
            if self.random.random() < 0.5:
                await client.post(f"{self.url}/abort_request", json={"abort_all": True})
                self.ends["abort of all"] += 1
            else:
                reply = await client.post(f"{self.url}/flush_cache")
                self.ends["flush" if reply.status_code == 200 else "flush refused"] += 1

    async def complete(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        reply = await client.post(f"{self.url}/v1/completions", json=body)
        self.ends[f"answered {reply.status_code}"] += 1

    def body(self, most_words: int) -> dict[str, Any]:
        document = self.random.choice(self.documents).split()
        start = " ".join(document[: self.random.randrange(most_words + 1)])
        return {
            "model": "any",
            "prompt": f"{start} question {self.random.randrange(40)}",
            "max_tokens": self.random.randrange(1, 60),
            "temperature": 0,
            "ignore_eos": True,
        }


def sample(server: Server, name: str) -> float:
    """The sum of a metric's samples. Errors: `RuntimeError` when the server has no such metric."""
    page = LOCAL.get(f"{server.url}/metrics", timeout=30).text
    families = text_string_to_metric_families(page)
    values = [one.value for family in families for one in family.samples if one.name == name]
    if not values:
        raise RuntimeError(f"the server's /metrics has no {name}")
    return sum(values)


def check_nothing_is_held(server: Server) -> dict[str, float]:
    """After the load: nothing runs or waits, and a flush frees the whole pool.

    Errors: `RuntimeError` says what is still held.
    """
    deadline_s = time.monotonic() + IDLE_LIMIT_S
    while LOCAL.post(f"{server.url}/flush_cache", timeout=60).status_code != 200:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the server was not idle {IDLE_LIMIT_S:.0f} s after the load")
        time.sleep(1)
    if server.process.poll() is not None:
        raise RuntimeError("the server ended; its log says why")
    # The gauges are refreshed once a second.
    while any((held := _held(server)).values()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"after a flush of an idle server these are not 0: {held}")
        time.sleep(1)
    return held


def _held(server: Server) -> dict[str, float]:
    return {
        name: sample(server, name)
        for name in ("sglang:num_used_tokens", "echo_sgl_pool_requests", "echo_sgl_cached_tokens")
    }


def main(argv: list[str]) -> None:
    """Run the load, check the server, write `eval/results/<name>/summary.json`."""
    parser = argparse.ArgumentParser(prog="python -m eval.soak", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="echo")
    parser.add_argument("--name", type=folder_name, default="soak")
    parser.add_argument("--server-args", default="", help="more of `sglang serve`, as one string")
    options = parser.parse_args(argv)
    log_path = LOGS_DIR / f"{options.name}.log"
    with running_server(
        demo_model("tiny"),
        (*device_args(), *SERVER_ARGS, *shlex.split(options.server_args)),
        config=options.config,
        env=STRICT,
        log_path=log_path,
    ) as server:
        soak = Soak(server, options.seed, time.monotonic() + options.minutes * 60)
        asyncio.run(soak.run())
        evicted = sample(server, "echo_sgl_evicted_tokens_total")
        retractions = sample(server, "echo_sgl_retractions_total")
        held = check_nothing_is_held(server)
    if broken := [end for end in soak.ends if end.startswith("answered 5")]:
        raise RuntimeError(f"the server broke: {', '.join(broken)}; {log_path} says why")
    summary = {
        "options": vars(options),
        "pool_tokens": POOL_TOKENS,
        **provenance(),
        "ends": dict(soak.ends),
        "evicted_tokens": evicted,
        "retractions": retractions,
        "held_after_flush": held,
    }
    folder = RESULTS_DIR / options.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
    Console().print_json(data=summary)


if __name__ == "__main__":
    main(sys.argv[1:])
