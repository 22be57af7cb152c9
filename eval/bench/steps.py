"""What Echo's own code costs a step of the real scheduler with 50,000 pooled and 64 running.

A server plans steps under promises while 16 online requests decode beside the job, one
beginning as another ends; every step's own time, CPU time of the scheduler's thread, comes from
`GET /echo/trace`. Nothing of SGLang's is the counterpart, so the share of the step's time stands in
the place of a ratio. The model has one thread: with more, on two cores, it would leave none to the
HTTP processes.

Planning a prefill costs what it starts. Answers of a job differ in length, and so a few requests
end and start at a time: the shorter they are, the more. Where all are equally long, the whole
batch does at once, in one step. All three are measured.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from eval.paths import BUILD_DIR, LOGS_DIR
from eval.servers.machine import device_args, machine
from eval.servers.models import demo_model
from eval.servers.server import LOCAL, Server, running_server

NUM_POOLED, NUM_RUNNING, NUM_ONLINE = 50_000, 64, 16
NUM_DOCUMENTS, DOCUMENT_TOKENS = 50, 40
MIN_STEPS, MIN_POOLED = 1000, 45_000
# An online answer's; one begins as another ends.
ONLINE_TOKENS = (200, 600)
ANSWER_TOKENS = 16
# Name, and the shortest and the longest answer of the job.
JOBS = {
    "answers of 1 to 255 tokens": (1, 255),
    "of 1 to 31": (1, 31),
    "of 16 each": (ANSWER_TOKENS, ANSWER_TOKENS),
}
LIMIT_S = 300.0
ENV = {"OMP_NUM_THREADS": "1"}
CONFIG = "[slo]\nttft_s = 5.0\ntpot_s = 0.5\n[reserve]\npredictor = 'off'\n"


def run() -> list[dict[str, Any]]:
    """Rows for `make bench`: median and p99 of a step's own time, of all and by what they run."""
    model = str(demo_model("tiny"))
    return [row for job in JOBS for row in measure(job, model, device_args(), ENV)]


def measure(
    job: str, model: str, server_args: Sequence[str], env: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Rows of one job on a server of its own."""
    config = BUILD_DIR / "bench-steps.toml"
    config.parent.mkdir(exist_ok=True)
    config.write_text(CONFIG, encoding="utf-8")
    args = [
        "--enable-metrics",
        *("--max-running-requests", str(NUM_RUNNING)),
        *("--max-total-tokens", "60000"),
        *server_args,
    ]
    log_path = LOGS_DIR / "bench-steps.log"
    with running_server(model, args, config=config, env=env, log_path=log_path) as server:
        own_s, time_s, is_decode = _steps(server, JOBS[job])
    return [
        *_rows(f"a step, {job}", own_s, time_s),
        *_rows(f"a step that decodes, {job}", own_s[is_decode], time_s[is_decode]),
        *_rows(f"a step that prefills, {job}", own_s[~is_decode], time_s[~is_decode]),
    ]


def _rows(what: str, own_s: Any, time_s: Any) -> list[dict[str, Any]]:
    """Shapes: (steps,) each."""
    rows = []
    for name, quantile in (("median", 0.5), ("p99", 0.99)):
        own_us = float(np.quantile(own_s, quantile) * 1e6)
        rows.append(
            {
                "name": f"own time of {what}, {NUM_POOLED:,} pooled, {NUM_RUNNING} running, {name}",
                "ours": own_us,
                "stock": None,
                "ratio": float(own_us / (np.median(time_s) * 1e6)),
                "unit": "us; ratio: of a median step",
                "n": len(own_s),
                "machine": machine(),
            }
        )
    return rows


def _steps(server: Server, answer_tokens: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Own and execution times (s) of steps with a full pool, and whether they only decode.

    Shapes: (steps,) each.
    """
    job = threading.Thread(target=_send_job, args=(server, answer_tokens), daemon=True)
    job.start()
    _wait(lambda: _num_pooled(server) >= MIN_POOLED, "the pool is full")
    for number in range(NUM_ONLINE):
        online = threading.Thread(target=_send_online, args=(server, number), daemon=True)
        online.start()
    steps: list[tuple[float, float, bool]] = []

    def enough() -> bool:
        steps[:] = _planned_steps(server)
        return len(steps) >= MIN_STEPS

    _wait(enough, f"{MIN_STEPS} steps are done")
    own_s, time_s, is_decode = np.array(steps).T
    return own_s, time_s, is_decode.astype(bool)


def _planned_steps(server: Server) -> list[tuple[float, float, bool]]:
    answer = LOCAL.get(f"{server.url}/echo/trace", params={"seconds": LIMIT_S}, timeout=LIMIT_S)
    [replica] = answer.json()["replicas"]
    rows = [dict(zip(replica["columns"], row, strict=True)) for row in replica["rows"]]
    beside_online = itertools.dropwhile(lambda row: row["num_decodes"] <= row["num_offline"], rows)
    return [
        (row["own_s"], row["time_s"], not row["num_prefills"])
        for row in beside_online
        if row["num_pooled"] >= MIN_POOLED and row["time_s"] is not None
    ]


def _send_job(server: Server, answer_tokens: tuple[int, int]) -> None:
    """One call with all prompts: 50,000 connections would measure the client."""
    rng = random.Random(0)
    documents = [_tokens(rng, DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    prompts = [rng.choice(documents) + _tokens(rng, 8) for _ in range(NUM_POOLED)]
    lengths = [rng.randint(*answer_tokens) for _ in prompts]
    _generate(server, prompts, lengths, custom_params={"service_tier": "flex"})


def _send_online(server: Server, number: int) -> None:
    """One after the other, until the server is stopped."""
    rng = random.Random(number + 1)
    while server.process.poll() is None:
        _generate(server, [_tokens(rng, 20)], [rng.randint(*ONLINE_TOKENS)])


def _generate(
    server: Server, prompts: list[list[int]], answer_tokens: list[int], **sampling: Any
) -> None:
    """One answer of so many tokens for each prompt."""
    params = [
        {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True, **sampling}
        for num_tokens in answer_tokens
    ]
    body = {"input_ids": prompts, "sampling_params": params}
    # It is stopped in the middle of the job: SGLang takes minutes to abort so many.
    with contextlib.suppress(httpx.TransportError):
        LOCAL.post(f"{server.url}/generate", json=body, timeout=LIMIT_S * 2)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(16, 400) for _ in range(count)]


def _num_pooled(server: Server) -> float:
    page = LOCAL.get(f"{server.url}/metrics", timeout=60).text
    lines = [line for line in page.splitlines() if line.startswith("echo_sgl_pool_requests{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _wait(condition: Any, what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"after {LIMIT_S:.0f} s it is not true that {what}")
        time.sleep(0.5)
