"""Times of traces: units, dates, offsets, gaps, and what is said of those that cannot be right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from echo_sgl.sim.trace_columns import TraceFileError
from echo_sgl.sim.trace_files import read_trace_file

MOONCAKE = """{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 2]}
"""


def written(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("first", "second", "later"),
    [("-1e308", "0", r"1e\+308"), ("0", "1e9", r"1e\+09"), ("5", "1700000000", r"1.7e\+09")],
)
def test_a_time_years_after_the_first_is_refused_by_its_line(
    tmp_path: Path, first: str, second: str, later: str
) -> None:
    text = f"t_s,context_tokens,generated_tokens\n{first},5,5\n{second},5,5\n"
    with pytest.raises(TraceFileError, match=f"line 3: t_s is {later}.* at most 366 days"):
        read_trace_file(written(tmp_path, text))


@pytest.mark.parametrize("at", ["1700000000000", "1.7e15", "20240510101112", "1e308"])
def test_a_time_that_is_not_in_seconds_is_refused_by_its_line(tmp_path: Path, at: str) -> None:
    """Milliseconds since 1970 would be a trace that takes 1,000 times as long."""
    text = f"t_s,context_tokens,generated_tokens\n{at},5,5\n"
    with pytest.raises(TraceFileError, match=f"line 2: t_s is '{at}'.* seconds, .* year 9999"):
        read_trace_file(written(tmp_path, text))


def test_milliseconds_since_1970_are_read_where_a_format_has_them(tmp_path: Path) -> None:
    rows = ({"timestamp": 1.7e12 + at, "input_length": 5, "output_length": 5} for at in (0, 2000))
    path = written(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl")
    assert list(read_trace_file(path).trace.at_s) == [0.0, 2.0]


@pytest.mark.parametrize("at", [1_700_000_000, 1_700_000_000.5, "1700000000"])
def test_seconds_since_1970_are_refused_where_a_format_has_milliseconds(
    tmp_path: Path, at: object
) -> None:
    """A trace of hours would be one of seconds."""
    path = written(tmp_path, MOONCAKE.replace("1000,", f"{json.dumps(at)},"), "t.jsonl")
    with pytest.raises(TraceFileError, match=r"line 1: timestamp is 1700000000; .* by 1,000"):
        read_trace_file(path)


def test_seconds_since_1970_are_read_where_a_format_has_seconds_or_dates(tmp_path: Path) -> None:
    text = f"t_s,context_tokens,generated_tokens\n{1.7e9},5,5\n{1.7e9 + 2},5,5\n"
    assert list(read_trace_file(written(tmp_path, text)).trace.at_s) == [0.0, 2.0]
    dates = MOONCAKE.replace("1000,", '"2024-05-10T00:00:00Z",').replace(
        "3000,", '"2024-05-10T00:00:02Z",'
    )
    assert list(read_trace_file(written(tmp_path, dates, "t.jsonl")).trace.at_s) == [0.0, 2.0]


@pytest.mark.parametrize(
    "times", [("2024-05-10 00:00:00", "2024-05-10 00:00:02"), (0, 2000), ("0", "2000")]
)
def test_only_numbers_are_in_the_unit_of_a_format(
    tmp_path: Path, times: tuple[object, object]
) -> None:
    rows = [{"timestamp": at, "input_length": 5, "output_length": 5} for at in times]
    path = written(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl")
    assert list(read_trace_file(path).trace.at_s) == [0.0, 2.0]


@pytest.mark.parametrize(
    ("gap", "said"),
    [
        (0.2, "5013 requests a second on average; numbers in timestamp are milliseconds"),
        (200, ""),
        (200_000, "0.005013 requests a second on average; numbers in timestamp are milliseconds"),
    ],
)
def test_a_rate_that_no_server_has_is_told_with_the_unit(
    tmp_path: Path, gap: float, said: str
) -> None:
    """Seconds in place of Mooncake's milliseconds, or the other way round."""
    rows = ({"timestamp": gap * i, "input_length": 5, "output_length": 5} for i in range(1, 401))
    path = written(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl")
    assert list(read_trace_file(path).warnings) == ([said] if said else [])


def test_a_gap_of_hours_is_told_with_its_line(tmp_path: Path) -> None:
    text = "t_s,context_tokens,generated_tokens\n0,5,5\n10800,5,5\n"
    read = read_trace_file(written(tmp_path, text))
    assert read.warnings == ("line 3: nothing came for 3.0 h before it",)


def test_of_many_gaps_the_first_are_told_and_the_others_counted(tmp_path: Path) -> None:
    text = "t_s,context_tokens,generated_tokens\n"
    text += "".join(f"{5000 * i},5,5\n" for i in range(101))
    warnings = read_trace_file(written(tmp_path, text)).warnings
    assert len(warnings) == 6
    assert warnings[-1] == "95 more gaps of over an hour"


CLOCKS = {
    "2024-05-10 00:00:00+00:00": 0.0,
    "2024-05-10 00:00:01.5+00:00": 1.5,
    "2024-05-10T00:00:02Z": 2.0,
    "2024-05-10 00:00:03": 3.0,
    "2024-05-10T00:00:04": 4.0,
    "2024-05-10 00:00:05.123456789": 5.123456,
    "2024-05-10 02:00:06.009930+02:00": 6.00993,
    "2024-05-09 18:30:07-05:30": 7.0,
    "2024-05-10T00:00:08.1234567Z": 8.123456,
}


def rows_at(*times: str) -> str:
    return "".join(["TIMESTAMP,ContextTokens,GeneratedTokens\n", *(f"{at},5,5\n" for at in times)])


def test_timestamps_with_and_without_fraction_and_offset_may_be_mixed(tmp_path: Path) -> None:
    read = read_trace_file(written(tmp_path, rows_at(*CLOCKS)))
    assert list(read.trace.at_s) == pytest.approx(list(CLOCKS.values()), abs=2e-6)
    assert (read.format, read.warnings) == ("Azure", ())


@pytest.mark.parametrize("num_digits", range(1, 10))
@pytest.mark.parametrize("offset", ["", "Z", "+00:00"])
def test_a_fraction_of_a_second_has_any_number_of_digits(
    tmp_path: Path, num_digits: int, offset: str
) -> None:
    fraction = "123456789"[:num_digits]
    text = rows_at(f"2024-05-10 00:00:00{offset}", f"2024-05-10 00:00:00.{fraction}{offset}")
    trace = read_trace_file(written(tmp_path, text)).trace
    assert trace.at_s[1] == pytest.approx(float(f"0.{fraction}"), abs=2e-6)


@pytest.mark.parametrize("fraction", ["", ".5", ".500000"])
def test_an_offset_is_no_part_of_the_time_in_utc(tmp_path: Path, fraction: str) -> None:
    text = rows_at(f"2024-05-10 00:00:00{fraction}Z", f"2024-05-10 00:00:00{fraction}-01:00")
    assert list(read_trace_file(written(tmp_path, text)).trace.at_s) == [0.0, 3600.0]


@pytest.mark.parametrize(
    "at", ["2024-05-10", "2024-05-10 25:00:00Z", "2024-05-10 00:00:00+99:00", "noon", ""]
)
def test_what_is_no_date_and_time_is_refused_by_its_line(tmp_path: Path, at: str) -> None:
    text = rows_at("2024-05-10 00:00:00+00:00", at)
    with pytest.raises(TraceFileError, match=f"line 3: TIMESTAMP is {re.escape(repr(at))}"):
        read_trace_file(written(tmp_path, text))
