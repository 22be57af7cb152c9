"""The fleet experiment: its loads, its best rows, and a small run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from eval.fleet import run as fleet
from eval.fleet.run import FleetOptions, best_rows
from eval.fleet.setting import (
    kv_tokens,
    mean_context,
    offline_lengths,
    offline_load,
    scaled_lengths,
    scaled_online,
)
from eval.workloads import WorkloadError
from eval.workloads.traces import Arrival

ARRIVALS = [Arrival(float(n), 100 + n, 10) for n in range(200)]


def test_a_trace_is_scaled_by_dropping_and_repeating_and_keeps_its_span() -> None:
    """OOCO 5.1.3."""
    half, double = (scaled_online(ARRIVALS, factor, seed=0) for factor in (0.5, 2.5))
    assert 70 < len(half) < 130
    assert 470 < len(double) < 530
    assert list(double.at_s) == sorted(double.at_s)
    assert max(double.at_s) < 200
    assert {100 + int(at_s) for at_s in double.at_s} == set(double.prompt_tokens)
    assert scaled_online(ARRIVALS, 1.0, seed=0).at_s == scaled_online(ARRIVALS, 1.0, seed=9).at_s


def test_offline_requests_come_at_a_uniform_rate() -> None:
    load = offline_load([(10, 2), (30, 4)], 4.0, 2.0)
    assert list(load.at_s) == [n / 4 for n in range(8)]
    assert list(load.prompt_tokens[:3]) == [10, 30, 10]
    assert len(offline_load([(10, 2)], 0.0, 2.0)) == 0


def test_drawn_lengths_have_the_published_means() -> None:
    pairs = offline_lengths("ooc", seed=0)
    means = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
    assert means == pytest.approx([1200.52, 671.51], rel=0.02)
    assert pairs == offline_lengths("ooc", seed=0)
    with pytest.raises(WorkloadError, match="--job is 'x'; known are ooc, arxiv, reasoning"):
        offline_lengths("x", seed=0)


def test_lengths_are_scaled_to_the_means_of_the_paper() -> None:
    pairs = scaled_lengths(ARRIVALS)
    assert sum(prompt for prompt, _ in pairs) / len(pairs) == pytest.approx(1512.3, rel=0.01)
    assert mean_context([(100, 10)]) == 105.0
    assert 600_000 < kv_tokens() < 800_000


def row(arm: str, load: float, broken: float, rate: float) -> dict[str, Any]:
    return {
        "job": "ooc",
        "tpot_s": 0.1,
        "arm": arm,
        "load_rps": load,
        "violations": broken,
        "offline_tokens_per_s": rate,
    }


def test_the_best_row_is_below_the_first_load_that_breaks_the_threshold() -> None:
    rows = [
        row("a", 1, 0.0, 10.0),
        row("a", 2, 0.05, 20.0),
        row("a", 4, 0.0, 40.0),
        row("b", 1, 0.0, 10.0),
        row("b", 2, 0.03, 9.0),
        row("c", 1, 0.5, 10.0),
    ]
    best = {one["arm"]: one["load_rps"] for one in best_rows(rows, 0.03)}
    assert best == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"jobs": "qmsum:0.1"}, "--jobs holds 'qmsum:0.1'; allowed is ooc, arxiv, reasoning"),
        ({"jobs": "ooc"}, "--jobs holds 'ooc'"),
        ({"loads_rps": "1,x"}, "--loads-rps is '1,x'; it is numbers from 0 up"),
        ({"duration_s": 1.0}, r"--duration-s is 1\.0; it must be 60 or more"),
    ],
)
def test_wrong_options_are_told_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        FleetOptions(**changes)


def trace_file(folder: Path, num: int) -> str:
    lines = [f"{n / 2},{200 + n % 7},{5 + n % 11}" for n in range(num)]
    path = folder / "trace.csv"
    path.write_text("\n".join(["t_s,context_tokens,generated_tokens", *lines]), encoding="utf-8")
    return str(path)


def test_a_small_fleet_run_writes_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(fleet, "find_scale", lambda *_: 1.0)
    options = FleetOptions(
        name="small",
        trace=trace_file(tmp_path, 40),
        duration_s=60.0,
        loads_rps="0,1",
        jobs="ooc:0.1",
    )
    folder = fleet.run(options, command="python -m eval.fleet --name small")
    summary = orjson.loads((folder / "summary.json").read_bytes())
    assert len(summary["rows"]) == 2 * len(fleet.ARMS)
    assert all(one["violations"] == 0.0 for one in summary["rows"])
    assert {one["arm"] for one in summary["best"]} == set(fleet.ARMS)
    again = fleet.run(options, command="python -m eval.fleet --name small")
    assert orjson.loads((again / "summary.json").read_bytes()) == summary
    text = (folder / "summary.md").read_text(encoding="utf-8")
    assert "under an assumed profile" in text


def test_the_scale_is_the_most_that_base_pd_serves(tmp_path: Path) -> None:
    options = FleetOptions(trace=trace_file(tmp_path, 60), duration_s=60.0, ttft_s=0.3)
    arrivals = fleet.read_arrivals(options)
    scale = fleet.find_scale(options, arrivals, 0.1)
    for factor, is_met in ((scale, True), (scale + fleet.SCALE_STEP, False)):
        config = fleet.fleet_config(options, "base-pd", 0.1, typical_tokens=1)
        online = scaled_online(arrivals, factor, seed=0)
        result = fleet.simulate_fleet(config, online, until_s=120.0)
        assert (result.violation_share <= fleet.JUST_MET) is is_met
