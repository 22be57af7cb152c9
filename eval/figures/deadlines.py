"""Completion windows of jobs: how a line names its own, and which lines came too late.

The request field stands here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eval.load.records import Record, Status
from eval.workloads.jobs import BatchLine

PARAMS_KEY, DEADLINE_KEY = "custom_params", "deadline_s"


def with_deadline(line: BatchLine, deadline_s: float) -> BatchLine:
    """The line with a completion window, in seconds from when the server receives it."""
    params = {**line["body"].get(PARAMS_KEY, {}), DEADLINE_KEY: deadline_s}
    return line | {"body": line["body"] | {PARAMS_KEY: params}}


def deadlines_of(job: Iterable[BatchLine]) -> dict[str, float]:
    """The window (s) of every line that names one, by custom_id."""
    params = ((line["custom_id"], line["body"].get(PARAMS_KEY, {})) for line in job)
    return {name: values[DEADLINE_KEY] for name, values in params if DEADLINE_KEY in values}


def deadline_figures(
    records: Iterable[Record], deadlines: Mapping[str, float], *, end_s: float
) -> dict[str, Any]:
    """How many lines can be judged, and how many of those missed their window.

    A line that was not answered is judged only when its window closed before `end_s`, the end
    of the phase; one that failed has missed it.
    """
    judged = missed = 0
    for record in records:
        if record.id not in deadlines:
            continue
        due_s = record.scheduled_s + deadlines[record.id]
        is_answered = record.status is Status.OK and record.end_s is not None
        if not is_answered and record.status is not Status.ERROR and due_s > end_s:
            continue
        judged += 1
        missed += not is_answered or (record.end_s or 0.0) > due_s
    return {"judged": judged, "missed": missed, "share": missed / judged if judged else None}
