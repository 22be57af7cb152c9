"""What a job gains when its requests start in lots (`steps.gather`) and not at once.

Two Echo servers take turns with the same job of short prompts, most of each in the cache, whose
answers end one after the other: alone, and beside online requests that decode meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx

from eval.paths import BUILD_DIR, LOGS_DIR
from eval.servers.machine import machine
from eval.servers.models import SIZES, SPECIAL_TOKENS, demo_model
from eval.servers.server import CPU_ARGS, Server, running_server

MODEL_SIZE = "small"
NUM_PLACES = 32
ARGS = (
    *CPU_ARGS,
    *("--max-running-requests", str(NUM_PLACES)),
    *("--max-total-tokens", "30000"),
    *("--random-seed", "0"),
    "--sleep-on-idle",
)
CONFIG = """[slo]
ttft_s = 2.0
tpot_s = 0.2
[reserve]
predictor = "off"
[steps]
gather = {gather}
"""
ROUNDS = 8
NUM_LINES, SHARED_TOKENS, OWN_TOKENS, LONGEST_ANSWER = 240, 200, 10, 63
NUM_ONLINE, ONLINE_PROMPT_TOKENS, ONLINE_TOKENS = 4, 40, 60
FLEX = {"custom_params": {"service_tier": "flex"}}

Body = dict[str, Any]


def run() -> list[dict[str, Any]]:
    """Rows for `make bench`: medians of paired rounds, the order alternating."""
    with _server("true") as lots, _server("false") as at_once:
        rng = random.Random(0)
        for server in (lots, at_once):
            _round(server, rng, num_online=NUM_ONLINE)
        alone = [_pair(lots, at_once, rng, number, num_online=0) for number in range(ROUNDS)]
        beside = [
            _pair(lots, at_once, rng, number, num_online=NUM_ONLINE) for number in range(ROUNDS)
        ]
    what = f"{NUM_LINES} lines of {SHARED_TOKENS} cached and {OWN_TOKENS} new tokens"
    return [
        _row(f"job: {what}, alone, started in lots and at once", 0, alone),
        _row(f"job: the same beside {NUM_ONLINE} online decodes", 0, beside),
        _row(f"time per token of these {NUM_ONLINE}", 1, beside),
    ]


def _server(gather: str) -> Any:
    config = BUILD_DIR / f"bench-lots-{gather}.toml"
    config.parent.mkdir(exist_ok=True)
    config.write_text(CONFIG.format(gather=gather), encoding="utf-8")
    log = LOGS_DIR / f"bench-lots-{gather}.log"
    return running_server(demo_model(MODEL_SIZE), ARGS, config=config, log_path=log)


Figures = tuple[float, float]  # seconds of the job, and per token of the online requests


def _pair(
    lots: Server, at_once: Server, rng: random.Random, number: int, *, num_online: int
) -> tuple[Figures, Figures]:
    """The same requests for both servers."""
    seed = rng.random()
    order = (lots, at_once) if number % 2 else (at_once, lots)
    found = {one.url: _round(one, random.Random(seed), num_online=num_online) for one in order}
    return found[lots.url], found[at_once.url]


def _row(name: str, place: int, pairs: Sequence[tuple[Figures, Figures]]) -> dict[str, Any]:
    ours_s = [ours[place] for ours, _ in pairs]
    stock_s = [stock[place] for _, stock in pairs]
    ratios = sorted(ours / stock for ours, stock in zip(ours_s, stock_s, strict=True))
    return {
        "name": f"cpu {MODEL_SIZE}: {name}, ratios {ratios[0]:.2f} to {ratios[-1]:.2f}",
        "ours": round(statistics.median(ours_s) * 1e3, 2),
        "stock": round(statistics.median(stock_s) * 1e3, 2),
        "ratio": round(statistics.median(ratios), 3),
        "unit": "ms",
        "n": len(pairs),
        "machine": machine(),
    }


def _round(server: Server, rng: random.Random, *, num_online: int) -> Figures:
    return asyncio.run(_job_beside(server, rng, num_online))


async def _job_beside(server: Server, rng: random.Random, num_online: int) -> Figures:
    shared = _tokens(rng, SHARED_TOKENS)
    job = _body(
        [shared + _tokens(rng, OWN_TOKENS) for _ in range(NUM_LINES)],
        [rng.randint(1, LONGEST_ANSWER) for _ in range(NUM_LINES)],
        **FLEX,
    )
    online = _body(
        [_tokens(rng, ONLINE_PROMPT_TOKENS) for _ in range(num_online)],
        [ONLINE_TOKENS] * num_online,
    )
    async with httpx.AsyncClient(base_url=server.url, verify=False, timeout=300) as client:
        others = asyncio.create_task(_seconds(client, online)) if num_online else None
        job_s = await _seconds(client, job)
        online_s = await others if others is not None else 0.0
    return job_s, online_s / ONLINE_TOKENS


def _body(prompts: list[list[int]], answer_tokens: list[int], **sampling: Any) -> Body:
    params = [
        {"temperature": 0, "max_new_tokens": num, "ignore_eos": True, **sampling}
        for num in answer_tokens
    ]
    return {"input_ids": prompts, "sampling_params": params}


async def _seconds(client: httpx.AsyncClient, body: Body) -> float:
    start_s = time.perf_counter()
    (await client.post("/generate", json=body)).raise_for_status()
    return time.perf_counter() - start_s


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(len(SPECIAL_TOKENS), SIZES[MODEL_SIZE].vocab_size) for _ in range(count)]
