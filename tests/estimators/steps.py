"""Steps and models that the estimator tests share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchShape, FloatArray, StepKind, rows_of
from echo_sgl.estimators.batch_time import BATCH_TIME_MODELS, create_batch_time
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.roofline_time import Transformer

Request = tuple[int, int]
"""(new, cached) of a prefill; (0, context) of a decode."""

NAMES = tuple(BATCH_TIME_MODELS)
CAPTURED = (1, 2, 4, 8, 16, 32)
SMALL_LLAMA = Transformer(
    num_layers=4,
    hidden=256,
    num_heads=8,
    num_kv_heads=2,
    intermediate=700,
    vocab=4000,
    dtype_bytes=4,
)
# What each term costs on a machine where a step takes 5 to 500 ms, in `COEFFICIENTS`' order.
TRUTHS = {
    "pooled": (
        *(0.0, 2e-8, 1e-7, 2e-5, 6e-5, 4e-3, 256, 0.0),
        *(1e-6, 5e-7, 9e-4, 3e-4, 5e-3, 4, 0.0),
        0.4,
    ),
    "linear": (6e-5, 2e-8, 1e-3, 5e-7, 1e-12, 3e-4, 5e-3),
    "bros": (6e-5, 2e-8, 4e-3, 3e-4, 1e-8, 5e-3),
    "roofline": (2e-11, 4e-11, 0.0, 1e-10, 8e-10, 3e-3),
}

tokens = st.integers(1, 10**6)
requests = st.one_of(st.tuples(tokens, st.integers(0, 10**6)), st.tuples(st.just(0), tokens))
batches = st.lists(requests, max_size=12)


def add(shape: BatchShape, request: Request) -> None:
    new_tokens, other_tokens = request
    if new_tokens:
        shape.add_prefill(new_tokens, other_tokens)
    else:
        shape.add_decode(other_tokens)


def shape_of(batch: Sequence[Request]) -> BatchShape:
    shape = BatchShape()
    for request in batch:
        add(shape, request)
    return shape


def unfitted(name: str, captured: Sequence[int] = ()) -> BatchTimeModel:
    return create_batch_time(name, captured_batch_sizes=captured, transformer=SMALL_LLAMA)


def true_model(name: str, captured: Sequence[int] = ()) -> BatchTimeModel:
    model = unfitted(name, captured)
    return model.with_coefficients(dict(zip(model.COEFFICIENTS, TRUTHS[name], strict=True)))


@st.composite
def any_models(draw: st.DrawFn) -> BatchTimeModel:
    """A model of any name with any coefficients; 0 and wide ranges included."""
    model = unfitted(draw(st.sampled_from(NAMES)), draw(st.sampled_from([(), CAPTURED])))
    highest = {"prefill_knee": 1e6, "decode_knee": 20.0}
    coefficients = {
        name: draw(st.floats(0.0, highest.get(name, 1.0))) for name in model.COEFFICIENTS
    }
    return model.with_coefficients(coefficients)


def random_rows(num_steps: int, *, seed: int, kinds: Sequence[StepKind] = ()) -> FloatArray:
    """Steps of all kinds in turn, or of the kinds given, with up to 24 decodes."""
    rng, kinds = random.Random(seed), kinds or tuple(StepKind)
    return rows_of(_random_shape(rng, kinds[one % len(kinds)]) for one in range(num_steps))


def measured(model: BatchTimeModel, rows: FloatArray, *, noise: float, seed: int) -> FloatArray:
    """Times that the model would be right about but for some noise."""
    factors = np.random.default_rng(seed).normal(1.0, noise, len(rows))
    return model.predict_rows_s(rows) * np.clip(factors, 0.5, 1.5)


def _random_shape(rng: random.Random, kind: StepKind) -> BatchShape:
    shape = BatchShape()
    if kind is not StepKind.DECODE:
        for _ in range(rng.choice((1, 1, 2, 3))):
            shape.add_prefill(int(2 ** rng.uniform(0, 11)), rng.choice((0, rng.randint(0, 3000))))
    if kind is not StepKind.PREFILL:
        for _ in range(rng.randint(1, 24)):
            shape.add_decode(int(2 ** rng.uniform(0, 12)))
    return shape
