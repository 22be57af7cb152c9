"""What overlap scheduling costs a first token where a CPU runs the steps.

Two servers with SGLang's own scheduler take turns, one as our platform starts it, one with overlap
as SGLang would: a prompt comes while others decode, whose gaps are measured, too.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx

from echo_sgl.cpu import OVERLAP_ENV
from eval.paths import LOGS_DIR
from eval.servers.machine import machine
from eval.servers.models import SIZES, SPECIAL_TOKENS, demo_model
from eval.servers.server import CPU_ARGS, Server, running_server

MODEL_SIZE = "base"
ARGS = (*CPU_ARGS, "--max-total-tokens", "20000", "--random-seed", "0", "--sleep-on-idle")
ROUNDS = 20
NUM_DECODES, DECODE_PROMPT_TOKENS, DECODE_TOKENS = 4, 200, 60
PROMPT_TOKENS = 300
# Others have made so many tokens when the prompt is sent.
TOKENS_BEFORE = 10

Figures = tuple[float, float]  # seconds to the first token, and between those of the others


def run() -> list[dict[str, Any]]:
    """Rows for `make bench`: medians of paired rounds, the order alternating."""
    model, log = demo_model(MODEL_SIZE), LOGS_DIR / "bench-overlap.log"
    overlapped = {OVERLAP_ENV: "1"}
    with (
        running_server(model, ARGS, log_path=log) as ours,
        running_server(model, ARGS, env=overlapped, log_path=log.with_suffix(".on.log")) as stock,
    ):
        rng = random.Random(0)
        for server in (ours, stock):
            _round(server, rng)
        pairs = []
        for number in range(ROUNDS):
            order = (ours, stock) if number % 2 else (stock, ours)
            found = {server.url: _round(server, rng) for server in order}
            pairs.append((found[ours.url], found[stock.url]))
    names = (f"first token beside {NUM_DECODES} decodes", f"gap of the {NUM_DECODES} decodes")
    return [
        _row(name, [(a[place], b[place]) for a, b in pairs]) for place, name in enumerate(names)
    ]


def _row(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    ours_s, stock_s = (statistics.median(values) for values in zip(*pairs, strict=True))
    return {
        "name": f"cpu {MODEL_SIZE}: {name}, overlap scheduling off and on",
        "ours": round(ours_s * 1e3, 2),
        "stock": round(stock_s * 1e3, 2),
        "ratio": round(statistics.median(ours / stock for ours, stock in pairs), 3),
        "unit": "ms",
        "n": len(pairs),
        "machine": machine(),
    }


def _round(server: Server, rng: random.Random) -> Figures:
    return asyncio.run(_beside_decodes(server, rng))


async def _beside_decodes(server: Server, rng: random.Random) -> Figures:
    async with httpx.AsyncClient(base_url=server.url, verify=False, timeout=120) as client:
        under_way = asyncio.Event()
        others = [
            asyncio.create_task(
                _stream(client, _tokens(rng, DECODE_PROMPT_TOKENS), DECODE_TOKENS, under_way)
            )
            for _ in range(NUM_DECODES)
        ]
        await under_way.wait()
        start_s = time.perf_counter()
        first_s, *_ = await _stream(client, _tokens(rng, PROMPT_TOKENS), 8)
        gaps_s = [
            (times_s[-1] - times_s[0]) / (len(times_s) - 1)
            for times_s in await asyncio.gather(*others)
        ]
    return first_s - start_s, statistics.mean(gaps_s)


async def _stream(
    client: httpx.AsyncClient,
    prompt: list[int],
    num_tokens: int,
    under_way: asyncio.Event | None = None,
) -> list[float]:
    """When each chunk of the answer came; `under_way` is set by the `TOKENS_BEFORE`-th."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    times_s: list[float] = []
    async with client.stream("POST", "/generate", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times_s.append(time.perf_counter())
                if under_way is not None and len(times_s) == TOKENS_BEFORE:
                    under_way.set()
    return times_s


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(len(SPECIAL_TOKENS), SIZES[MODEL_SIZE].vocab_size) for _ in range(count)]
