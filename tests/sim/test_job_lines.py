"""Job files as offline work: what lines share, how long their answers are, what they allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo_sgl.cli.planning.plan import _offline_work
from echo_sgl.sim.job_lines import hashed_blocks, read_job_lines
from echo_sgl.sim.trace_columns import TraceFileError
from echo_sgl.sim.workload import BLOCK_TOKENS, Oracle, Trace, empty_trace
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


def job_line(prompt: object, **body: object) -> str:
    return json.dumps({"custom_id": "a", "body": {"prompt": prompt, **body}})


def chat_line(*contents: object) -> str:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"custom_id": "a", "body": {"messages": messages}})


def test_lines_that_begin_alike_share_their_whole_blocks(tmp_path: Path) -> None:
    shared = "x" * 600
    lines = [job_line(shared + "one", max_tokens=9), job_line(shared + "two")]
    trace = read_job_lines(written(tmp_path, *lines))
    first, second = (trace.request(number) for number in (0, 1))
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert list(trace.output_tokens) == [9, 256]


def test_a_line_that_asks_for_several_answers_is_as_many_requests(tmp_path: Path) -> None:
    lines = [job_line("p" * 40, n=3, max_tokens=5), job_line("q" * 40, n=None)]
    trace = read_job_lines(written(tmp_path, *lines))
    assert list(trace.output_tokens) == [5, 5, 5, 256] and len(trace) == 4
    one, other = trace.request(0), trace.request(2)
    assert one.blocks == other.blocks and one.rid != other.rid


def test_a_block_is_named_by_all_that_comes_before_it() -> None:
    one, other = hashed_blocks("a" * 256 + "b" * 256), hashed_blocks("c" * 256 + "b" * 256)
    assert one[1] != other[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "line 1 is not JSON"),
        ("{}", "line 1 has no body"),
        (
            json.dumps({"url": "/v1/responses", "body": {"input": "a"}}),
            "line 1: url is '/v1/responses'; allowed are /v1/chat/completions, ",
        ),
        (json.dumps({"url": None, "body": {"input": "a"}}), "line 1: url is None; allowed are"),
        (job_line(""), "line 1: nothing in body.messages, body.prompt or body.input"),
        (job_line("a", n=0), "line 1: n is 0; it must be a whole number from 1 to"),
        (job_line("a", n=True), "line 1: n is True"),
        (job_line([]), "line 1: nothing in"),
        (job_line(5), "line 1: nothing in"),
        (chat_line(), "line 1: nothing in"),
        (
            job_line("a", max_tokens=-1),
            "line 1: max_tokens is -1; it must be a whole number from 0",
        ),
        (job_line("a", max_tokens=10**30), "line 1: max_tokens is 1000.* 0 to 100,000,000"),
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


def test_a_completion_without_a_limit_is_as_short_as_sglang_makes_it(tmp_path: Path) -> None:
    """It knows no `max_completion_tokens` there."""
    lines = [
        json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", **body}})
        for body in ({}, {"max_completion_tokens": 9}, {"max_tokens": 7})
    ]
    assert list(read_job_lines(written(tmp_path, *lines)).output_tokens) == [16, 16, 7]


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"max_completion_tokens": None}, 256),
        ({"max_tokens": None}, 256),
        ({"max_completion_tokens": None, "max_tokens": None}, 256),
        ({"max_completion_tokens": None, "max_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "max_tokens": None}, 7),
        ({"max_completion_tokens": 7, "max_tokens": 9}, 7),
        ({"max_tokens": 0}, 1),
    ],
)
def test_a_limit_of_null_is_not_given_and_one_of_0_is_a_step(
    tmp_path: Path, limits: dict[str, int | None], tokens: int
) -> None:
    trace = read_job_lines(written(tmp_path, job_line("a", **limits)))
    assert planned_and_true_tokens(trace) == [(tokens, tokens)]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        (job_line(["a" * 40, "b" * 44]), [10, 11]),
        (json.dumps({"body": {"input": ["a" * 40, "b" * 44]}}), [10, 11]),
        (json.dumps({"body": {"input": [{"text": "a" * 40}, {"image": "AAAA"}]}}), [10, 1]),
        (job_line([1, 2, 128_000]), [3]),
        (job_line([[1, 2], [3]]), [2, 1]),
        (job_line(["", "a" * 40]), [1, 10]),
        (chat_line([{"type": "text", "text": "a" * 40}, IMAGE]), [10]),
        (chat_line([IMAGE]), [1]),
        (chat_line(""), [1]),
        (chat_line(None), [1]),
        (chat_line("a" * 40, ""), [10]),
    ],
)
def test_every_form_of_a_prompt_is_planned(tmp_path: Path, line: str, tokens: list[int]) -> None:
    trace = read_job_lines(written(tmp_path, line))
    assert list(trace.prompt_tokens) == tokens
    assert [sum(trace.request(number).sizes) for number in range(len(trace))] == tokens


def test_a_line_of_several_prompts_is_as_many_requests_for_each_answer(tmp_path: Path) -> None:
    trace = read_job_lines(written(tmp_path, job_line(["p" * 40, "q" * 80], n=2, max_tokens=5)))
    assert list(trace.prompt_tokens) == [10, 10, 20, 20]
    assert list(trace.output_tokens) == [5, 5, 5, 5]


def test_tools_stand_before_the_turns_and_their_calls_among_them(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 4000}}
    call = {"type": "function", "function": {"name": "f", "arguments": "x" * 400}}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    bodies: list[dict[str, object]] = [
        {"messages": turns, "tools": [tool]},
        {"messages": turns[:1], "tools": [tool]},
        {"messages": turns[:1], "tools": None},
    ]
    path = written(tmp_path, *(json.dumps({"body": body}) for body in bodies))
    trace = read_job_lines(path)
    both, with_tools, without = trace.prompt_tokens
    assert both > with_tools + 100 and with_tools > 1000 and without == 1
    first, second = (trace.request(number).blocks for number in (0, 1))
    assert first[:15] == second[:15]


def test_token_ids_that_begin_alike_share_their_whole_blocks(tmp_path: Path) -> None:
    shared = list(range(100_000, 100_000 + 2 * BLOCK_TOKENS))
    lines = [job_line([*shared, 1]), job_line([*shared, 2])]
    trace = read_job_lines(written(tmp_path, *lines))
    first, second = (trace.request(number) for number in (0, 1))
    assert list(first.sizes) == [BLOCK_TOKENS, BLOCK_TOKENS, 1]
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]


@pytest.mark.parametrize("depth", [3, 400])
def test_what_is_nested_too_deep_for_a_prompt_takes_no_tokens(tmp_path: Path, depth: int) -> None:
    line = '{"body": {"prompt": ' + "[" * depth + "1" + "]" * depth + "}}"
    assert list(read_job_lines(written(tmp_path, line)).prompt_tokens) == [1]


@pytest.mark.parametrize("output_tokens", [0, 100])
def test_an_embedding_is_one_step_and_generates_nothing_more(
    tmp_path: Path, output_tokens: int
) -> None:
    line = json.dumps({"url": "/v1/embeddings", "body": {"model": "m", "input": "x" * 400}})
    trace = read_job_lines(written(tmp_path, line), output_tokens=output_tokens)
    assert list(trace.prompt_tokens) == [100]
    assert planned_and_true_tokens(trace) == [(1, 1)]
