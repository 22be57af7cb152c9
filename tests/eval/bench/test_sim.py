"""The bench of the simulator: its day is a day, and it gives rows for the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.bench import sim as bench_sim
from eval.bench.run import checked


@pytest.fixture(params=[True, False], ids=["azure", "made"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With Azure's trace if it is at hand, and as on a machine that does not have it."""
    if not request.param:
        monkeypatch.setattr(bench_sim, "DATA_DIR", tmp_path)
    elif not (bench_sim.DATA_DIR / bench_sim.TRACE).is_file():
        pytest.skip("the real workloads are not here")


def test_requests_come_in_order_at_the_days_rate(source: None) -> None:
    trace = bench_sim.online_trace(60_000)
    assert list(trace.at_s) == sorted(trace.at_s)
    assert trace.duration_s == pytest.approx(bench_sim.DAY_S / 8, rel=0.05)
    assert sum(trace.prompt_tokens) / len(trace) == pytest.approx(1155, rel=0.1)


def test_the_bench_gives_rows_and_tells_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sim, "BENCH_SHARE", 0.001)
    rows = checked("bench_sim", bench_sim.run())
    assert all(row["ours"] > 0 and row["stock"] is None for row in rows)
    shares: list[float] = []
    results = bench_sim.simulate_share(0.0005, shares.append)
    assert results.offline_done == 25
    assert shares and shares == sorted(shares) and shares[-1] <= 1.0
