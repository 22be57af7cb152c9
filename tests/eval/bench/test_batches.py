"""The bench of the batch service measures what it says, on a small job."""

from __future__ import annotations

from eval.bench import batches as bench_batches


def test_the_rate_is_that_of_lines_recorded() -> None:
    found = bench_batches.measured("rate", 400)
    assert found["lines_per_s"] > 0
    assert found["cpu_us_per_line"] > 0


def test_memory_is_measured_over_a_job_of_the_stated_size() -> None:
    found = bench_batches.measured("memory", 200)
    assert 200 * 3800 < found["num_bytes"] < 200 * 4200
    assert 0 < found["server_mb"] < 300
    assert 0 < found["checker_mb"] < 300
