"""What the rules about first tokens gain, simulated."""

from __future__ import annotations

import dataclasses

from eval import first_tokens
from eval.first_tokens import (
    SEEDS,
    SETTINGS,
    SLOWNESS,
    FirstTokensOptions,
    Point,
    main,
    points,
    run_point,
    summary_markdown,
)

ON_CPU = Point("CPU", "llm-d", 1.6, 0, 1.0, "echo.toml")


def test_settings_have_the_same_load_and_come_out_the_same_again():
    options = FirstTokensOptions(duration_s=10.0)
    rows = [run_point(options, dataclasses.replace(ON_CPU, setting=one)) for one in SETTINGS]
    assert len({row["num_online"] for row in rows}) == 1
    for row in rows:
        assert 0 < row["num_kept"] <= row["num_online"] - row["num_late_first"]
        assert row["offline_tokens_per_s"] > 0
    assert rows[0] == run_point(options, ON_CPU)


def test_points_of_one_load_follow_each_other():
    todo = list(points())
    assert len(set(todo)) == len(todo)
    size = len(SLOWNESS) * len(SETTINGS)
    for start in range(0, len(todo), size):
        loads = {(one.server, one.workload, one.rate_rps, one.seed) for one in todo[start:][:size]}
        assert len(loads) == 1


def test_seeds_are_summed_and_settings_stand_beside_each_other():
    load = {"server": "CPU", "workload": "w", "rate_rps": 1.6, "slowness": 1.1, "num_online": 50}
    by_setting = {
        "echo.toml": {"num_kept": 50, "num_late_first": 0, "offline_tokens_per_s": 1000.0},
        "another": {"num_kept": 49, "num_late_first": 1, "offline_tokens_per_s": 900.0},
    }
    rows = [
        {**load, "seed": seed, "setting": name, **counts}
        for seed in (0, 1)
        for name, counts in by_setting.items()
    ]
    config = {"name": "n", "command": "c", "options": {"duration_s": 60.0}}
    text = summary_markdown(config, rows)
    assert "| CPU | w | 1.6 | 1.1 | 100 | 100.00% (0) | 98.00% (2) |" in text
    assert "| all |  |  |  | 100 | 100.00% (0) | 98.00% (2) |" in text
    assert "| CPU | w | 1.6 | 1.1 | 1,000 | 0.900x |" in text
    assert f"{len(SEEDS)} seeds" in text


def test_main_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(first_tokens, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(first_tokens, "points", lambda: iter([ON_CPU]))
    main(["--duration-s", "5", "--name", "few"])
    text = (tmp_path / "few" / "summary.md").read_text()
    assert text in capsys.readouterr().out
    assert "| CPU | llm-d | 1.6 | 1 |" in text
    assert (tmp_path / "few" / "config.json").exists()
