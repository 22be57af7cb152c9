"""A job file is checked whole, and read again line by line."""

from __future__ import annotations

import hashlib
import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest

from echo_sgl.batches.lines import job_file
from echo_sgl.batches.lines import job_line as lines
from echo_sgl.batches.lines.job_file import (
    JobFileError,
    JobLimits,
    LineReader,
    check_job_file,
)
from echo_sgl.config import MAX_POOL_REQUESTS


def line(custom_id: str, prompt: str | list[str] = "text", **body: Any) -> bytes:
    return orjson.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": prompt, **body},
        }
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.jsonl"


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n", b"\r\n\r\n", b"\n \n"])
def test_blank_lines_behind_the_last_line_that_is_allowed_are_no_lines(
    path: Path, end: bytes
) -> None:
    limits = JobLimits(max_lines=3, max_problems=10)
    path.write_bytes(b"\n".join(map(line, "abc")) + end)
    job = check_job_file(path, limits)
    assert (len(job.entries), job.problems) == (3, [])
    path.write_bytes(b"\n".join(map(line, "abc")) + end + b"\n" + line("d"))
    assert [problem.code for problem in check_job_file(path, limits).problems] == ["too_many_lines"]


@pytest.mark.parametrize(
    ("asked", "most", "param"),
    [
        ({"n": 4}, 3, "body.n"),
        ({"prompt": ["a", "b"], "n": 2}, 3, "body.n"),
        ({"prompt": list("abcd")}, 3, "body.prompt"),
        ({"n": 2**63}, MAX_POOL_REQUESTS, "body.n"),
        ({"n": 3}, 3, None),
        ({"prompt": list("abc")}, 3, None),
        ({"n": 4}, None, None),
    ],
)
def test_a_line_of_more_answers_than_may_wait_at_a_time_is_refused(
    path: Path, asked: dict[str, Any], most: int | None, param: str | None
) -> None:
    path.write_bytes(line("a", **asked))
    problems = check_job_file(path, JobLimits(9, 9, most)).problems
    assert [problem.param for problem in problems] == ([param] if param else [])
    assert all(problem.code == "too_many_answers" for problem in problems)


def test_lines_are_found_behind_bom_crlf_blank_lines_and_without_a_last_line_end(
    path: Path,
) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + line("a") + b"\r\n\r\n  \n" + line("b") + b"\n" + line("c"))
    job = check_job_file(path)
    assert [(entry.line_number, entry.custom_id) for entry in job.entries] == [
        (1, "a"),
        (4, "b"),
        (5, "c"),
    ]
    reader = LineReader(path)
    assert [reader.read(entry).custom_id for entry in reversed(job.entries)] == ["c", "b", "a"]
    reader.close()


def test_every_bad_line_is_reported_with_its_number(path: Path) -> None:
    path.write_bytes(b"\n".join([b"{", line("a"), b"[]", line("a"), line("b")]))
    job = check_job_file(path)
    assert [(problem.line_number, problem.code) for problem in job.problems] == [
        (1, "invalid_json_line"),
        (3, "invalid_json_line"),
        (4, "duplicate_custom_id"),
    ]
    assert "stands in line 2 already" in job.problems[2].message
    assert [entry.custom_id for entry in job.entries] == ["a", "b"]
    assert job.num_lines == 5


def test_a_name_that_a_bad_line_used_is_still_free(path: Path) -> None:
    path.write_bytes(line("a", stream=True) + b"\n" + line("a"))
    assert [entry.line_number for entry in check_job_file(path).entries] == [2]


def test_a_file_in_utf_16_is_named_as_such_a_problem(path: Path) -> None:
    path.write_bytes(line("a").decode().encode("utf-16"))
    assert "must be UTF-8" in check_job_file(path).problems[0].message


def test_a_line_that_is_too_long_is_a_problem_and_the_next_one_is_found(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (job_file, lines):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 200)
    path.write_bytes(line("a", "x" * 5_000) + b"\n" + line("b"))
    job = check_job_file(path)
    assert [problem.code for problem in job.problems] == ["line_too_long"]
    assert [(entry.line_number, entry.custom_id) for entry in job.entries] == [(2, "b")]
    assert job.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf\r\n"])
def test_a_file_without_lines_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(JobFileError, match="holds no lines"):
        check_job_file(path)


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="No such file"):
        check_job_file(tmp_path / "missing.jsonl")
    with pytest.raises(JobFileError, match="directory"):
        check_job_file(tmp_path)


@pytest.mark.parametrize("url", lines.URLS)
def test_the_deepest_line_that_may_be_has_its_place_in_the_order(path: Path, url: str) -> None:
    raw = orjson.dumps(
        {"custom_id": "a", "method": "POST", "url": url}
        | {
            "body": {"model": "m", "tools": "DEEP", "lora_path": "DEEP"}
            | {lines.INPUT_FIELDS[url]: "DEEP"}
        }
    )
    levels = lines.MAX_DEPTH - 2
    path.write_bytes(raw.replace(b'"DEEP"', b"[" * levels + b"]" * levels))
    job = check_job_file(path)
    assert [entry.custom_id for entry in job.entries] == ["a"]
    path.write_bytes(b"\n" + raw.replace(b'"DEEP"', b"[" * (levels + 1) + b"]" * (levels + 1)))
    problems = check_job_file(path).problems
    assert [(problem.line_number, problem.code) for problem in problems] == [
        (2, "invalid_json_line")
    ]


def test_what_a_user_wrote_is_shortened_in_messages(path: Path) -> None:
    odd = "\u202e" * 64
    path.write_bytes(b"\n".join([line(odd, model="\n" * 4096), line(odd)]))
    job = check_job_file(path).restrict_models([f"model-{index}" for index in range(1000)])
    assert [problem.code for problem in job.problems] == ["model_not_found", "duplicate_custom_id"]
    assert all(len(problem.message) < 400 for problem in job.problems)


def test_unknown_models_become_problems_in_line_order(path: Path) -> None:
    path.write_bytes(b"\n".join([line("a", model="x"), b"{", line("b"), line("c", model="y")]))
    job = check_job_file(path).restrict_models(["m", "n"])
    assert [problem.line_number for problem in job.problems] == [1, 2, 4]
    assert job.problems[0].message == "body.model is 'x'; the server has m, n"
    assert [entry.custom_id for entry in job.entries] == ["b"]


def test_prefix_order_brings_shuffled_questions_of_one_document_together(path: Path) -> None:
    documents = [letter * 700 for letter in "abc"]
    names = [f"{index % 3}-{index}" for index in range(12)]
    path.write_bytes(
        b"\n".join(line(name, f"{documents[int(name[0])]} question {name}") for name in names)
    )
    order = [entry.custom_id[0] for entry in check_job_file(path).in_prefix_order()]
    assert sum(left != right for left, right in itertools.pairwise(order)) == 2


def test_equal_prompts_stay_in_file_order(path: Path) -> None:
    path.write_bytes(b"\n".join(line(str(index)) for index in range(5)))
    job = check_job_file(path)
    assert [entry.custom_id for entry in job.in_prefix_order()] == list("01234")


def test_a_file_that_changed_after_the_check_is_noticed(path: Path) -> None:
    path.write_bytes(line("a") + b"\n" + line("b"))
    entries = check_job_file(path).entries
    path.write_bytes(line("b") + b"\n" + line("a"))
    reader = LineReader(path)
    with pytest.raises(JobFileError, match="was changed"):
        reader.read(entries[0])
    reader.close()


def test_memory_is_a_fraction_of_the_file(path: Path) -> None:
    with path.open("wb") as file:
        for index in range(1_000):
            file.write(line(str(index), f"{index} " * 5_000) + b"\n")
    tracemalloc.start()
    job = check_job_file(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(job.entries) == 1_000
    assert peak_bytes < path.stat().st_size / 8
