"""The bench of the batch service measures what it says, on a small job."""

from __future__ import annotations

import asyncio

import pytest

from eval import bench_batches


def test_the_rate_is_that_of_lines_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_batches, "RATE_LINES", 400)
    found = asyncio.run(bench_batches.measure_rate())
    assert found["lines_per_s"] > 0
    assert found["cpu_us_per_line"] > 0


def test_memory_is_measured_over_a_job_of_the_stated_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_batches, "MEMORY_LINES", 200)
    found = asyncio.run(bench_batches.measure_memory())
    assert 200 * 3800 < found["num_bytes"] < 200 * 4200
    assert 0 <= found["server_mb"] < 300
    # Of all children of this process, so also of servers that earlier tests started.
    assert found["checker_mb"] > 0
