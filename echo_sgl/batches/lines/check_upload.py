"""Check an uploaded file in a process of its own: `python -m echo_sgl.batches.lines.check_upload`.

A server's process must not spend seconds of its interpreter on a user's file, nor die of it.
Standard input: one JSON object of `CheckRules`, `path` with it. Standard output: one JSON object
with the problems, then one JSON array a line in prefix order:
[line_number, offset_bytes, num_bytes, custom_id, tokens]; or {"is_elsewhere": true} for a file
that is left to another server.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from echo_sgl.batches.lines.job_file import (
    JobFile,
    JobFileError,
    JobLimits,
    LineProblem,
    check_job_file,
)
from echo_sgl.batches.lines.model_names import is_served

MAX_PROBLEMS = 100
MAX_PROBLEMS_BYTES = 32_768  # every answer about the batch carries them
MAX_MODELS_BYTES = 32_768  # every look at the open batches reads them
MAX_CPU_S = 900
NICENESS = 10


@dataclass(frozen=True, slots=True)
class CheckRules:
    """What the lines of a batch must agree with.

    `models` are the names that lines may give, with the full ones; `elsewhere` are the models of
    each other server, none if they are not known. `max_requests`: see `too_many_answers`.
    """

    endpoint: str
    models: Mapping[str, str]
    max_lines: int
    elsewhere: Sequence[Sequence[str]] = ()
    max_requests: int | None = None


def main() -> None:
    """Check what standard input names; the exit code is 0 also for a bad file."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C at the server ends it without a word
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    order = orjson.loads(sys.stdin.buffer.read())
    path = Path(order.pop("path"))
    for line in report(path, CheckRules(**order)):
        sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def report(path: Path, rules: CheckRules) -> Iterable[bytes]:
    """The lines that `main` prints."""
    try:
        limits = JobLimits(rules.max_lines, MAX_PROBLEMS, rules.max_requests)
        job = check_job_file(path, limits)
    except JobFileError:
        empty = "the file holds no lines; it needs one JSON object a line"
        yield _head([{"code": "empty_file", "message": empty, "param": None, "line": None}])
        return
    problems = list(job.problems) + list(_wrong_urls(job, rules.endpoint))
    models = sorted({entry.model for entry in job.entries})
    if not problems and _is_elsewhere(models, rules):
        yield orjson.dumps({"is_elsewhere": True})
        return
    # A wrong model is said of lines that are otherwise right.
    if not problems and rules.models:
        job = job.restrict_models(rules.models)
        problems = list(job.problems)
    problems.sort(key=lambda problem: problem.line_number)
    full_names = sorted({rules.models.get(model, model) for model in models})
    shown = _first(problems) or _too_many_models(full_names)
    yield _head(shown, models, full_names, len(job.entries))
    if shown:
        return
    for entry in job.in_prefix_order():
        place = [entry.line_number, entry.offset, entry.length, entry.custom_id, entry.tokens]
        yield orjson.dumps(place)


def _is_elsewhere(models: Collection[str], rules: CheckRules) -> bool:
    """Whether this server lacks one of these models and another one may have them all."""
    if not rules.models or _has_all(rules.models, models):
        return False
    return any(not others or _has_all(others, models) for others in rules.elsewhere)


def _has_all(served: Collection[str], models: Iterable[str]) -> bool:
    return all(is_served(model, served) for model in models)


def _first(problems: Iterable[LineProblem]) -> list[dict[str, Any]]:
    """The problems that are kept with the batch."""
    found: list[dict[str, Any]] = []
    num_bytes = 0
    for problem in itertools.islice(problems, MAX_PROBLEMS):
        shown = _shown(problem)
        num_bytes += len(orjson.dumps(shown))
        if num_bytes > MAX_PROBLEMS_BYTES:
            break
        found.append(shown)
    return found


def _wrong_urls(job: JobFile, endpoint: str) -> Iterable[LineProblem]:
    for entry in job.entries:
        if entry.url != endpoint:
            yield LineProblem(
                entry.line_number,
                "mismatched_url",
                f"url is {entry.url!r}, but the batch was created for {endpoint}",
                "url",
            )


def _too_many_models(full_names: Sequence[str]) -> list[dict[str, Any]]:
    """The problem of a file whose models cannot be kept with the batch; none if they can."""
    num_bytes = len(orjson.dumps(full_names))
    if num_bytes <= MAX_MODELS_BYTES:
        return []
    message = (
        f"the lines name {len(full_names):,} models, whose names take {num_bytes:,} bytes; at most "
        f"{MAX_MODELS_BYTES:,} are kept with a batch. Split the file by model"
    )
    return [{"code": "too_many_models", "message": message, "param": "body.model", "line": None}]


def _head(
    problems: Sequence[dict[str, Any]],
    models: Sequence[str] = (),
    full_names: Sequence[str] = (),
    num_lines: int = 0,
) -> bytes:
    """`model` is the one that all lines name, as they do; `models` are all under their full names.

    They are left away where a problem may be that they are many.
    """
    return orjson.dumps(
        {
            "problems": problems,
            "model": models[0] if len(models) == 1 else None,
            "models": [] if problems else full_names,
            "num_lines": num_lines,
        }
    )


def _shown(problem: LineProblem) -> dict[str, Any]:
    return {
        "code": problem.code,
        "message": problem.message,
        "param": problem.param,
        "line": problem.line_number,
    }


if __name__ == "__main__":
    main()
