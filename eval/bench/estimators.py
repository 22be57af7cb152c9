"""What the batch-time estimators cost: a prediction, one request more, a fit, a band.

Stock SGLang has no such estimator, so there is nothing to compare with. Targets: 10 us a
prediction, 2 us to add a request and take it back, 100 ms for a fit of 80,000 steps, 30 us
to learn a step and 5 ms for a refit, since a server refits between two steps.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from echo_sgl.batch_shape import BatchRow, BatchShape, FloatArray, rows_of
from echo_sgl.estimators.batch_time import BATCH_TIME_MODELS, create_batch_time, longest_prefill
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.conformal import ConformalBand
from echo_sgl.estimators.live import LiveBatchTime
from echo_sgl.estimators.refit import RefitBuffer, refitted
from echo_sgl.estimators.roofline_time import Transformer
from eval.servers.machine import machine

NUM_SAMPLES = 80_000
NUM_CALLS = 2_000
REPEATS = 9
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LLAMA_8B = Transformer(
    num_layers=32,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    intermediate=14_336,
    vocab=128_256,
    dtype_bytes=2,
)


def run() -> list[dict[str, Any]]:
    """Rows for `make bench`: every model's fit and prediction, and what is done around them."""
    rows, times_s = _samples()
    shape = _shape(random.Random(0))
    results = []
    for name in BATCH_TIME_MODELS:
        model = create_batch_time(name, captured_batch_sizes=CAPTURED, transformer=LLAMA_8B)
        fit = partial(model.fit, rows, times_s)
        fit_ms = [_call_us(fit, 1) / 1e3 for _ in range(REPEATS)]
        results.append(_row(f"fit of {NUM_SAMPLES:,} steps, {name}", fit_ms, "ms"))
        results.append(_timed(f"predict, {name}", partial(model.predict_s, shape)))
        results += _live(model, shape, rows, times_s)
    results.append(_timed("add a decode and take it back", _extender(shape)))
    results.append(_timed("add a prefill and take it back", _prefill_extender(shape)))
    return results + _around(model, shape)


def _live(
    model: BatchTimeModel, shape: BatchShape, rows: FloatArray, times_s: FloatArray
) -> list[dict[str, Any]]:
    """What a scheduler asks of it, and what it waits for when the model is fitted again."""
    live = LiveBatchTime(model, refit_steps=0)
    buffer = RefitBuffer(capacity_per_kind=live.CAPACITY_PER_KIND, rng=random.Random(0))
    few = zip(rows[: 4 * live.CAPACITY_PER_KIND].tolist(), times_s.tolist(), strict=False)
    for values, time_s in few:
        step = BatchRow(*map(int, values))
        live.observe(step, time_s, 0.0)
        buffer.add(step, time_s)
    refit = partial(refitted, live.model, buffer)
    refit_ms = [_call_us(refit, 1) / 1e3 for _ in range(REPEATS)]
    time_s = model.predict_s(shape)
    return [
        _row(f"refit, {model.NAME}", refit_ms, "ms"),
        _timed(f"live: predict, {model.NAME}", partial(live.predict_s, shape)),
        _timed(f"live: upper bound, {model.NAME}", partial(live.upper_s, shape)),
        _timed(f"live: learn a step, {model.NAME}", lambda: live.observe(shape, time_s, 0.0)),
    ]


def _around(model: BatchTimeModel, shape: BatchShape) -> list[dict[str, Any]]:
    """The calls that a scheduler makes around a model, with the last one."""
    limit_s = 2 * model.predict_s(shape)
    band = ConformalBand(model)
    rng = random.Random(1)

    def longest() -> None:
        longest_prefill(model, shape, limit_s, max_tokens=8192, page_size=16)

    def observe() -> None:
        band.observe(shape, limit_s * rng.uniform(0.4, 0.6), 0.0)

    return [
        _timed("row of a shape", shape.row),
        _timed(f"longest prefill of 8,192 tokens in pages of 16, {model.NAME}", longest),
        _timed(f"learn a step in the band, {model.NAME}", observe),
        _timed(f"upper bound at 95 %, {model.NAME}", lambda: band.predict_upper(shape, 0.95)),
    ]


def _samples() -> tuple[FloatArray, FloatArray]:
    """Steps of every kind, with times of about an 8B model on one GPU and 2 % of noise."""
    rng = random.Random(2)
    few = rows_of(_shape(rng) for _ in range(NUM_SAMPLES // 20))
    rows = np.tile(few, (20, 1))
    # Columns: prefill_tokens, prefill_area, num_decodes, decode_tokens.
    times_s = 0.006 + rows[:, [1, 3, 4, 5]] @ [3e-5, 5e-10, 2e-5, 4e-8]
    noise = np.random.default_rng(3).normal(1.0, 0.02, len(rows))
    return rows, times_s * noise


def _shape(rng: random.Random) -> BatchShape:
    shape, kind = BatchShape(), rng.randrange(3)
    for _ in range(rng.randint(1, 4) if kind != 1 else 0):
        shape.add_prefill(rng.randint(1, 4096), rng.choice((0, rng.randint(0, 8192))))
    for _ in range(rng.randint(1, 200) if kind != 0 else 0):
        shape.add_decode(rng.randint(1, 8192))
    return shape


def _extender(shape: BatchShape) -> Callable[[], None]:
    def extend() -> None:
        shape.add_decode(5000)
        shape.undo()

    return extend


def _prefill_extender(shape: BatchShape) -> Callable[[], None]:
    def extend() -> None:
        shape.add_prefill(500, 4000)
        shape.undo()

    return extend


def _timed(name: str, call: Callable[[], object]) -> dict[str, Any]:
    return _row(name, [_call_us(call, NUM_CALLS) for _ in range(REPEATS)], "us")


def _call_us(call: Callable[[], object], times: int) -> float:
    start_s = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start_s) * 1e6 / times


def _row(name: str, samples: list[float], unit: str) -> dict[str, Any]:
    return {
        "name": name,
        "ours": round(statistics.median(samples), 2),
        "stock": None,
        "ratio": None,
        "unit": unit,
        "n": len(samples),
        "machine": machine(),
    }
