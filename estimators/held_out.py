"""How wrong a batch-time model is on steps that its fit did not see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_sgl.batch_shape import BatchRow, FloatArray, StepKind
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.samples import checked_samples, kinds_of

MIN_RUNS = 8

Samples = tuple[FloatArray, FloatArray]
"""Rows and times: (steps, columns of `BatchRow`) and seconds (steps,)."""


@dataclass(frozen=True, slots=True)
class StepError:
    """Relative errors, as shares of the measured time; a positive `bias` predicts too much."""

    num_steps: int
    mape: float
    p95: float
    bias: float


Errors = Mapping[StepKind, StepError]


def held_out_errors(model: BatchTimeModel, samples: Samples) -> dict[StepKind, StepError]:
    """Errors per kind of step; a kind that does not occur is left out.

    Errors: `ValueError` names the column of a sample that cannot be a measurement.
    """
    rows, times_s = checked_samples(*samples)
    relative = model.predict_rows_s(rows) / times_s - 1.0
    return {
        kind: StepError(
            num_steps=int(mask.sum()),
            mape=float(np.mean(np.abs(relative[mask]))),
            p95=float(np.quantile(np.abs(relative[mask]), 0.95)),
            bias=float(np.mean(relative[mask])),
        )
        for kind, mask in kinds_of(rows).items()
        if mask.any()
    }


def split_samples(samples: Samples, *, held_out_share: float, seed: int) -> tuple[Samples, Samples]:
    """Samples to fit and samples to judge by, about the same share of every kind of step.

    Decodes that follow each other are one batch that grows by a token a step: such a run is fitted
    or judged by as a whole, as most of it would else be known from its neighbours.
    """
    rows, times_s = checked_samples(*samples)
    rng = np.random.default_rng(seed)
    is_held_out = np.zeros(len(times_s), dtype=bool)
    for mask in kinds_of(rows).values():
        places = np.flatnonzero(mask)
        runs = _runs(rows, places)
        before = 0
        for number in rng.permutation(len(runs)):
            if before + len(runs[number]) / 2 <= held_out_share * len(places):
                is_held_out[runs[number]] = True
                before += len(runs[number])
    fitted = rows[~is_held_out], times_s[~is_held_out]
    return fitted, (rows[is_held_out], times_s[is_held_out])


def _runs(rows: FloatArray, places: Any) -> list[Any]:
    """These steps, those of one batch together; singly where there are too few batches."""
    num_prefills, num_decodes = (
        rows[places, BatchRow._fields.index(name)] for name in ("num_prefills", "num_decodes")
    )
    is_same_batch = (
        (np.diff(places) == 1)
        & (np.diff(num_decodes) == 0)
        & (num_prefills[1:] == 0)
        & (num_prefills[:-1] == 0)
    )
    runs = np.split(places, np.flatnonzero(~is_same_batch) + 1)
    return runs if len(runs) >= MIN_RUNS else list(places[:, np.newaxis])


def choose_best(errors: Mapping[str, Errors]) -> str:
    """The model of least MAPE, where every kind of step counts the same; ties by p95, then name.

    Errors: `ValueError` when there is nothing to choose from, or models were judged by
    different kinds of steps.
    """
    if not errors or len({frozenset(one) for one in errors.values()}) != 1:
        raise ValueError(
            f"errors of {sorted(errors) or 'no model'} cannot be compared; give at least one "
            "model, and judge all by the same kinds of steps"
        )
    return min(errors, key=lambda name: (*_means(errors[name]), name))


def _means(errors: Errors) -> tuple[float, float]:
    kinds = errors.values()
    return sum(one.mape for one in kinds) / len(kinds), sum(one.p95 for one in kinds) / len(kinds)
