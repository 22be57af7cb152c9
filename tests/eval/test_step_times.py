"""What the step-time table says of steps that differ by chance alone."""

from __future__ import annotations

import numpy as np
import pytest

from echo_sgl.batch_shape import BatchRow, decode_row, rows_of
from eval.step_times import scatter


def decodes(num_steps: int) -> list[BatchRow]:
    rows = [decode_row([100 + step, 300 + step]) for step in range(num_steps)]
    return [row for row in rows if row is not None]


def test_scatter_is_what_a_perfect_model_would_be_off_by() -> None:
    rng = np.random.default_rng(0)
    times_s = 0.01 * np.exp(rng.normal(0.0, 0.05, 4000))
    perfect_mape = float(np.mean(np.abs(0.01 / times_s - 1.0)))
    assert scatter((rows_of(decodes(4000)), times_s)) == pytest.approx(perfect_mape, rel=0.05)


def test_steps_of_other_requests_do_not_scatter() -> None:
    first, second = decodes(2)
    others = [
        BatchRow(0, 0, 0, 0, 2, second.decode_tokens + 50, 400),  # another pair
        BatchRow(1, 8, 0, 64, 2, second.decode_tokens, 301),  # a prefill with them
    ]
    assert scatter((rows_of([first, second]), np.array([0.01, 0.01]))) == 0.0
    for other in others:
        assert scatter((rows_of([first, other]), np.array([0.01, 0.03]))) is None
