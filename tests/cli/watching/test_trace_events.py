"""Steps as a trace: what the Trace Event Format asks for, and what the steps say."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batch_shape import BatchRow
from echo_sgl.cli.watching.trace_events import num_steps, trace_document
from echo_sgl.engine.steps.step_log import COLUMNS, StepNote

PHASES = {"X", "C", "i", "M"}


def note(start_s: float, time_s: float | None, **changes: Any) -> list[Any]:
    fields: dict[str, Any] = {
        "start_s": start_s,
        "row": BatchRow(1, 64, 0, 4096, 3, 300, 120),
        "limit_s": 0.05,
        "slack_s": float("inf"),
        "predicted_s": 0.02,
        "upper_s": 0.03,
        "num_offline": 1,
        "num_parked": 2,
        "num_pooled": 9,
        "num_evicted_tokens": 0,
        "time_s": time_s,
        **changes,
    }
    return StepNote(**fields).as_row()


def document(*rows: list[Any], replica: int = 0) -> dict[str, Any]:
    return trace_document([{"replica": replica, "columns": list(COLUMNS), "rows": list(rows)}])


def of_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def check_format(trace: dict[str, Any]) -> None:
    """The fields that the Trace Event Format requires of the phases that are used here."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    for event in trace["traceEvents"]:
        assert event["ph"] in PHASES
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "C":
            assert event["args"] and all(isinstance(v, int | float) for v in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in {"g", "p", "t"}
        else:
            assert event["name"] in {"process_name", "thread_name"}
            assert isinstance(event["args"]["name"], str)


times = st.floats(0.0, 1e4)
rows = st.lists(
    st.builds(
        note,
        times,
        st.none() | st.floats(0.0, 10.0),
        limit_s=times | st.just(float("inf")) | st.just(-1.0),
        slack_s=times | st.just(float("inf")),
        num_evicted_tokens=st.integers(0, 10),
        num_parks=st.integers(0, 10),
    ),
    max_size=20,
)


@given(rows, st.integers(0, 7))
def test_any_steps_make_a_trace_in_the_format(steps: list[list[Any]], replica: int) -> None:
    trace = document(*steps, replica=replica)
    check_format(trace)
    measured = [row for row in steps if row[COLUMNS.index("time_s")] is not None]
    assert num_steps(trace) == len(measured)
    slices = of_phase(trace, "X")
    for before, after in itertools.pairwise(slices):
        # Slices of one track that overlap are not shown.
        assert after["ts"] >= before["ts"] + before["dur"]


def test_a_step_has_its_times_and_its_composition() -> None:
    [step] = of_phase(document(note(100.0, 0.025)), "X")
    assert step["name"] == "prefill 1 (64 tokens) + decode 3"
    assert (step["ts"], step["dur"]) == (0.0, pytest.approx(25_000))
    args = step["args"]
    assert (args["time_ms"], args["predicted_ms"]) == (pytest.approx(25), pytest.approx(20))
    assert (args["limit_ms"], args["slack_ms"]) == (pytest.approx(50), None)
    assert (args["prefill_tokens"], args["num_decodes"], args["num_offline"]) == (64, 3, 1)


def test_counters_follow_what_waits_and_what_limits() -> None:
    counters = of_phase(document(note(1.0, 0.1, slack_s=0.5)), "C")
    values = {event["name"]: event["args"][event["name"]] for event in counters}
    assert values["parked"] == 2 and values["pooled"] == 9
    assert values["limit, ms"] == pytest.approx(50) and values["slack, ms"] == pytest.approx(500)


def test_what_happened_between_two_steps_is_marked_at_the_second() -> None:
    trace = document(
        note(1.0, 0.1, num_parks=4, num_evicted_tokens=100),
        note(1.2, 0.1, num_parks=6, num_evicted_tokens=612, num_retractions=1),
        note(1.4, 0.1, num_parks=6, num_evicted_tokens=612, num_retractions=1),
    )
    marks = of_phase(trace, "i")
    assert {mark["name"] for mark in marks} == {"parked: 2", "evicted tokens: 512", "retracted: 1"}
    assert [mark["ts"] for mark in marks] == pytest.approx([200_000] * 3)


def test_replicas_are_processes_on_one_clock() -> None:
    columns = list(COLUMNS)
    trace = trace_document(
        [
            {"replica": 0, "columns": columns, "rows": [note(5.0, 0.1)]},
            {"replica": 1, "columns": columns, "rows": [note(4.0, 0.1)]},
        ]
    )
    starts = {event["pid"]: event["ts"] for event in of_phase(trace, "X")}
    assert starts == {1: pytest.approx(1_000_000), 2: 0.0}


def test_an_idle_server_has_an_empty_trace() -> None:
    trace = document()
    check_format(trace)
    assert num_steps(trace) == 0
