"""The planner example's trace: what it takes of the real one, and that the planner reads it."""

from __future__ import annotations

import gzip

from echo_sgl.sim.trace_files import read_trace_file
from eval import plan_example


def test_every_tenth_request_of_the_first_minutes_is_kept_at_its_time(tmp_path, monkeypatch):
    rows = [f"{number},{100 + number},{1 + number}" for number in range(400)]
    source = tmp_path / "trace.csv.gz"
    source.write_bytes(
        gzip.compress("\n".join(["t_s,context_tokens,generated_tokens", *rows]).encode())
    )
    monkeypatch.setattr(plan_example, "find_data", lambda name: source)
    plan_example.write_trace(tmp_path / "sub" / "online.csv")
    trace = read_trace_file(tmp_path / "sub" / "online.csv").trace
    assert list(trace.at_s) == [float(second) for second in range(0, 300, 10)]
    assert trace.prompt_tokens[-1] == 390 and trace.output_tokens[-1] == 291
