"""What an ablation makes of its runs: figures, comparisons, the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from eval.ablation.figures import (
    at_equal_attainment,
    ceiling_figures,
    reference_figures,
    run_figures,
    summarise,
)
from eval.ablation.options import AblationOptions
from eval.ablation.phases import ArmRun, online_waits
from eval.ablation.report import summary_markdown
from eval.ablation.run import best_reference
from eval.figures.slo import Slo
from tests.eval.figures.test_summary import offline, online

Tree = dict[str, Any]

SLO = Slo(ttft_s=0.15, tpot_s=0.055)


WAITED = {"longest_wait_s": 0.02, "most_offline_steps_waited": 1.0}


def test_waits_are_read_from_the_page_of_a_server_that_tells_them() -> None:
    page = (
        "# TYPE echo_sgl_online_wait_seconds gauge\n"
        'echo_sgl_online_wait_seconds{task="online"} 0.25\n'
        "# TYPE echo_sgl_online_wait_steps gauge\n"
        'echo_sgl_online_wait_steps{task="online"} 1\n'
    )
    assert online_waits(page) == {"longest_wait_s": 0.25, "most_offline_steps_waited": 1.0}
    told = online_waits("# TYPE other gauge\nother 3\n")
    assert told == {"longest_wait_s": None, "most_offline_steps_waited": None}


def full_decode(start_s: float, *, online: int) -> Tree:
    """A step of a hundred requests, so many of them online, that takes a second."""
    counts = {"num_prefills": 0, "prefill_tokens": 0, "num_decodes": 100}
    return {**counts, "num_offline": 100 - online, "start_s": start_s, "time_s": 1.0, "own_s": 0.0}


def run_of(
    *,
    slow: int = 0,
    slow_alone: int = 0,
    tokens: int = 100,
    parks: float | None = None,
    steps: Sequence[Tree] = (),
    lines_per_s: int = 1,
    num_lines: int = 100,
) -> Tree:
    """Ten online requests alone and together, some of them too slow; a hundred lines."""
    late = {"first_token_s": 99.0, "last_token_s": 99.2}
    alone = [online(number, **(late if number < slow_alone else {})) for number in range(10)]
    mixed = [online(number, **(late if number < slow else {})) for number in range(10)]
    lines = [offline(number / lines_per_s, tokens=tokens) for number in range(num_lines)]
    counters = {} if parks is None else {"echo_sgl_parks_total{task=offline}": parks}
    records, spans_s = [*mixed, *lines], {"together": (1000.0, 1070.0)}
    run = ArmRun(
        *(alone, lines, records, (20.0, 60.0), counters, WAITED, list(steps), spans_s),
        probe_s=0.006,
    )
    stock = [online(n, first_token_s=n + 0.05, last_token_s=n + 0.2) for n in range(10)]
    reference = {**reference_figures(stock, SLO), "probe_s": 0.004}
    return run_figures(run, SLO, ceiling=ceiling_figures(lines), reference=reference, deadlines={})


def test_a_runs_figures_compare_with_alone_and_with_the_stock_server() -> None:
    tree = run_of(slow=1, parks=7.0)
    assert tree["attainment"] == {"alone": 1.0, "together": 0.9, "of_alone": 0.9}
    assert tree["vs_alone"]["ttft_ms_p50"] == pytest.approx(1.0)
    assert tree["vs_stock_alone"]["ttft_ms_p50"] == pytest.approx(2.0)
    assert tree["harvest_of_ceiling"] == pytest.approx(1.0)
    assert (tree["parks"], tree["retractions"]) == (7.0, None)


def test_steps_count_while_online_requests_come_and_say_what_room_they_leave() -> None:
    tree = run_of(steps=[full_decode(1000.0 + second, online=second) for second in (10, 30, 50)])
    # The first of them ran before anybody was online.
    assert tree["steps"]["room"] == pytest.approx(1.0 - (30 + 50) / 200)
    assert tree["harvest_of_room"] == pytest.approx(1.0 / 0.6)


def test_a_server_that_was_disturbed_alone_does_not_make_attainment_look_good() -> None:
    tree = run_of(slow=4, slow_alone=7)
    assert tree["attainment"] == {"alone": 0.3, "together": 0.6, "of_alone": 0.6}
    assert at_equal_attainment([tree]) == {"runs": 0}


def test_the_fastest_run_alone_gives_the_promises_and_the_others_are_held_against_them() -> None:
    fast = [online(n, first_token_s=n + 0.1, last_token_s=n + 0.2) for n in range(10)]
    slow = [online(n, first_token_s=n + 0.1 * (n + 1), last_token_s=n + 3.0) for n in range(10)]
    alone, _, _ = best_reference([fast], (1.5, 1.5))
    slo, records, again = best_reference([slow, fast], (1.5, 1.5))
    assert slo == alone
    assert records is fast
    assert again == [pytest.approx(0.0)]


def test_arms_are_compared_at_equal_attainment() -> None:
    kept, missed = run_of(tokens=300), run_of(slow=1, tokens=900)
    equal = at_equal_attainment([kept, missed])
    assert equal["runs"] == 1
    assert equal["harvest_tokens_per_s"]["max"] == kept["harvest_tokens_per_s"]
    assert at_equal_attainment([missed]) == {"runs": 0}


def test_the_ratio_to_the_base_arm_pairs_repetitions() -> None:
    runs = {
        "stock-priority": {1: run_of(tokens=100), 3: run_of(tokens=200)},
        "echo": {1: run_of(tokens=300), 2: run_of(tokens=999), 3: run_of(tokens=600)},
        "bs": {},
    }
    summary = summarise(runs)
    assert list(summary) == ["stock-priority", "echo"]
    assert summary["echo"]["vs_base"]["median"] == pytest.approx(3.0)
    assert summary["echo"]["repetitions"] == 3
    alone = summarise({"echo": runs["echo"]})
    assert alone["echo"]["vs_base"]["median"] is None


def test_arms_are_held_against_the_server_alone_in_the_same_round() -> None:
    runs = {
        "alone": {1: run_of(num_lines=0), 2: run_of(num_lines=0, slow=5)},
        "echo": {1: run_of(slow=4), 2: run_of(slow=5), 3: run_of(slow=1)},
    }
    summary = summarise(runs)
    of_alone = summary["echo"]["attainment"]["of_alone"]
    # Held against what it was when promises were taken where it was not measured again.
    assert of_alone == {"median": 0.9, "min": 0.6, "max": 1.0}
    assert summary["echo"]["at_equal_attainment"]["runs"] == 1
    alone = summary["alone"]
    assert alone["attainment"]["of_alone"]["median"] == 1.0
    assert alone["attainment"]["together"]["median"] == 0.75
    assert alone["harvest_tokens_per_s"]["median"] is None and not alone["job_ran_dry"]["max"]
    before = summarise({"echo": runs["echo"]})["echo"]["attainment"]["of_alone"]
    assert before["min"] == 0.5, "the better of both servers alone, when it was measured"


def test_an_arm_whose_job_is_done_before_online_requests_come_is_no_arm_that_did_nothing() -> None:
    quick = run_of(lines_per_s=10)
    assert quick["harvest_tokens_per_s"] is quick["harvest_of_ceiling"] is None
    assert quick["job_ran_dry"] and quick["steps"]["room"] is quick["harvest_of_room"] is None
    equal = at_equal_attainment([quick])
    assert equal["runs"] == 1 and equal["harvest_tokens_per_s"]["median"] is None
    for base, other in ((quick, run_of()), (run_of(), quick)):
        summary = summarise({"stock-priority": {1: base}, "echo": {1: other}})
        assert summary["echo"]["vs_base"]["median"] is None


def test_the_report_shows_every_arm_and_marks_those_that_break_promises() -> None:
    runs = {
        "stock-priority": {1: run_of(slow=5, tokens=100)},
        "echo": {1: run_of(tokens=300, parks=4.0), 2: run_of(tokens=300, parks=6.0)},
        "quick": {1: run_of(lines_per_s=10)},
    }
    config = {
        "name": "x", "command": "python -m eval.ablation --name x", "machine": "a machine",
        "date": "2026-01-01", "sglang": "0", "torch": "0", "python": "0",
        "options": dataclasses.asdict(AblationOptions(name="x")), "saturation_rps": 8.0,
        "slo_factors": (1.5, 1.5), "slos": [dataclasses.asdict(SLO)], "alone_again": [0.983],
        "offline": {"lines": 100},
        "online": {"requests": 10, "prompt_tokens": 400, "output_tokens": 50},
        "budgets": {
            "echo": [],
            "hygen": [
                {"budget_s": 0.0123, "keeps_promises": True},
                {"budget_s": 0.0009, "keeps_promises": False},
                {"budget_s": None, "keeps_promises": False},
            ],
        },
        "failures": ["bros 1: the server ended"],
    }  # fmt: skip
    text = summary_markdown(config, summarise(runs))
    assert "- hygen: a budget of 12.3 ms, the largest whose replays keep the promises" in text
    assert "- hygen: a budget of 0.9 ms, the smallest tried, since none whose replays" in text
    assert "- hygen: its preset's budget, since no replay kept the promises" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert "- the stock server alone measured again keeps that for 98.3% of the requests" in text
    assert "NOT MEASURED: bros 1: the server ended" in text
    assert ["stock-priority", "0 of 1", "does not reach it", "-", "-"] in rows
    assert ["echo", "2 of 2", "always", "300", "100.0%"] in rows
    assert ["quick", "1 of 1", "always", "-", "-"] in rows
    assert ["quick", "1000", "-", "yes"] in [row[:4] for row in rows]
    assert [
        "echo",
        "2",
        "100.0%",
        "100.0%",
        "100.0%",
        "2.00x",
        "1.33x",
        "100.0%",
        "-",
        "300",
        "3.00x",
        "1.50x",
    ] in rows
    assert ["echo", "-", "5 [4-6]", "-", "100", "20", "1", "0", "0"] in rows
    assert "- workload azure-qmsum: Azure conversation trace beside QMSum\n" in text


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ("azure-qmsum", "beside QMSum; trace mine.csv; job mine.jsonl in place of its own\n"),
        ("llm-d", "jobs of different windows; job mine.jsonl in place of its own\n"),
    ],
)
def test_the_report_names_what_stands_in_for_the_workloads_own(workload: str, said: str) -> None:
    config = {
        "name": "x", "command": "", "machine": "", "date": "", "sglang": "0", "torch": "0",
        "python": "0", "saturation_rps": 8.0, "slo_factors": (1.5, 1.5),
        "options": dataclasses.asdict(
            AblationOptions(workload=workload, trace="mine.csv", job="mine.jsonl")
        ),
        "slos": [dataclasses.asdict(SLO)], "alone_again": [1.0], "offline": {"lines": 100},
        "online": {"requests": 10, "prompt_tokens": 400, "output_tokens": 50}, "failures": [],
        "budgets": {},
    }  # fmt: skip
    assert said in summary_markdown(config, summarise({"echo": {1: run_of()}}))
