"""What clients send by chance: completions of any kind, turns of sessions, jobs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import orjson

from echo_sgl.types import OFFLINE_SERVICE_TIER

MODEL, ADAPTERS = "fuzzed", ("a", "b", "c")
WORDS = ("def", "class", "return", "import", "self", "value", "index", "for", "in", "not")
CHARS_PER_TOKEN = 4
NUM_TURNS = 4


def draw_body(rng: random.Random, pool_tokens: int) -> dict[str, Any]:
    """A completion of any kind and class, whose prompt fits into the pool."""
    text = draw_text(rng, pool_tokens * rng.choice((0.02, 0.05, 0.1, 0.3, 0.6, 0.8)))
    tokens = rng.choice((1, 2, 8, 30, 100, 200))
    body = {"model": MODEL, "prompt": text, "max_tokens": tokens, "temperature": 0}
    body |= rng.choice(({}, {}, {}, {}, *_extras(rng, text, tokens)))
    # Of answers that may end early SGLang counts a part of what they are allowed.
    body |= {"ignore_eos": True} if rng.random() < 0.5 else {}
    return body | draw_class(rng)


def draw_text(rng: random.Random, most_tokens: float) -> str:
    """A prompt; half of them share their start with one of three."""
    shared = "".join(random.Random(rng.randrange(3)).choices(WORDS, k=60))
    text = (shared if rng.random() < 0.5 else "") + f" {rng.random()} "
    while len(text) < most_tokens * CHARS_PER_TOKEN / 2:
        text += rng.choice(WORDS) + " "
    return text


def draw_class(rng: random.Random) -> dict[str, Any]:
    """Online or offline, each half of the time."""
    return {"service_tier": OFFLINE_SERVICE_TIER} if rng.random() < 0.5 else {}


def _extras(rng: random.Random, text: str, tokens: int) -> Iterator[dict[str, Any]]:
    yield {"echo": True, "logprobs": 1}
    yield {"logprobs": 2}
    yield {"n": rng.choice((2, 3))}
    yield {"prompt": [text, text[:20]]}
    yield {"frequency_penalty": 0.5}
    yield {"min_tokens": min(3, tokens)}
    yield {"stream": True}
    yield {"regex": "[a-z ]{1,40}"}
    yield {"stop": ["e", "self"]}


def draw_turns(rng: random.Random, pool_tokens: int, session_id: str) -> list[dict[str, Any]]:
    """Requests of one session, each of which goes on where the last one ended."""
    bodies = []
    for _ in range(rng.randrange(1, NUM_TURNS + 1)):
        text = draw_text(rng, pool_tokens * rng.choice((0.02, 0.05, 0.1)))
        tokens = rng.choice((1, 8, 30))
        body = {"model": MODEL, "prompt": text, "max_tokens": tokens, "temperature": 0}
        bodies.append(body | draw_class(rng) | {"session_params": {"id": session_id}})
    return bodies


def draw_job(rng: random.Random, pool_tokens: int) -> tuple[bytes, int]:
    """A job file, and how many lines it has."""
    lines = []
    for number in range(rng.choice((1, 5, 20))):
        body = draw_body(rng, pool_tokens)
        body.pop("service_tier", None)
        body.pop("stream", None)
        line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions"}
        lines.append(orjson.dumps(line | {"body": body}))
    return b"\n".join(lines), len(lines)


def beams(body: dict[str, Any]) -> dict[str, Any]:
    """The same prompt as SGLang's own kind of request, with beams."""
    prompt = body["prompt"]
    text = prompt if isinstance(prompt, str) else prompt[0]
    return {"text": text, "sampling_params": {"beam_width": 2, "max_new_tokens": 8}}
