"""Steps as they were run and timed: the timer alone, and on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from echo_sgl.batch_shape import BatchRow, StepKind
from echo_sgl.engine.steps import step_timing
from echo_sgl.engine.steps.step_log import StepNote
from echo_sgl.engine.steps.step_timing import NUM_FIRST, StepTimer, row_of_batch
from eval.servers.server import LOCAL
from tests.cli.jobs import run_cli
from tests.engine.traffic import FLEX, completion, documents, is_idle, send_all, wait_until

ROW = BatchRow(1, 10, 0, 100, 0, 0, 0)


def batch(mode: str, **fields: Any) -> SimpleNamespace:
    forward_mode = SimpleNamespace(
        is_decode=lambda: mode == "decode", is_extend=lambda: mode in ("extend", "mixed")
    )
    return SimpleNamespace(forward_mode=forward_mode, decoding_reqs=None, **fields)


def reqs(*lengths: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(seqlen=length) for length in lengths]


def test_a_step_is_kept_with_its_time_once_it_is_over():
    timer, note = StepTimer(), StepNote(1.0, ROW, math.inf, math.inf, 1, 0, 0, 0)
    timer.expect(ROW, note)
    with timer.wrap({"category": "extend"}):
        assert timer.records() == []
        threading.Event().wait(0.01)
    assert note.time_s is None and not timer.ended_notes
    [(row, time_s)] = timer.records()
    assert row == ROW and 0.009 < time_s < 60
    assert timer.num_steps == 1
    assert note.time_s == time_s and list(timer.ended_notes) == [note]


def test_the_first_steps_tell_for_how_long_they_were_run_and_not_when_others_were():
    timer = StepTimer()
    for number in range(NUM_FIRST + 3):
        timer.expect(ROW if number else None)
        with timer.wrap({"category": "decode"}):
            threading.Event().wait(0.01)
    assert len(timer.first_busy_s) == NUM_FIRST
    assert all(
        busy_s < time_s
        for busy_s, (_, time_s) in zip(timer.first_busy_s, timer.records(), strict=False)
    )


def test_threads_that_spin_while_others_have_the_cores_do_not_count(monkeypatch):
    """As where several servers warm up at once: each step takes many times its own work."""
    spent_s, preempted = iter([1.0, 1.1, 2.0, 2.1]), iter([5, 15, 15, 115])
    monkeypatch.setattr(
        step_timing,
        "time",
        SimpleNamespace(thread_time=lambda: next(spent_s), perf_counter=time.perf_counter),
    )
    usage = lambda who: SimpleNamespace(ru_nivcsw=next(preempted))  # noqa: E731
    monkeypatch.setattr(step_timing, "resource", SimpleNamespace(getrusage=usage, RUSAGE_SELF=0))
    timer = StepTimer()
    for _ in range(2):
        timer.expect(ROW)
        with timer.wrap({"category": "decode"}):
            pass
    assert timer.first_busy_s == pytest.approx([0.06, 0.001])


def test_on_an_accelerator_a_step_takes_what_its_events_tell(monkeypatch):
    """A stand-in: no machine of this suite has one. Nobody waits for the device."""
    now_ms, is_over = iter([3.0, 8.0, 20.0, 21.5]), [False, False]
    events: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            events.append(self)

        def record(self) -> None:
            self.at_ms = next(now_ms)

        def query(self) -> bool:
            return is_over[events.index(self) // 2]

        def elapsed_time(self, end: Any) -> float:
            return float(end.at_ms - self.at_ms)

    monkeypatch.setattr("torch.cuda.Event", Event)
    timer = StepTimer(on_device=True)
    assert timer.first_busy_s == []
    for _ in range(2):
        timer.expect(ROW)
        with timer.wrap({"category": "extend"}):
            pass
    assert timer.records() == []
    is_over[0] = True
    assert timer.take_fresh() == [(ROW, pytest.approx(0.005))]
    is_over[1] = True
    assert timer.take_fresh() == [(ROW, pytest.approx(0.0015))]
    assert timer.num_steps == len(timer.records()) == 2
    assert timer.first_busy_s == [math.inf] * 2


def test_passes_that_nobody_announced_are_not_kept():
    timer = StepTimer()
    with timer.wrap({"category": "idle"}):
        pass
    timer.expect(None)
    with timer.wrap({"category": "decode"}):
        pass
    assert timer.records() == []


def test_sglangs_own_timer_still_sees_every_pass():
    seen = []

    class Inner:
        @contextlib.contextmanager
        def wrap(self, metadata):
            seen.append(metadata["category"])
            yield

    timer = StepTimer(Inner())
    for category in ("extend", "decode"):
        with timer.wrap({"category": category}):
            pass
    assert seen == ["extend", "decode"]


def test_the_oldest_steps_are_forgotten():
    timer = StepTimer(capacity=3)
    for number in range(1, 6):
        timer.expect(ROW._replace(prefill_tokens=number))
        with timer.wrap({"category": "extend"}):
            pass
    assert [row.prefill_tokens for row, _ in timer.records()] == [3, 4, 5]
    assert timer.num_steps == 5


def test_a_decode_step_is_its_contexts():
    assert row_of_batch(batch("decode", reqs=reqs(5, 9))) == BatchRow(0, 0, 0, 0, 2, 14, 9)


def test_a_mixed_step_tells_prefills_from_decodes():
    running = reqs(8)
    mixed = batch("mixed", reqs=[*reqs(30), *running], extend_lens=[20, 1], prefix_lens=[10, 7])
    mixed.decoding_reqs = running
    row = row_of_batch(mixed)
    assert row == BatchRow(1, 20, 10, 30**2 - 10**2, 1, 8, 8, 30)
    assert row.kind is StepKind.MIXED


def test_an_idle_batch_is_no_step():
    assert row_of_batch(batch("idle", reqs=[])) is None


@pytest.mark.server
def test_a_server_hands_out_the_steps_that_it_ran(echo_server):
    LOCAL.post(f"{echo_server.url}/flush_cache", timeout=60).raise_for_status()
    before = steps(echo_server)["num_steps"]
    bodies = [completion(text, 12, **FLEX) for text in documents(3, 200, seed=21)]
    answers = asyncio.run(send_all(echo_server, bodies))
    wait_until(lambda: is_idle(echo_server), "the server is idle")
    after = steps(echo_server)
    new = after["num_steps"] - before
    ran = [dict(zip(after["columns"], row, strict=True)) for row in after["rows"][-new:]]
    usage = [answer.json()["usage"] for answer in answers]
    # The prompts of three documents of 250 words and more take several chunks of 256 tokens.
    assert sum(step["prefill_tokens"] for step in ran) == sum(u["prompt_tokens"] for u in usage)
    assert sum(step["num_decodes"] for step in ran) >= 3 * 11
    assert all(0 < step["time_s"] < 60 for step in ran)
    assert max(step["max_decode_tokens"] for step in ran) > max(u["prompt_tokens"] for u in usage)


@pytest.mark.server
def test_the_command_line_writes_them_as_a_table(echo_server):
    asyncio.run(send_all(echo_server, [completion("one step at least", 2)]))
    result = run_cli("steps", "dump", "--url", echo_server.url)
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert rows and set(rows[0]) == {"replica", *BatchRow._fields, "time_s"}
    assert f"{len(rows)} steps" in result.stderr


@pytest.mark.server
def test_a_server_without_echo_is_told_apart(stock_server):
    result = run_cli("steps", "dump", "--url", stock_server.url)
    assert result.returncode == 2
    assert "answers 404" in result.stderr and "echo-sgl serve" in result.stderr


def steps(server: Any) -> dict[str, Any]:
    [replica] = LOCAL.get(f"{server.url}/echo/steps", timeout=60).json()["replicas"]
    return dict(replica)
