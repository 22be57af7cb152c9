"""Small traces and servers for simulations."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Sequence
from typing import Any

from echo_sgl.config import parse_config
from echo_sgl.estimators.batch_time import create_batch_time
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.sim.server_config import ServerConfig
from echo_sgl.sim.workload import Trace
from echo_sgl.types import Task

COEFFICIENTS = {
    "prefill_area": 2e-10,
    "prefill_token": 2.5e-5,
    "prefill_token_beyond": 2.5e-5,
    "prefill_cached": 0.0,
    "prefill_step": 0.004,
    "prefill_knee": 0.0,
    "decode_max_token": 0.0,
    "decode_token": 4e-8,
    "decode_request": 5e-5,
    "decode_request_beyond": 5e-5,
    "decode_step": 0.012,
    "decode_knee": 0.0,
    "mixing": 0.7,
}
SLO = {"slo": {"ttft_s": 1.0, "tpot_s": 0.05}}


def device(captured_batch_sizes: Sequence[int] = ()) -> BatchTimeModel:
    model = create_batch_time("pooled", captured_batch_sizes=captured_batch_sizes)
    return model.with_coefficients(COEFFICIENTS)


def server(sections: dict[str, Any] | None = None, **changes: Any) -> ServerConfig:
    config = ServerConfig(device=device(), kv_tokens=20_000, echo=parse_config(sections or SLO))
    return dataclasses.replace(config, **changes)


def online_trace(num: int, *, rate_rps: float, seed: int = 0, most_tokens: int = 1500) -> Trace:
    """Poisson arrivals with prompts that nobody shares."""
    rng, at_s, times = random.Random(seed), 0.0, array("d")
    for _ in range(num):
        at_s += rng.expovariate(rate_rps)
        times.append(at_s)
    prompts = array("q", (rng.randint(1, most_tokens) for _ in range(num)))
    answers = array("q", (rng.randint(1, 120) for _ in range(num)))
    return Trace(Task.ONLINE, times, prompts, answers, max_new_tokens=256)


def offline_trace(num: int, *, num_prefixes: int, seed: int = 1) -> Trace:
    """Lines that come at once; `num_prefixes` groups share 512 tokens each."""
    rng = random.Random(seed)
    blocks, prompts = [], array("q")
    for line in range(num):
        start = rng.randrange(num_prefixes) * 100
        own = range(10**6 + line * 10, 10**6 + line * 10 + rng.randint(1, 4))
        blocks.append(array("q", (*range(start, start + 8), *own)))
        prompts.append(64 * len(blocks[-1]) - rng.randrange(64))
    answers = array("q", (rng.randint(1, 60) for _ in range(num)))
    times = array("d", (0.0,)) * num
    return Trace(Task.OFFLINE, times, prompts, answers, blocks=blocks, max_new_tokens=64)
