"""Offline chunks that are worth a step, simulated."""

from __future__ import annotations

import pytest

from eval import chunks
from eval.chunks import SEEDS, SETTINGS, ChunksOptions, Point, main, points, run_point
from eval.workloads import DATA_DIR

OPTIONS = ChunksOptions(duration_s=40.0)


def test_on_a_gpu_they_bring_the_job_further_within_the_promises():
    fits, is_worth, most, _, waits_less, _ = SETTINGS
    short, worth, ahead, hurried = (
        run_point(OPTIONS, Point("H200, 64 places", "llm-d", 8.0, 0, setting))
        for setting in (fits, is_worth, most, waits_less)
    )
    assert worth["offline_tokens_per_s"] > 1.15 * short["offline_tokens_per_s"]
    assert ahead["offline_tokens_per_s"] > 1.05 * worth["offline_tokens_per_s"]
    assert ahead["offline_tokens_per_s"] > 1.05 * hurried["offline_tokens_per_s"]
    assert min(row["kept"] for row in (short, worth, ahead)) > 0.98
    again = run_point(OPTIONS, Point("H200, 64 places", "llm-d", 8.0, 0, "whatever fits"))
    assert short == again


def test_settings_of_one_load_follow_each_other():
    todo = list(points())
    assert len(set(todo)) == len(todo)
    size = len(SETTINGS)
    for start in range(0, len(todo), size):
        loads = {(one.server, one.workload, one.rate_rps, one.seed) for one in todo[start:][:size]}
        assert len(loads) == 1


@pytest.mark.skipif(not DATA_DIR.is_dir(), reason="the real workloads are not here")
def test_main_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    few = [
        Point("CPU", "azure-qmsum", 1.6, seed, setting) for seed in SEEDS for setting in SETTINGS
    ]
    monkeypatch.setattr(chunks, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(chunks, "points", lambda: iter(few))
    main(["--duration-s", "10", "--name", "few"])
    text = (tmp_path / "few" / "summary.md").read_text()
    assert text in capsys.readouterr().out
    assert "| CPU | azure-qmsum | 1.6 | whatever fits | 100.0%, 100.0% |" in text
    assert (tmp_path / "few" / "config.json").exists()
