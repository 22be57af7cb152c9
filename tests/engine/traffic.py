"""Traffic for engine tests: many requests at once, and conditions to wait for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from eval.servers.server import LOCAL, Server

FLEX = {"service_tier": "flex"}
WAIT_LIMIT_S = 120.0

# In logprob. Float32 sums in another order differ by about 2e-6.
LEAST_LEAD = 1e-5


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


class UntilTie(str):
    """A text that is equal to whatever begins with it: behind it two tokens were as likely as
    each other, and rounding, which hangs on who is in a batch, decided."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other.startswith(str(self))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def decided_texts(
    server: Server, bodies: Sequence[dict[str, Any]], *, least_lead: float = LEAST_LEAD
) -> list[str]:
    """What the server answers, as far as rounding decides nothing. Prompts that avoid that in one
    place do not in another: the demo tokenizer is trained on the running Python's own sources.

    Errors: half of the tokens or more come after such a tie, so that comparing would prove little.
    """
    asked = [{**body, "logprobs": 2} for body in bodies]
    answers = asyncio.run(send_all(server, asked))
    decided = [num_decided(answer, least_lead) for answer in answers]
    wanted = [body["max_tokens"] for body in bodies]
    assert sum(decided) * 2 > sum(wanted), f"ties: {decided} of {wanted} tokens, other prompts"
    return [
        text if count == num_tokens else _until(server, body, count)
        for text, body, count, num_tokens in zip(
            texts(answers), bodies, decided, wanted, strict=True
        )
    ]


def _until(server: Server, body: dict[str, Any], num_tokens: int) -> UntilTie:
    """The first tokens alone, less the bytes of a character that is not whole with them."""
    if num_tokens == 0:
        return UntilTie()
    answer = post(server, "/v1/completions", {**body, "max_tokens": num_tokens})
    return UntilTie(texts([answer])[0].rstrip("\ufffd"))


def num_decided(answer: httpx.Response, least_lead: float) -> int:
    """Tokens before the first whose logprob is ahead of the next best by less than that."""
    steps = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
    return next((at for at, best in enumerate(steps) if _lead(best) < least_lead), len(steps))


def _lead(best: dict[str, float]) -> float:
    """Two tokens that print the same way share an entry: then nobody can say."""
    second, first = sorted(best.values()) if len(best) == 2 else (0.0, 0.0)
    return first - second


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
