"""The simulated search for how much slack to use: what a point counts, and what is refused."""

from __future__ import annotations

import pytest

from eval.slack_use import (
    SETTINGS,
    Point,
    SlackOptions,
    main,
    run_point,
    summary_markdown,
    totals,
)

OPTIONS = SlackOptions(rates_rps="1.5", duration_s=10.0)
ECHO, BUDGET = "pace 0.5 (echo.toml)", "a budget (hygen.toml)"


@pytest.fixture(scope="module")
def rows():
    return [run_point(OPTIONS, Point(1.5, "1.2,1.1", 0, setting)) for setting in (ECHO, BUDGET)]


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
    assert run_point(OPTIONS, Point(1.5, "1.2,1.1", 0, ECHO)) == rows[0]


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
    assert f"| 1.5 | 1.2,1.1 | {ECHO} | {share:.1%} |" in text


def test_every_setting_is_one_that_the_config_allows():
    assert ECHO in SETTINGS and len(SETTINGS) == len({str(one) for one in SETTINGS.values()})


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rates-rps", "1,none"], "--rates-rps holds 'none'; allowed are numbers above 0"),
        (["--slo-factors", "1.5;0.9"], "--slo-factor is '0.9'; give one number of 1 or more"),
        (["--profile", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_options_end_with_a_sentence(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
