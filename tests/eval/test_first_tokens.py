"""Online prefills in one step and in two, simulated."""

from __future__ import annotations

from eval import first_tokens
from eval.first_tokens import (
    SEEDS,
    SLOWNESS,
    FirstTokensOptions,
    Point,
    main,
    points,
    run_point,
    summary_markdown,
)

ON_CPU = Point("CPU", "llm-d", 1.6, 0, 1.0)


def test_both_ways_have_the_same_load_and_come_out_the_same_again():
    row = run_point(FirstTokensOptions(duration_s=10.0), ON_CPU)
    assert row["num_online"][0] == row["num_online"][1] > 0
    assert 0 < row["num_kept"][0] <= row["num_online"][0]
    assert min(row["offline_tokens_per_s"]) > 0
    assert row == run_point(FirstTokensOptions(duration_s=10.0), ON_CPU)


def test_points_of_one_load_follow_each_other():
    todo = list(points())
    assert len(set(todo)) == len(todo)
    size = len(SLOWNESS)
    for start in range(0, len(todo), size):
        loads = {(one.server, one.workload, one.rate_rps, one.seed) for one in todo[start:][:size]}
        assert len(loads) == 1


def test_seeds_are_summed_and_one_step_is_in_brackets():
    counts = {"num_online": [50, 50], "num_kept": [50, 49], "num_late_first": [0, 1]}
    row = {"server": "CPU", "workload": "w", "rate_rps": 1.6, "slowness": 1.1, **counts}
    rows = [{**row, "seed": seed, "offline_tokens_per_s": [900.0, 1000.0]} for seed in (0, 1)]
    config = {"name": "n", "command": "c", "options": {"duration_s": 60.0}}
    text = summary_markdown(config, rows)
    line = "| CPU | w | 1.6 | 1.1 | 100 | 100.00% (98.00%) | 0 (2) | 900 (1,000) |"
    assert line in text
    assert f"{len(SEEDS)} seeds" in text


def test_main_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(first_tokens, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(first_tokens, "points", lambda: iter([ON_CPU]))
    main(["--duration-s", "5", "--name", "few"])
    text = (tmp_path / "few" / "summary.md").read_text()
    assert text in capsys.readouterr().out
    assert "| CPU | llm-d | 1.6 | 1 |" in text
    assert (tmp_path / "few" / "config.json").exists()
