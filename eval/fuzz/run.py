"""Servers and requests by chance: all are answered, and nothing is held at the end.

    python -m eval.fuzz --minutes 20 --seed 1

Each round starts a server with other arguments, another config and a small pool, and sends what
clients send in any mixture: both classes, lengths up to the pool's, logprobs of prompts, several
answers, penalties, grammars, beams, streams, turns of sessions, jobs; clients go away, operators
flush, pause and abort. SGLang's strict memory check is on. Exit code 1 when a server ended, did
not answer, or held something, or a job's files lack a line; `--seed` and `--round` do it again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from echo_sgl.config import STATE_DIR_ENV
from echo_sgl.cpu import OVERLAP_ENV
from eval.fuzz.clients import Clients
from eval.fuzz.requests import ADAPTERS, MODEL
from eval.options import positive
from eval.paths import LOGS_DIR
from eval.servers.adapters import build_adapter
from eval.servers.machine import device_args
from eval.servers.models import demo_model
from eval.servers.server import ServerStartError, running_server
from eval.soak import STRICT, check_nothing_is_held

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
    (0.1, ("--stream-interval", "4")),
    (0.1, ("--tp-size", "2")),
)
# How many more requests a server starts than their answers would allow, at 0.02: nearly all.
CONSERVATIVENESS = (0.02, 0.3, 1.0)
SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "random")
# SGLang's own, for tests: decodes lose their memory every few steps, as if the pool were full.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A server; `config`: a preset's name, or TOML. `overlaps`: also where a CPU runs it."""

    pool_tokens: int
    args: tuple[str, ...]
    config: str
    overlaps: bool
    has_jobs: bool
    retracts: bool
    has_adapters: bool

    @property
    def is_preset(self) -> bool:
        return self.config in PRESETS

    def __str__(self) -> str:
        config = self.config if self.is_preset else " ".join(self.config.split())
        flags = {"overlap": self.overlaps, "jobs": self.has_jobs, "retracts": self.retracts}
        flags["adapters"] = self.has_adapters
        named = [name for name, is_on in flags.items() if is_on]
        return "; ".join((config, " ".join(self.args), *named))


def draw_variant(rng: random.Random) -> Variant:
    """A server of few tokens and places."""
    pool_tokens = rng.choice((600, 1200, 2000, 4000))
    flags = [flag for share, flag in FLAGS if rng.random() < share]
    names = {flag[0] for flag in flags}
    if "--disable-radix-cache" in names:  # SGLang wants a tree for its host tier
        flags = [flag for flag in flags if flag[0] != "--enable-hierarchical-cache"]
    policies = ("fcfs",) if "--enable-priority-scheduling" in names else SCHEDULE_POLICIES
    is_preset = rng.random() < 0.5
    config = rng.choice(PRESETS) if is_preset else PROMISES + rng.choice(SETTINGS)
    sizes = {
        "--max-total-tokens": pool_tokens,
        "--chunked-prefill-size": rng.choice((32, 64, 128, 256)),
        "--max-running-requests": rng.choice((3, 6, 16)),
        "--schedule-conservativeness": rng.choice(CONSERVATIVENESS),
        "--schedule-policy": rng.choice(policies),
        "--served-model-name": MODEL,
    }
    args = [text for name, value in sizes.items() for text in (name, str(value))]
    # Promises as short as these would be refused after the warm-up.
    more = () if is_preset else ("--skip-server-warmup",)
    args += [one for flag in flags for one in flag]
    return Variant(
        pool_tokens,
        (*args, *more),
        config,
        overlaps=rng.random() < 0.5,
        has_jobs=rng.random() < 0.5,
        retracts=rng.random() < 0.15,
        has_adapters=rng.random() < 0.15,
    )


def play_round(variant: Variant, rng: random.Random, seconds: float, log_path: Path) -> str:
    """One server's life; what went wrong, or how requests ended after "ok"."""
    with tempfile.TemporaryDirectory() as folder:
        config: Path | str = variant.config
        if not variant.is_preset:
            config = Path(folder) / "fuzz.toml"
            config.write_text(variant.config)
        args = (*device_args(), "--enable-metrics", "--sleep-on-idle", *variant.args)
        args += adapter_args(Path(folder)) if variant.has_adapters else ()
        env = STRICT | ({OVERLAP_ENV: "1"} if variant.overlaps else {})
        env |= {STATE_DIR_ENV: folder} if variant.has_jobs else {}
        env |= RETRACT if variant.retracts else {}
        try:
            with running_server(
                demo_model("tiny"), args, config=config, env=env, log_path=log_path
            ) as server:
                clients = Clients(server.url, rng, variant.pool_tokens, has_jobs=variant.has_jobs)
                clients.adapters = ADAPTERS if variant.has_adapters else ()
                asyncio.run(clients.play(seconds))
                check_nothing_is_held(server)
        except (ServerStartError, RuntimeError, ExceptionGroup, httpx.HTTPError) as error:
            return f"{_told(error)}; {log_path} says more"
    ends = ", ".join(f"{end} {number}" for end, number in sorted(clients.ends.items()))
    return f"{clients.broken}; {log_path} says more" if clients.broken else f"ok: {ends}"


def adapter_args(folder: Path) -> tuple[str, ...]:
    """Adapters of which a step may hold fewer than there are."""
    model = demo_model("tiny")
    paths = [
        f"{name}={build_adapter(model, folder / name, seed)}" for seed, name in enumerate(ADAPTERS)
    ]
    return ("--enable-lora", "--max-loras-per-batch", "2", "--lora-paths", *paths)


def _told(error: BaseException) -> str:
    """What an error is; of several at once, each."""
    if isinstance(error, BaseExceptionGroup):
        return ", ".join(sorted({_told(one) for one in error.exceptions}))
    return f"{type(error).__name__}: {error}"


def main(argv: list[str]) -> int:
    """Rounds until the time is over; a round's server and requests follow from seed and number."""
    parser = argparse.ArgumentParser(prog="python -m eval.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, help="this one only")
    parser.add_argument("--seconds", type=positive, default=20.0, help="of requests in each round")
    options = parser.parse_args(argv)
    console, num_broken = Console(width=200), 0
    until_s, number = time.monotonic() + 60 * options.minutes, options.round or 0
    while time.monotonic() < until_s:
        rng = random.Random(f"{options.seed}/{number}")
        variant = draw_variant(rng)
        log_path = LOGS_DIR / f"fuzz-{options.seed}-{number}.log"
        said = play_round(variant, rng, options.seconds, log_path)
        num_broken += not said.startswith("ok")
        console.print(f"[{number}] {variant}\n    {said}", markup=False, highlight=False)
        number += 1
        if options.round is not None:
            break
    return min(1, num_broken)
