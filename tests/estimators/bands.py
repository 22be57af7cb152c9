"""Bands around a prediction that never changes, and streams of what was measured beside it."""

from __future__ import annotations

import math

import numpy as np

from echo_sgl.estimators.conformal import ConformalBand
from tests.estimators.steps import shape_of

QUANTILES = (0.5, 0.9, 0.95, 0.99)
DECODE, PREFILL = shape_of([(0, 100)]).row(), shape_of([(100, 0)]).row()
NUM_STEPS, NOISE = 4000, 0.05


class Constant:
    """Predicts the same time for every step."""

    def __init__(self, time_s: float = 0.01) -> None:
        self.time_s = time_s

    def predict_s(self, step: object) -> float:
        return self.time_s


def band(**options: object) -> ConformalBand:
    return ConformalBand(Constant(), **options)


def play(one: ConformalBand, log_ratios: np.ndarray, row=DECODE, start_s: float = 0.0) -> None:
    for number, log_ratio in enumerate(log_ratios):
        one.observe(row, 0.01 * math.exp(log_ratio), start_s + 0.01 * number)


def still(num_steps: int, *, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, NOISE, num_steps)


def streams(seed: int) -> dict[str, np.ndarray]:
    """Logarithms of measured / predicted."""
    rng, steps = np.random.default_rng(seed), np.arange(NUM_STEPS)
    noise = rng.normal(0.0, NOISE, NUM_STEPS)
    half = steps >= NUM_STEPS // 2
    return {
        "nothing changes": noise,
        "three times as slow, little by little": noise + math.log(3) * steps / NUM_STEPS,
        "three times as fast, little by little": noise - math.log(3) * steps / NUM_STEPS,
        "twice as slow at once": noise + math.log(2) * half,
        "twice as fast at once": noise - math.log(2) * half,
        "slower and faster in waves": noise + 0.3 * np.sin(steps * 2 * np.pi / 2000),
        "two regimes in turn": noise + 0.3 * (steps // 300 % 2),
        "noise that grows tenfold": noise * (0.4 + 4 * steps / NUM_STEPS),
        "outliers of many times": rng.standard_t(2, NUM_STEPS) * NOISE,
        "neighbours alike": np.convolve(noise, 0.8 ** np.arange(30))[:NUM_STEPS],
    }
