"""Jobs that start in lots and at once, simulated."""

from __future__ import annotations

from eval import lots
from eval.lots import SERVERS, LotsOptions, Point, Shape, main, points, run_point, summary_markdown

OPTIONS = LotsOptions(duration_s=10.0)
SHORT = Shape(1536, 100, 1, 255)


def test_both_ways_have_the_same_load_and_lots_take_fewer_prefill_steps():
    row = run_point(OPTIONS, Point("H200", SHORT, 4.0))
    in_lots, at_once = row["prefill_steps"]
    assert in_lots < 0.7 * at_once
    assert row["tokens_per_s"][0] > 1.05 * row["tokens_per_s"][1]
    assert row["tpot_s"][0] < row["tpot_s"][1]
    assert row == run_point(OPTIONS, Point("H200", SHORT, 4.0))


def test_every_job_runs_alone_and_beside_online_requests():
    todo = list(points())
    assert len(set(todo)) == len(todo) == sum(2 * len(one.shapes) for one in SERVERS.values())
    alone = run_point(OPTIONS, Point("CPU", SERVERS["CPU"].shapes[0], 0.0))
    assert "kept" not in alone and alone["tokens_per_s"][1] > 0


def test_main_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lots, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(lots, "points", lambda: iter([Point("CPU", Shape(512, 40, 1, 31), 0.0)]))
    main(["--duration-s", "5", "--name", "few"])
    text = (tmp_path / "few" / "summary.md").read_text()
    assert text in capsys.readouterr().out
    assert "| CPU | 40 tokens behind 512 shared, answers of 1 to 31 | 0 |" in text
    assert (tmp_path / "few" / "config.json").exists()


def test_the_table_has_lots_first_and_at_once_in_brackets():
    row = {
        **{"server": "H200", "shape": "s", "online_rps": 4.0, "tokens_per_s": [1100.0, 1000.0]},
        **{"prefill_steps": [10, 20], "tpot_s": [0.01, 0.012], "ttft_p99_s": [0.1, 0.2]},
        "kept": [1.0, 0.99],
    }
    config = {"name": "n", "command": "c", "options": {"duration_s": 1.0}, "servers": {}}
    text = summary_markdown(config, [row])
    assert "| H200 | s | 4 | 1,100 (1,000) | +10.0% | 10 (20) | 10.0 (12.0) | 100 (200) |" in text
