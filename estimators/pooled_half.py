"""One half of a step, its prefills or its decodes: what it costs, and how a fit finds that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from echo_sgl.batch_shape import FloatArray
from echo_sgl.estimators.samples import fit_with_knee, weighted_sum

# A device that attends to several contexts at once: as many as it has room for, to begin with.
START_WIDTH = 2
MAX_ROUNDS = 4
MAX_SEARCH_ROWS = 300
SEARCH_KNEES = (4, 16, 64, 256)
# What is left of the mean error where something is clearly less wrong.
CLEAR = 0.9


class Half(NamedTuple):
    """The prefills or the decodes of steps, as columns.

    `amount`: of what one more costs one thing up to a knee and another beyond it. `longest`: the
    longest context; `shared`: what contexts add up to, in one or several ways.
    Shapes: (steps,) each.
    """

    amount: FloatArray
    longest: FloatArray
    shared: tuple[FloatArray, ...]
    num_requests: FloatArray


class HalfSteps(NamedTuple):
    """Steps to fit a half to: `others` are features beside it that the step's time has.

    `adds_longest`: whether the longest context costs extra where costs add up.
    Shapes: (steps,) each.
    """

    half: Half
    times_s: FloatArray
    others: tuple[FloatArray, ...] = ()
    adds_longest: bool = True


Fit = tuple[list[float], list[float]]
"""Coefficients of the half: longest, of each shared, below and beyond the knee, step, knee and
overlap; and those of the features beside it."""


def half_s(half: Half, values: Sequence[float]) -> Any:
    """Seconds of the half in each step. Shapes: (steps,)."""
    longest, *shared, _, _, _, knee, overlap = values
    longest_s, shared_s = longest * half.longest, weighted_sum(shared, half.shared)
    attended_s = np.maximum(longest_s, shared_s) + (1.0 - overlap) * np.minimum(longest_s, shared_s)
    below, beyond = np.minimum(half.amount, knee), np.maximum(half.amount - knee, 0.0)
    return weighted_sum((1.0, *values[-5:-2]), (attended_s, below, beyond, half.num_requests > 0))


def half_features(half: Half, values: Sequence[float]) -> tuple[Any, ...]:
    """What the coefficients but knee and overlap weigh, where these say what binds.

    Shapes: (steps,) each.
    """
    *_, knee, _ = values
    below, beyond = np.minimum(half.amount, knee), np.maximum(half.amount - knee, 0.0)
    return *_attention(half, longest_binds(half, values)), below, beyond, half.num_requests > 0


def longest_binds(half: Half, values: Sequence[float]) -> Any:
    """In which steps the longest context takes more than all; None where both costs add up."""
    longest, *shared, _, _, _, _, overlap = values
    return longest * half.longest > weighted_sum(shared, half.shared) if overlap else None


def fit_half(steps: HalfSteps, knees: Sequence[float], known: Sequence[float] = ()) -> Fit:
    """Costs of contexts that add up, or of which the larger counts: what is clearly less wrong.

    `known` are the coefficients until now. What they say stays where steps do not tell: most may
    be too short to. The larger of both alternates, from what is known or a device that has room for
    two: say what binds in which step, solve.
    """
    added = _fit_given(steps, None, knees)
    few = _part(steps)
    start = few.half.longest * START_WIDTH > few.half.shared[-1]
    most = CLEAR * _mean_error(few, added)
    if known and known[-1]:
        start = longest_binds(few.half, known)
        most = _mean_error(few, added) / CLEAR
    try:
        overlapped = _search_overlap(few, start)
        if _mean_error(few, overlapped) < most:
            return _fit_given(steps, longest_binds(steps.half, overlapped[0]), knees)
    except ValueError:  # what binds and what does not are nearly the same there: they add up
        return added
    return added


def fit_same(steps: HalfSteps, knees: Sequence[float], known: Sequence[float]) -> Fit:
    """What `known` say adds up, or binds, does so in these steps, too."""
    return _fit_given(steps, longest_binds(steps.half, known), knees)


def _search_overlap(steps: HalfSteps, binds: Any) -> Fit:
    for _ in range(MAX_ROUNDS):
        fit = _fit_given(steps, binds, SEARCH_KNEES)
        before, binds = binds, longest_binds(steps.half, fit[0])
        if np.array_equal(before, binds):
            break
    return fit


def _fit_given(steps: HalfSteps, binds: Any, knees: Sequence[float]) -> Fit:
    """The fit where it is known what binds; None: both costs add up."""
    half = steps.half
    attention = _attention(half, binds)
    if binds is None and not steps.adds_longest:
        attention = (np.zeros_like(half.longest), *half.shared)
    (beyond, below, *weights), knee = fit_with_knee(
        half.amount, knees, (*attention, half.num_requests > 0, *steps.others), steps.times_s
    )
    known, (step, *others) = weights[: len(attention)], weights[len(attention) :]
    return [*known, below, beyond, step, knee, 0.0 if binds is None else 1.0], others


def _attention(half: Half, binds: Any) -> tuple[Any, ...]:
    if binds is None:
        return half.longest, *half.shared
    return half.longest * binds, *(column * ~binds for column in half.shared)


def _mean_error(steps: HalfSteps, fit: Fit) -> float:
    predicted_s = half_s(steps.half, fit[0]) + weighted_sum(fit[1], steps.others)
    return float(np.abs(predicted_s / steps.times_s - 1.0).mean())


def _part(steps: HalfSteps) -> HalfSteps:
    """An even part of the steps, for the search."""
    part = slice(None, None, -(-len(steps.times_s) // MAX_SEARCH_ROWS))
    amount, longest, shared, num_requests = steps.half
    half = Half(amount[part], longest[part], tuple(one[part] for one in shared), num_requests[part])
    others = tuple(one[part] for one in steps.others)
    return steps._replace(half=half, times_s=steps.times_s[part], others=others)
