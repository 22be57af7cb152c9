"""Small fleets and traces for tests."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any

from echo_sgl.estimators.roofline_time import RooflineBatchTime, Transformer
from echo_sgl.sim.fleet.config import RULES, FleetConfig
from echo_sgl.sim.workload import Trace
from echo_sgl.types import Task

TRANSFORMER = Transformer(
    num_layers=10,
    hidden=1024,
    num_heads=8,
    num_kv_heads=4,
    intermediate=4096,
    vocab=8192,
    dtype_bytes=2,
)
# A prompt of 100 tokens takes 33 ms, one decode 7 ms; GEMMs are saturated by 18 rows.
DEVICE = RooflineBatchTime(TRANSFORMER).with_coefficients(
    {
        "gemm_flop": 1e-12,
        "prefill_attention_flop": 1e-13,
        "decode_attention_flop": 1e-13,
        "gemm_byte": 1.75e-11,
        "attention_byte": 7e-11,
        "step": 0.001,
    }
)
Row = tuple[float, int, int]


def fleet(rules: str, **changes: Any) -> FleetConfig:
    """One relaxed and one strict instance of 4,000 tokens each."""
    config = FleetConfig(DEVICE, 4000, RULES[rules], ttft_s=5.0, tpot_s=0.05, typical_tokens=200)
    return dataclasses.replace(config, **changes)


def online(*rows: Row) -> Trace:
    """Requests of (arrival s, prompt tokens, answer tokens)."""
    return _trace(Task.ONLINE, rows)


def offline(*rows: Row) -> Trace:
    """As `online`."""
    return _trace(Task.OFFLINE, rows)


def _trace(task: Task, rows: Sequence[Row]) -> Trace:
    at_s, prompts, answers = zip(*rows, strict=True) if rows else ((), (), ())
    return Trace(task, array("d", at_s), array("q", prompts), array("q", answers))
