"""Job files as offline work: what lines share, how long their answers are, what they allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo_sgl.cli.plan import _offline_work
from echo_sgl.sim.job_lines import hashed_blocks, read_job_lines
from echo_sgl.sim.trace_files import TraceFileError
from echo_sgl.sim.workload import Oracle, Trace, empty_trace
from echo_sgl.types import Task


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def planned_and_true_tokens(trace: Trace) -> list[tuple[int, int]]:
    """Of each request, what the scheduler plans with and how long its answer is."""
    oracle = Oracle(empty_trace(Task.ONLINE), trace)
    requests = [trace.request(number) for number in range(len(trace))]
    return [(one.max_new_tokens, oracle.output_tokens(one)) for one in requests]


def job_line(text: str, **body: object) -> str:
    return json.dumps({"custom_id": "a", "body": {"prompt": text, **body}})


def test_lines_that_begin_alike_share_their_whole_blocks(tmp_path: Path) -> None:
    shared = "x" * 600
    lines = [job_line(shared + "one", max_tokens=9), job_line(shared + "two")]
    trace = read_job_lines(written(tmp_path, *lines))
    first, second = (trace.request(number) for number in (0, 1))
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert list(trace.output_tokens) == [9, 256]


def test_a_block_is_named_by_all_that_comes_before_it() -> None:
    one, other = hashed_blocks("a" * 256 + "b" * 256), hashed_blocks("c" * 256 + "b" * 256)
    assert one[1] != other[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "line 1 is not JSON"),
        ("{}", "line 1 has no body"),
        (job_line(""), "line 1: no text"),
        (job_line("a", max_tokens=0), "line 1: max_tokens is 0; it must be a whole number from 1"),
        (job_line("a", max_tokens=10**30), "line 1: max_tokens is 1000.* 1 to 100,000,000"),
        (job_line("a", max_tokens=True), "line 1: max_tokens is True"),
        (job_line("a", max_completion_tokens="9", max_tokens=9), "max_completion_tokens is '9'"),
        ("", "holds no line"),
    ],
)
def test_bad_job_lines_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(TraceFileError, match=problem):
        read_job_lines(written(tmp_path, text))


def test_each_line_is_planned_with_what_it_allows_itself(tmp_path: Path) -> None:
    path = written(tmp_path, job_line("a", max_tokens=9), job_line("b", max_tokens=4096))
    assert planned_and_true_tokens(read_job_lines(path)) == [(9, 9), (4096, 4096)]


def test_assumed_answers_are_shorter_than_what_is_planned_with(tmp_path: Path) -> None:
    limits = ({"max_completion_tokens": 4096}, {"max_tokens": 30}, {})
    path = written(tmp_path, *(job_line("a", **one) for one in limits))
    trace = _offline_work(path, 100)
    assert planned_and_true_tokens(trace) == [(4096, 100), (30, 30), (256, 100)]
    assert trace.allowed_tokens is not None
    assert list(trace.allowed_tokens) == [4096, 30, 256]


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"max_completion_tokens": None}, 256),
        ({"max_tokens": None}, 256),
        ({"max_completion_tokens": None, "max_tokens": None}, 256),
        ({"max_completion_tokens": None, "max_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "max_tokens": None}, 7),
        ({"max_completion_tokens": 7, "max_tokens": 9}, 7),
    ],
)
def test_a_limit_of_null_is_one_that_is_not_given(
    tmp_path: Path, limits: dict[str, int | None], tokens: int
) -> None:
    trace = read_job_lines(written(tmp_path, job_line("a", **limits)))
    assert planned_and_true_tokens(trace) == [(tokens, tokens)]


@pytest.mark.parametrize("output_tokens", [0, 100])
def test_an_embedding_is_one_step_and_generates_nothing_more(
    tmp_path: Path, output_tokens: int
) -> None:
    line = json.dumps({"url": "/v1/embeddings", "body": {"model": "m", "input": "x" * 400}})
    trace = read_job_lines(written(tmp_path, line), output_tokens=output_tokens)
    assert list(trace.prompt_tokens) == [100]
    assert planned_and_true_tokens(trace) == [(1, 1)]
