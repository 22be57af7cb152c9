"""What the step-time table says of steps that differ by chance alone."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import orjson
import pytest

from echo_sgl.batch_shape import BatchRow, StepKind, decode_row, rows_of
from echo_sgl.cli.tuning.calibration import fit_all
from echo_sgl.estimators.batch_time_model import BatchTimeModel
from echo_sgl.estimators.held_out import Samples, held_out_errors
from eval.figures.step_samples import CALIBRATION, LIVE, read_steps, write_steps
from eval.paths import RESULTS_DIR, SAMPLES_DIR
from eval.step_times import MIN_ALIKE, QUANTILE, live_errors, scatter


def test_steps_read_back_as_they_were_written(tmp_path: Path) -> None:
    rows = rows_of(decodes(3))
    steps = {CALIBRATION: (rows, np.array([0.01, 0.0123456, 2.5])), LIVE: (rows[:1], np.ones(1))}
    write_steps(tmp_path, "some", steps, {"server": {"vocab": 7}})
    read, about = read_steps(tmp_path, "some")
    assert list(read) == [CALIBRATION, LIVE] and about["server"] == {"vocab": 7}
    for phase, (phase_rows, times_s) in steps.items():
        assert np.array_equal(read[phase][0], phase_rows)
        assert np.allclose(read[phase][1], times_s, rtol=1e-6)


def test_steps_with_other_columns_are_refused(tmp_path: Path) -> None:
    write_steps(tmp_path, "some", {}, {})
    (tmp_path / "some.csv.gz").write_bytes(gzip.compress(b"phase,time_s\nlive,1\n"))
    with pytest.raises(ValueError, match=r"some\.csv\.gz has columns \['phase', 'time_s'\]"):
        read_steps(tmp_path, "some")


def gpu_model_and_steps() -> tuple[BatchTimeModel, Samples]:
    """The model that the committed steps of calibration give, and those of live traffic."""
    steps, about = read_steps(SAMPLES_DIR / "step-times-gpu", "llama-3-8b")
    calibration = fit_all(steps[CALIBRATION], about["server"], seed=0)
    return calibration.models["pooled"], steps[LIVE]


def test_committed_gpu_steps_give_the_committed_errors() -> None:
    rows = orjson.loads((RESULTS_DIR / "step-times-gpu" / "summary.json").read_bytes())["rows"]
    for kind, error in held_out_errors(*gpu_model_and_steps()).items():
        [row] = [one for one in rows if (one["model"], one["kind"]) == ("pooled", kind)]
        assert error.mape == pytest.approx(row["mape"], rel=1e-3)
        assert error.num_steps == row["num_steps"]


def test_the_bound_that_a_scheduler_plans_by_covers_what_it_says() -> None:
    """On a GPU's steps of 5 ms: learned from every tenth of a second, it is three points off."""
    for mape, coverage in live_errors(*gpu_model_and_steps()).values():
        assert mape < 0.1
        assert coverage == pytest.approx(QUANTILE, abs=0.02)


def decodes(num_steps: int) -> list[BatchRow]:
    rows = [decode_row([100 + step, 300 + step]) for step in range(num_steps)]
    return [row for row in rows if row is not None]


@pytest.mark.parametrize("rows", [decodes(4000), [BatchRow(1, 90, 0, 8100, 0, 0, 0)] * 4000])
def test_scatter_is_what_a_perfect_model_would_be_off_by(rows: list[BatchRow]) -> None:
    rng = np.random.default_rng(0)
    times_s = 0.01 * np.exp(rng.normal(0.0, 0.05, 4000))
    perfect_mape = float(np.mean(np.abs(0.01 / times_s - 1.0)))
    assert scatter((rows_of(rows), times_s)) == {
        rows[0].kind: pytest.approx(perfect_mape, rel=0.05)
    }


def test_only_enough_steps_of_one_shape_tell_how_much_they_scatter() -> None:
    rows = decodes(MIN_ALIKE + 1)
    assert scatter((rows_of(rows), np.full(len(rows), 0.01))) == {StepKind.DECODE: 0.0}
    assert scatter((rows_of(rows[:-1]), np.full(len(rows) - 1, 0.01))) == {}


def test_steps_of_other_requests_do_not_scatter() -> None:
    rows = decodes(MIN_ALIKE + 1)
    others = [
        BatchRow(0, 0, 0, 0, 2, rows[-1].decode_tokens + 50, 400),  # another pair
        BatchRow(1, 8, 0, 64, 2, rows[-1].decode_tokens, 301),  # a prefill with them
    ]
    for other in others:
        times_s = np.full(len(rows), 0.01)
        assert scatter((rows_of([*rows[:-1], other]), times_s)) == {}
