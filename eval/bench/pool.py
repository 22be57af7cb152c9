"""What 50,000 waiting requests cost a scheduler step: our pool against SGLang's priority queue.

Stock is the function that SGLang runs on its waiting queue before every prefill under
`--enable-priority-scheduling`, its way of telling the two classes apart.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from echo_sgl.engine.pool.offline_pool import OfflinePool
from echo_sgl.policies.order.offline_order import PsmOrder
from eval.servers.machine import machine

SIZES = (1_000, 10_000, 50_000)
NUM_DOCUMENTS = 100
DOCUMENT_TOKENS = 1_000
ADMITTED_PER_STEP = 4
OFFERED_PER_STEP = 64
REPEATS = 50


def run() -> list[dict[str, Any]]:
    """Rows for `make bench`: one scheduler step, and one insertion, at each pool size."""
    rows = []
    for size in SIZES:
        requests = _requests(size)
        pool = OfflinePool(PsmOrder(utility_ratio=0.98), capacity=size)
        insert_us = _median_us(_inserter(pool, requests), size)
        step_us, stock_us = _alternate(_pool_step(pool), _queue_step(list(requests)))
        name = f"step with {size:,} waiting, {ADMITTED_PER_STEP} admitted"
        rows.append(_row(name, step_us, stock_us))
        rows.append(_row(f"insert into {size:,} waiting", insert_us, None))
    return rows


def _requests(count: int) -> list[Any]:
    rng = random.Random(0)
    documents = [
        array("q", (rng.randrange(32_000) for _ in range(DOCUMENT_TOKENS)))
        for _ in range(NUM_DOCUMENTS)
    ]
    return [_request(number, rng.choice(documents), rng) for number in range(count)]


def _request(number: int, document: array[int], rng: random.Random) -> Any:
    prompt = document + array("q", (rng.randrange(32_000) for _ in range(20)))
    return SimpleNamespace(
        rid=f"{number:08d}",
        origin_input_ids=prompt,
        seqlen=len(prompt),
        extra_key=None,
        cache_salt=None,
        priority=0,
        time_stats=SimpleNamespace(wait_queue_entry_time=float(number)),
    )


def _inserter(pool: OfflinePool, requests: list[Any]) -> Callable[[], None]:
    waiting = iter(requests)
    return lambda: pool.add(next(waiting), entry_s=0.0, resumed=False)


def _pool_step(pool: OfflinePool) -> Callable[[], None]:
    def step() -> None:
        offered = pool.upcoming(OFFERED_PER_STEP)
        for req in offered[:ADMITTED_PER_STEP]:
            pool.take(req)
        for req in offered[:ADMITTED_PER_STEP]:
            del req.echo_sequence  # who comes in its stead has a place of its own in line
            pool.add(req, entry_s=0.0, resumed=False)

    return step


def _queue_step(queue: list[Any]) -> Callable[[], None]:
    from sglang.srt.managers.schedule_policy import SchedulePolicy

    return lambda: SchedulePolicy._sort_by_priority_and_fcfs(queue, -1)


def _alternate(ours: Callable[[], None], stock: Callable[[], None]) -> tuple[float, float]:
    pairs = [(_timed_us(ours), _timed_us(stock)) for _ in range(REPEATS)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def _median_us(call: Callable[[], None], times: int) -> float:
    return statistics.median(_timed_us(call) for _ in range(times))


def _timed_us(call: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    call()
    return (time.perf_counter() - start_s) * 1e6


def _row(name: str, ours_us: float, stock_us: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "ours": round(ours_us, 1),
        "stock": None if stock_us is None else round(stock_us, 1),
        "ratio": None if stock_us is None else round(ours_us / stock_us, 3),
        "unit": "us",
        "n": REPEATS,
        "machine": machine(),
    }
