"""Traffic for engine tests: many requests at once, and conditions to wait for."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from eval.server import LOCAL, Server

FLEX = {"service_tier": "flex"}
WAIT_LIMIT_S = 120.0


def completion(prompt: str | list[str], max_tokens: int = 8, **extra: Any) -> dict[str, Any]:
    return {
        "model": "any",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **extra,
    }


def documents(count: int, num_words: int, *, seed: int = 0) -> list[str]:
    """Texts that share nothing, not even their first token."""
    rng = random.Random(seed)
    words = ["def", "class", "return", "import", "self", "value", "index", "for", "in", "not"]
    return [
        " ".join(
            [str(number), *(f"{rng.choice(words)}{rng.randrange(99)}" for _ in range(num_words))]
        )
        for number in range(count)
    ]


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return LOCAL.post(server.url + path, json=body, timeout=WAIT_LIMIT_S)


async def send_all(
    server: Server, bodies: Sequence[dict[str, Any]], path: str = "/v1/completions"
) -> list[httpx.Response]:
    """All requests at once, each on its own connection; answers in the order given."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(verify=False, timeout=httpx.Timeout(600), limits=limits) as client:
        calls = [client.post(server.url + path, json=body) for body in bodies]
        return list(await asyncio.gather(*calls))


def texts(answers: Sequence[httpx.Response]) -> list[str]:
    return [answer.json()["choices"][0]["text"] for answer in answers]


def least_lead(answer: httpx.Response) -> float:
    """By how much the likeliest token was ahead of the next one where it was least, in logprob."""
    choices = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
    ranked = [sorted(one.values()) for one in choices if one and len(one) > 1]
    return min((one[-1] - one[-2] for one in ranked), default=math.inf)


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum of all samples of that name whose labels include the given ones."""
    page = LOCAL.get(f"{server.url}/metrics", timeout=30).text
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def pooled(server: Server) -> int:
    return int(metric(server, "echo_sgl_pool_requests", task="offline"))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.05)


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


def is_idle(server: Server) -> bool:
    loads = LOCAL.get(f"{server.url}/v1/loads", timeout=30).json()["loads"]
    return all(load["num_running_reqs"] + load["num_waiting_reqs"] == 0 for load in loads)
