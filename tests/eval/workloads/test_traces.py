"""Arrival traces: what a reader refuses and what scaling keeps."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.workloads import DATA_DIR, WorkloadError, find_data
from eval.workloads.traces import (
    Arrival,
    again_and_again,
    bursty_arrivals,
    read_trace,
    scale_lengths,
    slice_trace,
    time_scale_for_rate,
)

HEADER = "t_s,context_tokens,generated_tokens\n"
AZURE = "azure_conv_2023.csv.gz"

gaps = st.lists(st.floats(0.001, 100.0), min_size=2, max_size=50)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def trace_of(gaps_s: list[float]) -> list[Arrival]:
    return [Arrival(at_s, 100, 10) for at_s in itertools.accumulate([0.0, *gaps_s])]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0,1,2\n1,x,2\n", "line 3: context_tokens is 'x'"),
        ("5,1,2\n4,1,2\n", "line 3: t_s goes back by 1 s; sort"),
        ("", "holds no online request"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_column(
    tmp_path: Path, rows: str, said: str
) -> None:
    with pytest.raises(WorkloadError, match=r"trace\.csv") as caught:
        read_trace(write(tmp_path, HEADER + rows))
    assert said in str(caught.value)


def test_requests_that_failed_are_left_out_and_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BurstGPT publishes them as answers of 0 tokens."""
    path = write(tmp_path, HEADER + "0,1,2\n1,5,0\n2,0,0\n3,4,5\n")
    assert read_trace(path) == read_trace(path) == [Arrival(0.0, 1, 2), Arrival(3.0, 4, 5)]
    said = capsys.readouterr().err
    assert said == f"warning: trace {path}: 2 requests without prompt or answer left out\n"


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress((HEADER + "0,1,2\n" * 500).encode())[:-20])
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(path)


def test_the_first_request_comes_at_0_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = write(tmp_path, "generated_tokens,t_s,context_tokens\n3,0.5,7\n\n4,0.75,8\n")
    assert read_trace(path) == [Arrival(0.0, 7, 3), Arrival(0.25, 8, 4)]


def test_mooncake_traces_can_be_replayed_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1500, "input_length": 512, "output_length": 9, "hash_ids": [3]}')
    assert read_trace(path) == [Arrival(0.0, 512, 9, (3,), 512)]


def test_what_prompts_share_is_scaled_with_them_and_of_its_own_each_time() -> None:
    one = Arrival(0.0, 1000, 20, (7, 8), 512)
    [half] = scale_lengths([one], 0.5)
    assert half == Arrival(0.0, 500, 10, (7, 8), 256)
    laps = [lap.blocks for lap in itertools.islice(again_and_again([one, half]), 6)]
    assert laps[:2] == [(7, 8), (7, 8)] and laps[2] == laps[3] and laps[4] == laps[5]
    assert not set(laps[0]) & set(laps[2]) and len({*laps[0], *laps[2], *laps[4]}) == 6


@given(gaps, st.floats(0.01, 100.0))
def test_stretching_multiplies_every_gap_and_keeps_the_lengths(
    gaps_s: list[float], time_scale: float
) -> None:
    trace = trace_of(gaps_s)
    stretched = slice_trace(trace, start_s=0, duration_s=1e9, time_scale=time_scale)
    assert [one.at_s for one in stretched] == pytest.approx([a.at_s * time_scale for a in trace])
    assert {(one.prompt_tokens, one.output_tokens) for one in stretched} == {(100, 10)}


@given(gaps, st.floats(0.5, 500.0), st.floats(0.0, 50.0))
def test_a_slice_holds_exactly_the_requests_of_its_window(
    gaps_s: list[float], duration_s: float, start_s: float
) -> None:
    trace = trace_of(gaps_s)
    cut = slice_trace(trace, start_s=start_s, duration_s=duration_s, time_scale=1)
    inside = [a for a in trace if a.at_s >= start_s and a.at_s - start_s < duration_s]
    assert [one.at_s for one in cut] == [one.at_s - start_s for one in inside]


@given(gaps, st.data())
def test_the_scale_for_a_rate_gives_that_many_requests(
    gaps_s: list[float], data: st.DataObject
) -> None:
    wanted = data.draw(st.integers(1, len(gaps_s)))
    trace = trace_of(gaps_s)
    time_scale = time_scale_for_rate(trace, start_s=0, duration_s=60, rate_rps=wanted / 60)
    # The request at the window's very end may fall on either side of it.
    cut = slice_trace(trace, start_s=0, duration_s=60 * (1 - 1e-9), time_scale=time_scale)
    assert len(cut) == wanted


def test_a_rate_that_the_trace_cannot_give_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"need 61 requests .* holds 3"):
        time_scale_for_rate(trace_of([1, 1]), start_s=0, duration_s=60, rate_rps=1)


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.floats(0.001, 10))
def test_scaled_lengths_stay_between_one_token_and_the_limit(
    prompt: int, output: int, scale: float
) -> None:
    (one,) = scale_lengths([Arrival(1.0, prompt, output)], scale, max_prompt_tokens=500)
    assert one.at_s == 1.0
    assert one.prompt_tokens == min(500, max(1, round(prompt * scale)))
    assert one.output_tokens == max(1, round(output * scale))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    with pytest.raises(WorkloadError, match=r"length_scale is .*above 0"):
        scale_lengths([Arrival(0, 1, 1)], scale)


@given(st.integers(0, 1000))
def test_bursts_bring_most_of_the_requests_in_order_and_by_seed(seed: int) -> None:
    def first() -> list[float]:
        arrivals = bursty_arrivals(seed=seed, quiet_rps=0.5, burst_rps=20, quiet_s=8, burst_s=2)
        return list(itertools.takewhile(lambda at_s: at_s < 100, arrivals))

    times_s = first()
    in_burst = sum(at_s % 10 >= 8 for at_s in times_s)
    assert times_s == sorted(times_s) == first()
    assert in_burst > 0.7 * len(times_s)


@pytest.mark.skipif(not (DATA_DIR / AZURE).is_file(), reason="the real workloads are not here")
def test_the_azure_trace_reads_as_its_description_says() -> None:
    trace = read_trace(find_data(AZURE))
    assert len(trace) == 19366
    assert sum(one.prompt_tokens for one in trace) / len(trace) == pytest.approx(1154.7, abs=0.1)
    assert sum(one.output_tokens for one in trace) / len(trace) == pytest.approx(211.1, abs=0.1)


def test_a_workload_that_is_nowhere_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"no file nothing\.csv"):
        find_data("nothing.csv")
