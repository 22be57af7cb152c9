"""A service's clients as a trace: their shares, gaps and lengths, and files that are refused."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from eval.workloads import WorkloadError
from eval.workloads.clients import COLUMNS, MEAN_LENGTHS, client_trace, is_clients, read_clients

WINDOW_S, NUM_WINDOWS = 600, 10
ROW = "{start},1,30,1,Gamma,1.0,1,40,8"


def trace_of(tmp_path: Path, *rows: str) -> list[tuple[float, int, int]]:
    """(time, prompt, answer) of each request of these clients, the same in each window."""
    path = tmp_path / "clients.csv"
    lines = [row.format(start=WINDOW_S * number) for number in range(NUM_WINDOWS) for row in rows]
    path.write_text("\n".join([COLUMNS, *lines]))
    assert is_clients(path)
    trace = client_trace(read_clients(path), seed=1)
    return [(one.at_s, one.prompt_tokens, one.output_tokens) for one in trace]


def variation(times_s: list[float]) -> float:
    gaps_s = [b - a for a, b in itertools.pairwise(times_s)]
    return statistics.stdev(gaps_s) / statistics.mean(gaps_s)


def test_all_of_a_service_send_one_request_a_second(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, ROW, "{start},2,90,1,Gamma,1.0,1,400,80")
    times_s = [at_s for at_s, *_ in trace]
    assert times_s == sorted(times_s) and times_s[0] == 0
    assert len(trace) == pytest.approx(WINDOW_S * NUM_WINDOWS, rel=0.05)
    # Three of four come from the second one.
    assert statistics.mean(prompt for _, prompt, _ in trace) == pytest.approx(310, rel=0.08)
    assert statistics.mean(answer for *_, answer in trace) == pytest.approx(62, rel=0.08)
    assert min(answer for *_, answer in trace) == 1


@pytest.mark.parametrize(
    ("gaps", "expected"),
    # The standard deviation of a Weibull of shape 0.5 is 5 ** 0.5 of its mean.
    [("Gamma,1.0", 1.0), ("Gamma,0.0625", 4.0), ("Weibull,1.0", 1.0), ("Weibull,0.5", 5**0.5)],
)
def test_gaps_vary_as_the_clients_do(tmp_path: Path, gaps: str, expected: float) -> None:
    trace = trace_of(tmp_path, f"{{start}},1,30,1,{gaps},1,40,8")
    assert variation([at_s for at_s, *_ in trace]) == pytest.approx(expected, rel=0.2)


def test_rates_go_up_and_down_by_the_window(tmp_path: Path) -> None:
    path = tmp_path / "clients.csv"
    rows = [f"{WINDOW_S * number},1,{1 + number % 2 * 3},1,Gamma,1.0,1,4,2" for number in range(10)]
    path.write_text("\n".join([COLUMNS, *rows]))
    trace = client_trace(read_clients(path), seed=0)
    is_high = [one.at_s // WINDOW_S % 2 == 1 for one in trace]
    assert statistics.mean(is_high) == pytest.approx(0.8, abs=0.02)


def test_who_tells_no_lengths_has_those_of_all(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, "{start},1,30,1,Gamma,1.0,1,,")
    means = (statistics.mean(column) for column in list(zip(*trace, strict=True))[1:])
    assert tuple(means) == pytest.approx(MEAN_LENGTHS, rel=0.05)


@pytest.mark.parametrize(
    "row",
    ["0,1,x,1,Gamma,1,1,4,2", "0,1,-1,1,Gamma,1,1,4,2", "0,1,1,1,Gamma,0,1,4,2",
     "0,1,1,1,Poisson,1,1,4,2", "0,1,1,1,Gamma,1,1,0,2", "nan,1,1,1,Gamma,1,1,4,2", "0,1"],
)  # fmt: skip
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "clients.csv"
    path.write_text(f"{COLUMNS}\n{row}\n")
    with pytest.raises(WorkloadError, match=r"clients\.csv, line 2: .*client_mean_in"):
        read_clients(path)


def test_one_window_is_none(tmp_path: Path) -> None:
    path = tmp_path / "clients.csv"
    path.write_text(f"{COLUMNS}\n{ROW.format(start=0)}\n")
    with pytest.raises(WorkloadError, match="fewer than two windows"):
        read_clients(path)
