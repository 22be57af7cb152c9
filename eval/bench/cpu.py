"""What our CPU attention backend saves against SGLang's own, both behind a real server."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.paths import LOGS_DIR
from eval.servers.machine import machine
from eval.servers.models import SIZES, SPECIAL_TOKENS, demo_model
from eval.servers.server import CPU_ARGS, LOCAL, Server, running_server

MODEL_SIZE = "small"
POOL_ARGS = (*CPU_ARGS, "--max-total-tokens", "40000", "--random-seed", "0")
STOCK_ARGS = ("--attention-backend", "torch_native")
PROMPT_TOKENS = 8_000
PROMPT_ROUNDS = 5
DECODE_BATCH = 16  # 16 contexts and their answers just fit the KV pool
DECODE_CONTEXT_TOKENS = 2_000
DECODE_STEPS = 32
DECODE_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of one server: time with all but one prompt token cached over the cold time,
    and seconds per decode step of a full batch."""

    cached_share: float
    decode_step_s: float


def run() -> list[dict[str, Any]]:
    """Measure both backends, one server after the other, each against itself within its run."""
    ours, stock = _measure("echo_cpu", ()), _measure("torch_native", STOCK_ARGS)
    return [
        _row(
            f"cpu {MODEL_SIZE}: prompt of {PROMPT_TOKENS} tokens, all but one cached",
            (ours.cached_share * 100, stock.cached_share * 100),
            unit="% of cold",
            rounds=PROMPT_ROUNDS,
        ),
        _row(
            f"cpu {MODEL_SIZE}: decode step, {DECODE_BATCH} x {DECODE_CONTEXT_TOKENS} tokens",
            (ours.decode_step_s * 1e3, stock.decode_step_s * 1e3),
            unit="ms",
            rounds=DECODE_ROUNDS,
        ),
    ]


def _row(
    name: str, ours_and_stock: tuple[float, float], *, unit: str, rounds: int
) -> dict[str, Any]:
    ours, stock = ours_and_stock
    return {
        "name": name,
        "ours": round(ours, 2),
        "stock": round(stock, 2),
        "ratio": round(ours / stock, 3),
        "unit": unit,
        "n": rounds,
        "machine": machine(),
    }


def _measure(name: str, args: Sequence[str]) -> Measured:
    log_path = LOGS_DIR / f"bench-{name}.log"
    model = demo_model(MODEL_SIZE)
    with running_server(model, (*POOL_ARGS, *args), log_path=log_path) as server:
        return Measured(_cached_share(server), _decode_step_s(server))


def _cached_share(server: Server) -> float:
    cold_s, cached_s = [], []
    for prompt in _random_prompts(PROMPT_ROUNDS + 1, PROMPT_TOKENS, seed=1):
        cold_s.append(_generate_s(server, [prompt], 1, min_cached_tokens=0))
        cached_s.append(_generate_s(server, [prompt], 1, min_cached_tokens=PROMPT_TOKENS - 1))
    # The first round also pays for whatever the process does only once.
    return statistics.median(cached_s[1:]) / statistics.median(cold_s[1:])


def _decode_step_s(server: Server) -> float:
    LOCAL.post(f"{server.url}/flush_cache").raise_for_status()
    prompts = _random_prompts(DECODE_BATCH, DECODE_CONTEXT_TOKENS, seed=2)
    _generate_s(server, prompts, 1, min_cached_tokens=0)
    steps_s = []
    for _ in range(DECODE_ROUNDS):
        short_s, long_s = (
            _generate_s(server, prompts, tokens, min_cached_tokens=DECODE_CONTEXT_TOKENS - 1)
            for tokens in (1, 1 + DECODE_STEPS)
        )
        steps_s.append((long_s - short_s) / DECODE_STEPS)
    return statistics.median(steps_s)


def _generate_s(
    server: Server, prompts: Sequence[Sequence[int]], num_tokens: int, *, min_cached_tokens: int
) -> float:
    """Seconds until the whole batch is answered.

    Errors: `RuntimeError` when the cache did not hold what the figure is about.
    """
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    start_s = time.perf_counter()
    response = LOCAL.post(
        f"{server.url}/generate",
        json={"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling},
        timeout=600,
    ).raise_for_status()
    elapsed_s = time.perf_counter() - start_s
    cached = min(answer["meta_info"]["cached_tokens"] for answer in response.json())
    if cached < min_cached_tokens:
        raise RuntimeError(f"{cached} prompt tokens were cached, {min_cached_tokens} should be")
    return elapsed_s


def _random_prompts(count: int, tokens: int, *, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    vocabulary = range(len(SPECIAL_TOKENS), SIZES[MODEL_SIZE].vocab_size)
    return [draw.choices(vocabulary, k=tokens) for _ in range(count)]
