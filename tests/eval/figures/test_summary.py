"""From records to figures: every number that a report shows, on small cases worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.types import Task
from eval.figures.summary import (
    class_stats,
    harvest_tokens_per_s,
    harvest_window,
    over_repetitions,
    percentiles_ms,
    steady_window,
    streamed_tokens_per_s,
    summarise_repetition,
    tokens_per_s,
)
from eval.load.records import LATE_BOUND_S, Record, Status, read_records, write_records

ends = st.lists(st.floats(0, 1000), max_size=60)


def online(scheduled_s: float = 0.0, **values: Any) -> Record:
    """An answer of 5 tokens: the first after 100 ms, then one every 50 ms."""
    usual = {
        "sent_s": scheduled_s + 0.001,
        "first_token_s": scheduled_s + 0.1,
        "last_token_s": scheduled_s + 0.3,
        "end_s": scheduled_s + 0.31,
        "gaps_s": [0.05] * 4,
        "prompt_tokens": 40,
        "cached_tokens": 10,
        "completion_tokens": 5,
        "status": Status.OK,
    }
    return Record("r", Task.ONLINE, scheduled_s, **(usual | values))


def offline(end_s: float, *, tokens: int = 100, status: Status = Status.OK) -> Record:
    return Record(
        "o", Task.OFFLINE, 0.0, end_s=end_s, prompt_tokens=tokens - 10, completion_tokens=10,
        status=status,
    )  # fmt: skip


def streamed(first_s: float, last_s: float, *, status: Status = Status.OK) -> Record:
    """A prompt of 90 tokens and an answer of 11, evenly from its first token to its last."""
    return Record(
        "s", Task.OFFLINE, 0.0, first_token_s=first_s, last_token_s=last_s, end_s=last_s,
        prompt_tokens=90, completion_tokens=11, status=status,
    )  # fmt: skip


def test_streamed_tokens_count_when_they_come_and_the_prompt_with_the_first() -> None:
    one = streamed(10.0, 20.0)
    assert streamed_tokens_per_s([one], 0.0, 9.9) == 0.0
    assert streamed_tokens_per_s([one], 0.0, 10.0) == pytest.approx(91 / 10)
    assert streamed_tokens_per_s([one], 10.0, 15.0) == pytest.approx(5 / 5)
    assert streamed_tokens_per_s([one], 5.0, 25.0) == pytest.approx(101 / 20)
    given_up = streamed(10.0, 20.0, status=Status.CANCELLED)
    assert streamed_tokens_per_s([given_up, offline(12.0)], 5.0, 25.0) == pytest.approx(101 / 20)
    assert streamed_tokens_per_s([streamed(3.0, 3.0)], 0.0, 10.0) == pytest.approx(101 / 10)
    assert streamed_tokens_per_s([one], 5.0, 5.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=20), st.floats(0, 100))
def test_streamed_tokens_of_two_windows_are_those_of_both(spans: list[Any], cut_s: float) -> None:
    records = [streamed(first_s, first_s + more_s) for first_s, more_s in spans]

    def tokens(start_s: float, end_s: float) -> float:
        return streamed_tokens_per_s(records, start_s, end_s) * (end_s - start_s)

    assert tokens(-1, cut_s) + tokens(cut_s, 101) == pytest.approx(101 * len(records))


def test_ttft_counts_from_the_schedule_not_from_the_sending() -> None:
    assert online(2.0, sent_s=2.09).ttft_s == pytest.approx(0.1)


def test_a_request_given_up_without_a_token_counts_with_the_time_it_waited() -> None:
    waited = online(first_token_s=None, last_token_s=None, end_s=60.0, status=Status.CANCELLED)
    assert waited.ttft_s == 60.0 and waited.tpot_s is None
    failed = online(first_token_s=None, last_token_s=None, status=Status.ERROR)
    assert failed.ttft_s is None


def test_tpot_is_the_time_after_the_first_token_over_the_other_tokens() -> None:
    assert online().tpot_s == pytest.approx(0.05)
    assert online(completion_tokens=1).tpot_s is None
    assert online(status=Status.CANCELLED).tpot_s is None


def test_only_an_online_request_sent_after_the_bound_is_late() -> None:
    assert not online(5.0, sent_s=5.0 + LATE_BOUND_S * 0.9).late
    assert online(5.0, sent_s=5.0 + LATE_BOUND_S * 1.1).late
    assert not online(5.0, sent_s=None).late
    line = offline(1.0)
    line.sent_s = 1.0
    assert not line.late


def test_the_first_end_of_a_record_holds() -> None:
    record = Record("r", Task.ONLINE, 0.0)
    record.end(Status.ERROR, 1.0, "HTTP 500")
    record.end(Status.CANCELLED, 2.0)
    assert (record.status, record.end_s, record.error) == (Status.ERROR, 1.0, "HTTP 500")


def test_percentiles_are_linear_between_ranks_and_in_milliseconds() -> None:
    figures = percentiles_ms(number / 1000 for number in range(101))
    assert figures == pytest.approx({"p50": 50, "p99": 99, "max": 100})
    assert percentiles_ms([]) == {"p50": None, "p99": None, "max": None}
    assert percentiles_ms([0.5]) == {"p50": 500, "p99": 500, "max": 500}


def test_class_stats_count_by_outcome_and_sum_the_tokens_of_complete_answers() -> None:
    records = [
        online(),
        online(cached_tokens=30),
        online(status=Status.ERROR),
        online(status=Status.CANCELLED),
        online(sent_s=1.0),
        offline(1.0),
    ]
    stats = class_stats(records, Task.ONLINE)
    counts = {name: stats[name] for name in ("requests", "ok", "error", "cancelled", "late")}
    assert counts == {"requests": 5, "ok": 3, "error": 1, "cancelled": 1, "late": 1}
    assert (stats["prompt_tokens"], stats["cached_tokens"]) == (120, 50)
    assert stats["generated_tokens"] == 15
    assert stats["hit_ratio"] == pytest.approx(50 / 120)
    assert stats["gap_ms"]["p99"] == pytest.approx(50)


def test_class_stats_of_nothing_have_no_ratio_and_no_latency() -> None:
    stats = class_stats([], Task.OFFLINE)
    assert stats["requests"] == 0 and stats["hit_ratio"] is None and stats["ttft_ms"]["p50"] is None


@given(ends, st.floats(0, 500), st.floats(0.1, 250), st.floats(0.1, 250))
def test_two_windows_side_by_side_hold_what_the_whole_holds(
    ends_s: list[float], start_s: float, first_s: float, second_s: float
) -> None:
    records = [offline(end_s) for end_s in ends_s]
    middle_s, end_s = start_s + first_s, start_s + first_s + second_s
    parts = tokens_per_s(records, start_s, middle_s) * (middle_s - start_s)
    parts += tokens_per_s(records, middle_s, end_s) * (end_s - middle_s)
    assert parts == pytest.approx(tokens_per_s(records, start_s, end_s) * (end_s - start_s))


def test_throughput_counts_prompt_and_generated_tokens_of_complete_offline_lines_only() -> None:
    records = [offline(1), offline(2), offline(3, status=Status.CANCELLED), online(1.5)]
    assert tokens_per_s(records, 0, 10) == 20
    assert tokens_per_s(records, 2, 2) == 0


@given(ends)
def test_the_steady_window_cuts_a_tenth_of_the_completions_on_each_side(
    ends_s: list[float],
) -> None:
    records = [offline(end_s) for end_s in ends_s]
    start_s, end_s = steady_window(records)
    assert start_s <= end_s
    if len(set(ends_s)) == len(ends_s) > 2:
        num_cut = -(-len(ends_s) // 10)
        inside = sum(start_s < one <= end_s for one in ends_s)
        assert inside == len(ends_s) - 2 * num_cut


def test_a_constant_rate_gives_that_rate_as_the_ceiling_whatever_the_ramps() -> None:
    steady = [offline(10 + number) for number in range(80)]
    ramps = [offline(9.99) for _ in range(10)] + [offline(300 + number) for number in range(10)]
    assert tokens_per_s(steady + ramps, *steady_window(steady + ramps)) == pytest.approx(
        100, rel=0.02
    )


def test_the_harvest_window_is_the_online_window_while_lines_are_left() -> None:
    records = [*(offline(number) for number in range(100)), offline(50, status=Status.CANCELLED)]
    assert harvest_window(records, 20, 60) == (20, 60)


def test_the_harvest_window_ends_where_the_job_ran_dry() -> None:
    records = [offline(number) for number in range(100)]
    assert harvest_window(records, 20, 500) == (20, 89)
    assert harvest_window(records, 20, 60) == (20, 60)


@pytest.mark.parametrize(("lasts_s", "harvest"), [(23.9, None), (24.1, 1000.0), (29.0, 1000.0)])
def test_a_job_that_lasts_for_less_than_a_tenth_of_the_window_has_no_harvest(
    lasts_s: float, harvest: float | None
) -> None:
    """Online requests come from second 20 to 60; ten lines end every second until the cut."""
    lines = [offline(lasts_s - number / 10) for number in range(200)]
    ramp = [offline(lasts_s + 1.0) for _ in range(23)]
    assert steady_window([*lines, *ramp])[1] == lasts_s
    told = harvest_tokens_per_s([*lines, *ramp], (20.0, 60.0))
    assert told == (None if harvest is None else pytest.approx(harvest, rel=0.05))


def test_a_job_that_was_done_before_online_requests_came_is_not_taken_for_none() -> None:
    alone = [online(number) for number in range(10)]
    lines, quick = ([offline(number / rate) for number in range(100)] for rate in (1, 10))
    tree = summarise_repetition(alone, lines, [*alone, *quick], (20, 80))
    assert tree["harvest_tokens_per_s"] is None and tree["harvest_of_ceiling"] is None
    assert tree["job_ran_dry"] and tree["harvest_window_s"] == 0
    merged = over_repetitions([tree, tree])
    assert merged["harvest_tokens_per_s"]["median"] is None


def test_a_repetition_compares_together_with_alone() -> None:
    alone = [online(number) for number in range(10)]
    lines = [offline(number) for number in range(100)]
    mixed = [online(number, first_token_s=number + 0.2, sent_s=number) for number in range(10)]
    half = [offline(number * 2) for number in range(50)]
    tree = summarise_repetition(
        alone, lines, [*mixed, *half, offline(100, status=Status.CANCELLED)], (20, 80)
    )
    assert tree["inflation"]["ttft_ms_p50"] == pytest.approx(2)
    assert tree["inflation"]["tpot_ms_p99"] == pytest.approx(0.5)
    assert tree["ceiling_tokens_per_s"] == pytest.approx(100)
    assert tree["harvest_tokens_per_s"] == pytest.approx(50)
    assert tree["harvest_of_ceiling"] == pytest.approx(0.5)
    assert tree["harvest_window_s"] == 60 and not tree["job_ran_dry"]
    assert tree["offline_together"]["cancelled"] == 1


def test_repetitions_merge_to_median_and_spread_at_every_number() -> None:
    trees = [{"a": {"b": value}, "c": value > 2, "d": None} for value in (3, 1, 2)]
    merged = over_repetitions(trees)
    assert merged["a"]["b"] == {"median": 2, "min": 1, "max": 3}
    assert merged["c"]["max"] is True
    assert merged["d"] == {"median": None, "min": None, "max": None}


def test_a_run_of_earlier_code_may_lack_a_figure_and_a_tree_of_them() -> None:
    merged = over_repetitions([{"a": 1}, {"a": 2, "b": 3, "c": {"d": 4}}])
    nothing = {"median": None, "min": None, "max": None}
    assert merged == {"a": {"median": 1.5, "min": 1, "max": 2}, "b": nothing, "c": {"d": nothing}}


def test_records_read_back_as_they_were_written_and_bytes_do_not_depend_on_the_clock(
    tmp_path: Path,
) -> None:
    records = [online(), offline(3.0, status=Status.CANCELLED), Record("new", Task.ONLINE, 0.5)]
    for name in ("a.gz", "b.gz"):
        write_records(tmp_path / "raw" / name, records)
    assert read_records(tmp_path / "raw" / "a.gz") == records
    first, second = ((tmp_path / "raw" / name).read_bytes() for name in ("a.gz", "b.gz"))
    assert first == second
