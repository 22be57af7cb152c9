"""The simulated default: what online users notice of a job without promises."""

from __future__ import annotations

import pytest

from eval import unpromised
from eval.unpromised import (
    FIGURES,
    RATES_RPS,
    SETTINGS,
    WORKLOADS,
    Point,
    UnpromisedOptions,
    main,
    points,
    run_point,
    summary_markdown,
)
from eval.workloads import DATA_DIR

pytestmark = pytest.mark.skipif(not DATA_DIR.is_dir(), reason="the real workloads are not here")

OPTIONS = UnpromisedOptions(duration_s=15.0)
H200 = Point("H200", 10.0, "azure-qmsum", "echo.toml")


def test_beside_online_decodes_a_gpu_s_job_gets_on_and_they_hardly_notice():
    """Its host takes a third of each step: charged to the job, nothing of it would run."""
    row = run_point(OPTIONS, Point("H200", 10.0, "llm-d", "echo.toml"))
    assert row["online"] > 100
    assert row["offline_tokens_per_s"] > 1000
    assert 1.0 <= row["tpot_p50"] <= 1.2


def test_more_inflation_is_more_of_the_job():
    less, more = (
        run_point(OPTIONS, Point("CPU", 1.5, "llm-d", f"max_inflation {value}"))
        for value in ("1.05", "1.2")
    )
    assert less["offline_tokens_per_s"] < more["offline_tokens_per_s"]
    assert less["tpot_p50"] < more["tpot_p50"]


def test_every_load_meets_every_setting_once():
    todo = list(points())
    assert len(set(todo)) == len(todo)
    assert len(todo) == len(SETTINGS) * len(WORKLOADS) * sum(map(len, RATES_RPS.values()))


def test_the_table_shows_the_mean_and_the_worst_of_the_workloads():
    base = {"server": "CPU", "rate_rps": 1.0, "setting": "echo.toml", "online": 9}
    rows = [
        {**base, **dict.fromkeys(FIGURES, value), "offline_tokens_per_s": 1000 * value}
        for value in (1.0, 2.0)
    ]
    config = {"name": "n", "command": "c", "options": {"duration_s": 1.0}, "h200_sizes": {}}
    text = summary_markdown(config, rows)
    assert "| CPU | 1 | echo.toml | 1.50x (at most 2.00x) |" in text
    assert "| 1,500 (1,000, 2,000) |" in text


def test_what_was_run_is_written_and_wrong_options_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(unpromised, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(unpromised, "points", lambda: iter([H200]))
    main(["--duration-s", "5", "--name", "one"])
    assert "| H200 | 10 | echo.toml |" in (tmp_path / "one" / "summary.md").read_text()
    with pytest.raises(SystemExit) as ended:
        main(["--workers", "0"])
    assert ended.value.code == 2
    assert "--workers is 0" in capsys.readouterr().err
