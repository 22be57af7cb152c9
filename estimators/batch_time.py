"""How long a step will take: the models by name, and the longest prefill that still fits.

Which model is best is a matter of the device: fit all, compare them on steps that the fit
did not see (`held_out.py`), and keep the winner with its evidence (`profile.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from echo_sgl.batch_shape import BatchShape, Step, StepKind
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.linear_time import BrosBatchTime, LinearBatchTime
from echo_sgl.estimators.pooled_time import PooledBatchTime
from echo_sgl.estimators.roofline_time import RooflineBatchTime, Transformer

BATCH_TIME_MODELS: dict[str, type[BatchTimeModel]] = {
    model.NAME: model
    for model in (PooledBatchTime, LinearBatchTime, BrosBatchTime, RooflineBatchTime)
}


class StepPredictor(Protocol):
    """Anything that tells seconds of a step and never less for more work."""

    def predict_s(self, step: Step) -> float: ...


class StepEstimator(StepPredictor, Protocol):
    """What a scheduler asks: seconds a step takes, and at most takes.

    `spread`: how many times as long as expected one of that kind takes at most, 1 while that is
    not known.
    """

    @property
    def is_ready(self) -> bool: ...

    @property
    def upper(self) -> StepPredictor: ...

    def spread(self, kind: StepKind) -> float: ...


def create_batch_time(
    name: str,
    *,
    captured_batch_sizes: Iterable[int] = (),
    transformer: Transformer | None = None,
) -> BatchTimeModel:
    """Build a model by its name; only the roofline looks at `transformer`.

    Errors: `ValueError` names the known models, or says that the roofline lacks its sizes.
    """
    if name not in BATCH_TIME_MODELS:
        known = ", ".join(BATCH_TIME_MODELS)
        raise ValueError(f"batch-time model is {name!r}; known are {known}")
    if name != RooflineBatchTime.NAME:
        return BATCH_TIME_MODELS[name](captured_batch_sizes=captured_batch_sizes)
    if transformer is None:
        raise ValueError("batch-time model 'roofline' counts FLOPs and bytes: give transformer")
    return RooflineBatchTime(transformer, captured_batch_sizes=captured_batch_sizes)


def longest_prefill(
    model: StepPredictor,
    shape: BatchShape,
    limit_s: float,
    *,
    max_tokens: int,
    page_size: int = 1,
    cached_tokens: int = 0,
) -> int:
    """The most new tokens that can join `shape` with a prediction of at most `limit_s`.

    `max_tokens` itself, or the largest multiple of `page_size` below it; 0 when not even one
    page fits. Exact, by bisection: O(log pages) predictions. `shape` is left as it was.

    Units: tokens, seconds. Errors: `ValueError` when `page_size` is below 1.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")

    def fits(new_tokens: int) -> bool:
        shape.add_prefill(new_tokens, cached_tokens)
        try:
            return model.predict_s(shape) <= limit_s
        finally:
            shape.undo()

    if max_tokens < 1 or fits(max_tokens):
        return max(0, max_tokens)
    fitting, too_many = 0, -(-max_tokens // page_size)
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle * page_size):
            fitting = middle
        else:
            too_many = middle
    return fitting * page_size


def prefill_alone_s(model: StepPredictor, new_tokens: int, cached_tokens: int = 0) -> float:
    """Seconds of a step that prefills one request and nothing else."""
    shape = BatchShape()
    shape.add_prefill(new_tokens, cached_tokens)
    return model.predict_s(shape)
