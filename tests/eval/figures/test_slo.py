"""Promises from measured latencies, and who kept them; windows of jobs; saturation."""

from __future__ import annotations

from typing import Any

import pytest

from echo_sgl.types import Task
from eval.figures.deadlines import deadline_figures, deadlines_of, with_deadline
from eval.figures.slo import Slo, attainment, derive_slo, parse_factors
from eval.load.records import Record, Status
from eval.load.saturation import saturation_rps
from eval.workloads import WorkloadError
from eval.workloads.jobs import batch_line
from tests.eval.figures.test_summary import offline, online


def test_promises_are_the_p99_of_alone_times_the_factors() -> None:
    slo = derive_slo([online(n, last_token_s=n + 0.1 + 0.04 * 4) for n in range(20)], (1.5, 1.1))
    assert slo.ttft_s == pytest.approx(0.15)
    assert slo.tpot_s == pytest.approx(0.044)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [online(status=Status.ERROR)],
        [online(), online(status=Status.CANCELLED)],
        [online(completion_tokens=1)],
    ],
)
def test_nothing_is_promised_when_alone_was_not_fully_answered(bad: list[Record]) -> None:
    with pytest.raises(WorkloadError, match="unanswered, so nothing can be promised"):
        derive_slo(bad, (1.5, 1.5))


def test_why_nothing_is_promised_is_said_with_what_the_server_answered() -> None:
    """Else a trace of prompts longer than the model's context looks like too high a rate."""
    refused = [online(), online(status=Status.ERROR, error="HTTP 400: longer than the context")]
    with pytest.raises(
        WorkloadError, match=r"left 1 of 2 .* \(HTTP 400: longer than the context\)"
    ):
        derive_slo(refused, (1.5, 1.1))


@pytest.mark.parametrize(
    ("values", "is_met"),
    [
        ({}, True),
        ({"first_token_s": 0.15}, True),
        ({"first_token_s": 0.16}, False),
        ({"last_token_s": 0.35}, False),
        ({"status": Status.ERROR}, False),
        ({"status": Status.CANCELLED}, False),
        ({"completion_tokens": 1, "last_token_s": 0.1}, True),
    ],
)
def test_a_promise_is_kept_by_a_full_answer_with_both_times(
    values: dict[str, Any], is_met: bool
) -> None:
    assert Slo(ttft_s=0.15, tpot_s=0.055).is_met(online(**values)) is is_met


def test_attainment_counts_the_unanswered_and_leaves_offline_out() -> None:
    slo = Slo(0.15, 0.055)
    records = [online(), online(), online(status=Status.ERROR), offline(1.0)]
    assert attainment(records, slo) == pytest.approx(2 / 3)
    assert attainment([offline(1.0)], slo) is None


def test_factors_are_one_for_both_or_one_for_each() -> None:
    assert parse_factors("1.5") == (1.5, 1.5)
    assert parse_factors("1.2,1.1") == (1.2, 1.1)


@pytest.mark.parametrize("text", ["", "x", "0.9", "1,2,3", "nan", "inf", "1.2,"])
def test_other_factors_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--slo-factor is"):
        parse_factors(text)


def line(name: str, *, end_s: float, status: Status = Status.OK, sent_s: float = 0.0) -> Record:
    return Record(name, Task.OFFLINE, sent_s, end_s=end_s, status=status)


def test_a_window_is_named_in_the_body_and_read_back_from_it() -> None:
    plain = batch_line("a", {"prompt": "x", "custom_params": {"k": 1}})
    named = with_deadline(plain, 30.0)
    assert named["body"]["custom_params"] == {"k": 1, "deadline_s": 30.0}
    assert plain["body"]["custom_params"] == {"k": 1}
    assert deadlines_of([named, batch_line("b", {})]) == {"a": 30.0}


def test_windows_that_closed_are_judged_and_open_ones_are_not() -> None:
    deadlines = dict.fromkeys(("in time", "late", "never", "open", "failed"), 10.0)
    records = [
        line("in time", end_s=10.0),
        line("late", end_s=15.0, sent_s=4.0),
        line("never", end_s=20.0, status=Status.CANCELLED),
        line("open", end_s=20.0, sent_s=11.0, status=Status.CANCELLED),
        line("failed", end_s=12.0, sent_s=11.0, status=Status.ERROR),
        line("no window", end_s=99.0),
    ]
    figures = deadline_figures(records, deadlines, end_s=20.0)
    assert figures == {"judged": 4, "missed": 3, "share": 0.75}
    assert deadline_figures(records, {}, end_s=20.0)["share"] is None


def test_saturation_is_the_rate_of_answers_without_start_and_end() -> None:
    steady = [online(end_s=10.0 + n / 4) for n in range(80)]
    ragged = [online(end_s=5.0)] * 10 + steady + [online(end_s=60.0)] * 10
    assert saturation_rps(ragged) == pytest.approx(4.0)


def test_answers_in_few_lots_are_no_rate() -> None:
    """Between the first and the last tenth of the answers nearly all came at once."""
    ends_s = [12.0] * 8 + [14.0 + n / 1000 for n in range(64)] + [16.0] * 8
    for lots_s in (ends_s, [10.0] * 60 + [20.0] * 60):
        lots = [online(sent_s=0.0, end_s=end_s) for end_s in lots_s]
        with pytest.raises(WorkloadError, match=r"in so few lots .*; raise --calibrate-s"):
            saturation_rps(lots)


def test_saturation_of_a_server_that_answers_nothing_says_what_it_answered() -> None:
    failed = [online(status=Status.ERROR, error="HTTP 500: out of memory")] * 5
    with pytest.raises(WorkloadError, match=r"only 0 of 5 .*out of memory; raise --calibrate-s"):
        saturation_rps(failed)
