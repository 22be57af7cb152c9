"""Servers and requests by chance: all are answered, and nothing is held at the end.

    python -m eval.fuzz --minutes 20 --seed 1

Each round starts a server with other arguments, another config and a small pool, and sends what
clients send in any mixture: both classes, lengths up to the pool's, logprobs of prompts, several
answers, penalties, beams, clients that go away, flushes. SGLang's strict memory check is on. Exit
code 1 when a server ended, did not answer, or held something; `--seed` and `--round` do it again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from echo_sgl.cpu import OVERLAP_ENV
from echo_sgl.types import OFFLINE_SERVICE_TIER
from eval.machine import device_args
from eval.models import demo_model
from eval.server import Server, ServerStartError, running_server
from eval.soak import ROOT, STRICT, check_nothing_is_held

ANSWER_LIMIT_S = 120.0
MOST_AT_ONCE = (10, 30, 60)
# Less than steps take, so that decodes sit out, places change hands and first tokens are late.
PROMISES = "[slo]\nttft_s = 0.3\ntpot_s = 0.02\n"
PRESETS = ("echo", "hygen", "bros", "ooco", "bs-e-s")
SETTINGS = (
    "",
    '[steps]\nonline_chunks = "slack"\n',
    "[steps]\nlate_wait_s = 2.0\n",
    "[steps]\nplace_gain = 1.0\nplace_share = 0.4\n",
    "[steps]\npark = false\n",
    '[reserve]\npredictor = "off"\n',
    '[cache]\norder = "stock"\n',
)
# With which share of the servers.
FLAGS = (
    (0.3, ("--page-size", "16")),
    (0.3, ("--enable-mixed-chunk",)),
    (0.15, ("--disable-radix-cache",)),
    (0.2, ("--enable-hierarchical-cache", "--hicache-ratio", "2")),
    (0.15, ("--enable-priority-scheduling",)),
)
# How many more requests a server starts than their answers would allow, at 0.02: nearly all.
CONSERVATIVENESS = (0.02, 0.3, 1.0)
WORDS = ("def", "class", "return", "import", "self", "value", "index", "for", "in", "not")
CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """A server; `config`: a preset's name, or TOML. `overlaps`: also where a CPU runs it."""

    pool_tokens: int
    args: tuple[str, ...]
    config: str
    overlaps: bool

    @property
    def is_preset(self) -> bool:
        return self.config in PRESETS

    def __str__(self) -> str:
        config = self.config if self.is_preset else " ".join(self.config.split())
        return f"{config}; {' '.join(self.args)}{'; overlap' if self.overlaps else ''}"


def draw_variant(rng: random.Random) -> Variant:
    """A server of few tokens and places."""
    pool_tokens = rng.choice((600, 1200, 2000, 4000))
    flags = [flag for share, flag in FLAGS if rng.random() < share]
    names = {flag[0] for flag in flags}
    if "--disable-radix-cache" in names:  # SGLang wants a tree for its host tier
        flags = [flag for flag in flags if flag[0] != "--enable-hierarchical-cache"]
    is_preset = rng.random() < 0.5
    config = rng.choice(PRESETS) if is_preset else PROMISES + rng.choice(SETTINGS)
    sizes = {
        "--max-total-tokens": pool_tokens,
        "--chunked-prefill-size": rng.choice((32, 64, 128, 256)),
        "--max-running-requests": rng.choice((3, 6, 16)),
        "--schedule-conservativeness": rng.choice(CONSERVATIVENESS),
    }
    args = [text for name, value in sizes.items() for text in (name, str(value))]
    # Promises as short as these would be refused after the warm-up.
    more = () if is_preset else ("--skip-server-warmup",)
    args += [one for flag in flags for one in flag]
    return Variant(pool_tokens, (*args, *more), config, overlaps=rng.random() < 0.5)


def draw_body(rng: random.Random, pool_tokens: int) -> dict[str, Any]:
    """A completion of any kind and class, whose prompt fits into the pool."""
    most_tokens = pool_tokens * rng.choice((0.02, 0.05, 0.1, 0.3, 0.6, 0.8))
    shared = "".join(random.Random(rng.randrange(3)).choices(WORDS, k=60))
    text = (shared if rng.random() < 0.5 else "") + f" {rng.random()} "
    while len(text) < most_tokens * CHARS_PER_TOKEN / 2:
        text += rng.choice(WORDS) + " "
    tokens = rng.choice((1, 2, 8, 30, 100, 200))
    body = {"model": "any", "prompt": text, "max_tokens": tokens, "temperature": 0}
    body |= rng.choice(({}, {}, {}, {}, *_extras(rng, text, tokens)))
    # Of answers that may end early SGLang counts a part of what they are allowed.
    body |= {"ignore_eos": True} if rng.random() < 0.5 else {}
    return body | ({"service_tier": OFFLINE_SERVICE_TIER} if rng.random() < 0.5 else {})


def _extras(rng: random.Random, text: str, tokens: int) -> Iterator[dict[str, Any]]:
    yield {"echo": True, "logprobs": 1}
    yield {"logprobs": 2}
    yield {"n": rng.choice((2, 3))}
    yield {"prompt": [text, text[:20]]}
    yield {"frequency_penalty": 0.5}
    yield {"min_tokens": min(3, tokens)}


class Clients:
    """Send for some seconds, and count how requests ended."""

    def __init__(self, server: Server, rng: random.Random, pool_tokens: int) -> None:
        self._url, self._rng, self._pool_tokens = server.url, rng, pool_tokens
        self.ends: Counter[str] = Counter()

    async def play(self, seconds: float) -> None:
        """Errors: those of httpx where the server gives no answer."""
        limits = httpx.Limits(max_connections=None)
        until_s = time.monotonic() + seconds
        async with (
            httpx.AsyncClient(timeout=ANSWER_LIMIT_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            tasks: set[asyncio.Task[None]] = set()
            while time.monotonic() < until_s:
                for _ in range(self._rng.choice((1, 1, 4, 12))):
                    if len(tasks) < self._rng.choice(MOST_AT_ONCE):
                        tasks.add(task := group.create_task(self._one(client)))
                        task.add_done_callback(tasks.discard)
                if self._rng.random() < 0.01:
                    await client.post(f"{self._url}/flush_cache")
                await asyncio.sleep(self._rng.choice((0.0, 0.02, 0.1, 0.4)))

    async def _one(self, client: httpx.AsyncClient) -> None:
        path, body = "/v1/completions", draw_body(self._rng, self._pool_tokens)
        if self._rng.random() < 0.02:
            path, body = "/generate", _beams(body)
        leaves_after_s = self._rng.uniform(0.01, 1.5) if self._rng.random() < 0.12 else None
        try:
            async with asyncio.timeout(leaves_after_s):
                reply = await client.post(self._url + path, json=body)
        except TimeoutError:
            self.ends["left"] += 1
            return
        self.ends[f"answered {reply.status_code}"] += 1


def _beams(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body["prompt"]
    text = prompt if isinstance(prompt, str) else prompt[0]
    return {"text": text, "sampling_params": {"beam_width": 2, "max_new_tokens": 8}}


def play_round(variant: Variant, rng: random.Random, seconds: float, log_path: Path) -> str:
    """One server's life; what went wrong, or how requests ended after "ok"."""
    with tempfile.TemporaryDirectory() as folder:
        config: Path | str = variant.config
        if not variant.is_preset:
            config = Path(folder) / "fuzz.toml"
            config.write_text(variant.config)
        args = (*device_args(), "--enable-metrics", "--sleep-on-idle", *variant.args)
        env = STRICT | ({OVERLAP_ENV: "1"} if variant.overlaps else {})
        try:
            with running_server(
                demo_model("tiny"), args, config=config, env=env, log_path=log_path
            ) as server:
                clients = Clients(server, rng, variant.pool_tokens)
                asyncio.run(clients.play(seconds))
                check_nothing_is_held(server)
        except (ServerStartError, RuntimeError, ExceptionGroup, httpx.HTTPError) as error:
            return f"{type(error).__name__}: {error}; {log_path} says more"
    broken = [end for end in clients.ends if end.startswith("answered 5")]
    ends = ", ".join(f"{end} {number}" for end, number in sorted(clients.ends.items()))
    return f"{', '.join(broken)}; {log_path} says more" if broken else f"ok: {ends}"


def main(argv: list[str]) -> int:
    """Rounds until the time is over; a round's server and requests follow from seed and number."""
    parser = argparse.ArgumentParser(prog="python -m eval.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, help="this one only")
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests in each round")
    options = parser.parse_args(argv)
    console, num_broken = Console(width=200), 0
    until_s, number = time.monotonic() + 60 * options.minutes, options.round or 0
    while time.monotonic() < until_s:
        rng = random.Random(f"{options.seed}/{number}")
        variant = draw_variant(rng)
        log_path = ROOT / "build" / "logs" / f"fuzz-{options.seed}-{number}.log"
        said = play_round(variant, rng, options.seconds, log_path)
        num_broken += not said.startswith("ok")
        console.print(f"[{number}] {variant}\n    {said}", markup=False, highlight=False)
        number += 1
        if options.round is not None:
            break
    return min(1, num_broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
