"""The simulated search for how much slack to use: what a point counts, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from echo_sgl.config import load_config
from eval.ablation.arms import ERRORS
from eval.paths import CONFIGS_DIR
from eval.simulated.load import Load, latencies, with_sections, with_slo
from eval.slack_use import (
    ALONE,
    LOADS,
    SETTINGS,
    Point,
    SlackOptions,
    main,
    run_point,
    summary_markdown,
    totals,
)
from eval.workloads import DATA_DIR

pytestmark = pytest.mark.skipif(not DATA_DIR.is_dir(), reason="the real workloads are not here")

OPTIONS = SlackOptions(rates_rps="1.5", duration_s=10.0)
ECHO, BUDGET = "pace 0.5 (echo.toml)", "a budget (hygen.toml)"


def point(setting: str, slowness: float = 1.0, rate_rps: float = 1.5) -> Point:
    return Point(rate_rps, 0, "1.2,1.1", slowness, setting)


@pytest.fixture(scope="module")
def rows():
    return [run_point(OPTIONS, point(setting)) for setting in (ECHO, BUDGET)]


def test_every_online_request_is_kept_or_broken_and_the_job_gets_on(rows):
    for row in rows:
        assert row["online"] > 5
        broken = row["online"] - row["kept"]
        assert max(row["late_first_tokens"], row["slow"]) <= broken
        assert broken <= row["late_first_tokens"] + row["slow"]
        assert row["offline_tokens_per_s"] > 0
        assert row["ttft_promise_s"] > row["tpot_promise_s"] > 0


def test_all_settings_are_held_to_the_same_promise_on_the_same_load(rows):
    same = ("online", "ttft_promise_s", "tpot_promise_s")
    assert [rows[0][name] for name in same] == [rows[1][name] for name in same]


def test_the_same_point_comes_out_the_same(rows):
    assert run_point(OPTIONS, point(ECHO)) == rows[0]


def test_the_table_sums_what_was_counted(rows):
    config = {
        "name": "n",
        "command": "c",
        "options": {"duration_s": 10.0},
        "profile": {"device": "d", "model": "m", "num_samples": 1, "sglang_version": "v"},
    }
    [echo, _] = totals([*rows, rows[0]])
    assert echo["online"] == 2 * rows[0]["online"] and echo["loads"] == 2
    text = summary_markdown(config, rows)
    share = rows[0]["kept"] / rows[0]["online"]
    assert f"| 1.5 | 1.2,1.1 | 1 | {ECHO} | {share:.1%} |" in text


def test_a_slower_machine_keeps_fewer_promises_and_without_a_job_there_is_none():
    alone, slow = (run_point(OPTIONS, point(ALONE, slowness)) for slowness in (1.0, 2.0))
    assert alone["offline_tokens_per_s"] == 0.0
    assert slow["kept"] < alone["kept"]


@pytest.mark.parametrize("error", [error for error in ERRORS if error])
def test_wrong_predictions_are_the_scheduler_s_own(error):
    name = f"predictions {error:+.0%}"
    preset, sections = SETTINGS[name]
    echo = with_sections(load_config(CONFIGS_DIR / f"{preset}.toml"), sections)
    assert echo.estimator.error == error


def test_predictions_that_are_far_off_change_what_the_job_gets():
    options = dataclasses.replace(OPTIONS, duration_s=40.0)
    right, short = (
        run_point(options, point(name, rate_rps=3.0)) for name in (ECHO, "predictions -10%")
    )
    assert short["offline_tokens_per_s"] != right["offline_tokens_per_s"]


def test_online_requests_alone_lose_nothing_by_being_promised_something():
    """In llm-d's high phases all slots are taken: what wastes time there makes a queue.

    Cut to the slack, online prefills waste it; starting in lots saves it.
    """
    pattern = next(one for one in LOADS if one.workload == "llm-d")
    load = Load(2.5, pattern, duration_s=40.0)
    echo = load_config(CONFIGS_DIR / "echo.toml")
    slo = load.promise("1.2,1.1")

    def served(**steps: str | bool) -> tuple[float, float]:
        promised = with_slo(with_sections(echo, {"steps": steps}), slo)
        ttft_s, tpot_s = latencies(load.run(promised, load.online))
        kept = np.mean((ttft_s <= slo.ttft_s) & (tpot_s <= slo.tpot_s))
        return float(kept), float(np.mean(ttft_s))

    kept, ttft_s = served()
    assert kept > 0.98
    for wasteful in ({"online_chunks": "slack"}, {"gather_online": False}):
        wasteful_kept, wasteful_ttft_s = served(**wasteful)
        assert wasteful_kept <= kept and wasteful_ttft_s > 1.05 * ttft_s


def test_every_setting_is_one_that_the_config_allows():
    assert ECHO in SETTINGS and len(SETTINGS) == len({str(one) for one in SETTINGS.values()})


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rates-rps", "1,none"], "--rates-rps holds 'none'; allowed are numbers above 0"),
        (["--profile", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_options_end_with_a_sentence(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
