"""The bench of the estimators runs and gives rows that go into the table."""

from __future__ import annotations

import pytest

from echo_sgl.estimators.batch_time import BATCH_TIME_MODELS
from eval.bench import estimators as bench_estimators
from eval.bench.run import checked


def test_the_bench_measures_every_model_and_claims_no_stock_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_estimators, "NUM_SAMPLES", 2000)
    monkeypatch.setattr(bench_estimators, "NUM_CALLS", 2)
    monkeypatch.setattr(bench_estimators, "REPEATS", 1)
    rows = checked("bench_estimators", bench_estimators.run())
    names = [row["name"] for row in rows]
    for model in BATCH_TIME_MODELS:
        assert f"predict, {model}" in names
        assert f"live: upper bound, {model}" in names
        assert f"refit, {model}" in names
        assert f"fit of 2,000 steps, {model}" in names
    assert all(row["stock"] is None and row["ratio"] is None and row["ours"] > 0 for row in rows)
