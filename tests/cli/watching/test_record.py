"""`echo-sgl record` against an HTTP server that answers as Echo's route does."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from echo_sgl.cli import app
from echo_sgl.cli.server_route import ServerRouteError
from echo_sgl.cli.watching.record import Collected, Poll, RecordError, RecordingFile
from echo_sgl.engine.metrics.recording import COLUMNS
from echo_sgl.sim.trace_files import read_trace_file
from echo_sgl.types import Task
from tests.cli.jobs import heed_interrupts

OLD = [3.0, 10, 0, 2, "online", [9]]
ROWS = [
    [8.0, 70, 64, 5, "online", [1, 2]],
    [7.5, 64, 0, 4, "online", [1]],
    [7.0, 30, 0, 4, "offline", [3]],
]
# `echo_sgl.cli.watching.record` as an attribute is the command.
MODULE = importlib.import_module("echo_sgl.cli.watching.record")
FAST = "import importlib; importlib.import_module('echo_sgl.cli.watching.record').POLL_S = 0.05; "
COMMAND = (sys.executable, "-c", FAST + "from echo_sgl.cli import main; main()", "record")


class Handler(BaseHTTPRequestHandler):
    """Has noted `OLD` before; each later question finds what is left of `ROWS`.

    From question number `fails_from` on it has no answer, from `hangs_from` on it gives none.
    """

    questions: list[dict[str, list[str]]]
    fails_from: float
    hangs_from: float
    is_released: threading.Event

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        self.questions.append(query)
        if len(self.questions) >= self.hangs_from:
            self.is_released.wait(60)
            return
        after = int(query["after"][0].rpartition(":")[2] or 0)
        rows = [OLD] if len(self.questions) == 1 else ROWS[after - 1 :]
        state = replica_state(rows, number=1 if len(self.questions) == 1 else 1 + len(ROWS))
        body = json.dumps({"replicas": [state]}).encode()
        self.send_response(502 if len(self.questions) >= self.fails_from else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def replica_state(
    rows: Sequence[Sequence[Any]], *, number: int, log: str = "a", **others: Any
) -> dict[str, Any]:
    """A replica's answer; its clock shows 10 s unless told otherwise."""
    state = {"replica": 0, "log": log, "block_tokens": 64, "columns": COLUMNS, "rows": rows}
    return {**state, "next": number, "num_lost": 0, "now_s": 10.0, **others}


@pytest.fixture
def url() -> Iterator[str]:
    Handler.questions = []
    Handler.fails_from = Handler.hangs_from = float("inf")
    Handler.is_released = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Handler.is_released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def arguments(url: str, output: Path, *, seconds: float) -> list[str]:
    return ["--url", url, "--seconds", str(seconds), "--output", str(output)]


def prompts(output: Path) -> list[int]:
    """The online prompts' lengths in a file that is a whole recording."""
    return list(read_trace_file(output).trace.prompt_tokens)


def test_a_recording_is_a_trace_that_plan_reads(url: str, tmp_path: Path) -> None:
    output = tmp_path / "recording.jsonl"
    result = CliRunner().invoke(app, ["record", *arguments(url, output, seconds=0.1)])
    assert result.exit_code == 0, result.stderr
    online = read_trace_file(output).trace
    assert list(online.at_s) == pytest.approx([0.0, 0.5])
    assert list(online.prompt_tokens) == [64, 70]
    first, second = (list(online.request(number).blocks) for number in (0, 1))
    assert first == second[:1] == [1] and len(second) == 2
    assert list(read_trace_file(output, task=Task.OFFLINE).trace.prompt_tokens) == [30]
    ids = {question["recording"][0] for question in Handler.questions}
    assert len(ids) == 1
    assert len(ids.pop()) == 32


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_what_was_recorded_before_the_end_is_a_recording(
    url: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    Handler.hangs_from = 3
    output = tmp_path / "recording.jsonl"
    command = [*COMMAND, *arguments(url, output, seconds=600)]
    with subprocess.Popen(command, preexec_fn=heed_interrupts) as process:  # noqa: PLW1509
        end_s = time.monotonic() + 60
        while len(Handler.questions) < 3 and time.monotonic() < end_s:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == code
    assert prompts(output) == [64, 70]


def test_a_server_that_stays_away_ends_it_with_what_there_is(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "POLL_S", 0.02)
    monkeypatch.setattr(MODULE, "GIVE_UP_S", 0.3)
    Handler.fails_from = 3
    output = tmp_path / "recording.jsonl"
    problem = rf"no answer for .* s; 3 requests are kept in {output}, .* answers 502"
    with pytest.raises(RecordError, match=problem):
        CliRunner().invoke(
            app, ["record", *arguments(url, output, seconds=600)], catch_exceptions=False
        )
    assert len(Handler.questions) > 4
    assert prompts(output) == [64, 70]


class Server:
    """Answers as told, one by one; fails where the answer is a number, of seconds that passed."""

    def __init__(self, path: Path, *answers: dict[str, Any] | float) -> None:
        self.now_s, self.asked, self.answers = 0.0, list[str](), iter(answers)
        self.collected = Collected(RecordingFile(path))
        self.poll = Poll(self.ask, self.collected, lambda: self.now_s)

    def ask(self, after: str) -> list[dict[str, Any]]:
        self.asked.append(after)
        answer = next(self.answers)
        if isinstance(answer, float):
            self.now_s += answer
            raise ServerRouteError("it is away")
        return [answer]


def test_failures_are_borne_until_they_last_too_long(tmp_path: Path) -> None:
    start, rest = replica_state([], number=1), replica_state(ROWS, number=4)
    server = Server(tmp_path / "r.jsonl", start, 200.0, 200.0, rest, 200.0, 200.0, 200.0)
    for _ in range(6):
        server.poll()
    assert server.asked == ["", "0:1", "0:1", "0:1", "0:4", "0:4"]
    with pytest.raises(RecordError, match=r"no answer for 400 s; 3 requests are kept"):
        server.poll()


def test_a_server_that_never_answered_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ServerRouteError, match="it is away"):
        Server(tmp_path / "r.jsonl", 1.0).poll()


@pytest.mark.parametrize("clock_s", [12.0, 5000.0])
def test_a_restarted_server_is_recorded_from_its_first_request_on(
    tmp_path: Path, clock_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    row = [clock_s - 1.0, 5, 0, 2, "online", [7]]
    anew: dict[str, Any] = {"log": "b", "now_s": clock_s}
    server = Server(
        path,
        replica_state([], number=7),
        replica_state([ROWS[0]], number=8),
        replica_state([], number=2, **anew),
        replica_state([row], number=2, num_lost=1, **anew),
        replica_state([], number=2, **anew),
    )
    for now_s in (0.0, 1.0, 2.0, 3.0):
        server.now_s = now_s
        server.poll()
    assert server.asked == ["", "0:7", "0:8", "0:0", "0:2"]
    assert (server.collected.num_restarts, server.collected.num_lost) == (1, 1)
    assert "the server was restarted" in capsys.readouterr().err
    assert prompts(path) == [70, 5]
    # The new clock is the old one going on, or another machine's: both say a second ago.
    assert list(read_trace_file(path).trace.at_s) == pytest.approx([0.0, 3.0])


def test_two_servers_behind_one_address_are_recorded_once(tmp_path: Path) -> None:
    one, other = replica_state([], number=0), replica_state([], number=0, log="b")
    found = replica_state([[2.0, 5, 0, 2, "online", [7]]], number=1, log="b")
    server = Server(tmp_path / "r.jsonl", one, other, found, one, other, found, found)
    for _ in range(3):
        server.poll()
    assert server.asked == ["", "0:0", "0:0", "0:1", "0:0"]
    assert (server.collected.file.num_rows, server.collected.num_restarts) == (1, 1)


def test_what_was_lost_is_counted_but_not_before_the_start(tmp_path: Path) -> None:
    collected = Collected(RecordingFile(tmp_path / "r.jsonl"))
    collected.take([replica_state([], number=7, replica=1, num_lost=3)], 0.0)
    assert (collected.after, collected.num_lost) == ("1:7", 0)
    collected.take([replica_state([], number=9, replica=1, num_lost=2)], 1.0)
    assert (collected.after, collected.num_lost) == ("1:9", 2)


def request(at_s: float, prompt: int) -> dict[str, Any]:
    return {"at_s": at_s, "prompt_tokens": prompt, "output_tokens": 1, "class": "online"}


@given(polls=st.lists(st.lists(st.integers(-9, 99)), min_size=1).filter(any))
def test_the_file_is_whole_after_every_answer_and_read_in_order_of_arrival(
    polls: list[list[int]],
) -> None:
    with TemporaryDirectory() as folder:
        file = RecordingFile(Path(folder) / "r.jsonl")
        arrivals: list[tuple[int, int]] = []
        for poll in polls:
            new = [(at_s, len(arrivals) + number) for number, at_s in enumerate(poll, start=1)]
            file.add([request(at_s, prompt) for at_s, prompt in new], 64)
            arrivals += new
            if arrivals:
                assert prompts(file.path) == [prompt for _, prompt in sorted(arrivals)]
        assert file.num_rows == len(arrivals)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordingFile(tmp_path / "r.jsonl")
    file.add([request(2.0, 2), request(4.0, 4)], 64)
    before = file.path.read_bytes()

    class FullDisk(FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > len(before):
                raise OSError(28, "No space left on device")
            return super().write(data[:10])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode, **_: FullDisk(path, mode))
        with pytest.raises(RecordError, match="No space left on device; 2 requests are kept"):
            file.add([request(3.0, 3)], 64)
    assert file.path.read_bytes() == before
    file.add([request(3.0, 3)], 64)
    assert prompts(file.path) == [2, 3, 4]


def test_what_was_being_written_when_it_was_killed_is_left_out(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "r.jsonl")
    file.add([request(4.0, 4), request(2.0, 2), request(3.0, 3)], 64)
    file.path.write_bytes(file.path.read_bytes()[:-20])
    read = read_trace_file(file.path)
    assert list(read.trace.prompt_tokens) == [2, 4]
    assert read.warnings == ("line 4: cut off as the recording ended",)


def test_an_older_recording_stays_until_a_request_ends(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "r.jsonl")
    file.path.write_text("older")
    file.add([], 64)
    assert file.path.read_text() == "older"
    file.add([request(1.0, 5)], 64)
    assert prompts(file.path) == [5]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no/folder.jsonl", "does not exist"),
        ("trace.csv", r"name it \.jsonl"),
        ("trace.jsonl.gz", r"name it \.jsonl"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_recording(
    tmp_path: Path, name: str, problem: str
) -> None:
    arguments = ["record", "--output", str(tmp_path / name)]
    with pytest.raises(RecordError, match=problem):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_file_that_is_no_recording_is_not_replaced(url: str, tmp_path: Path) -> None:
    job, recorded, empty = (tmp_path / f"{name}.jsonl" for name in ("job", "recorded", "empty"))
    job.write_text('{"custom_id": "a"}\n')
    recorded.write_text('{"format": "echo-recording", "version": 1, "block_tokens": 64}\n')
    empty.touch()
    refused = CliRunner().invoke(app, ["record", *arguments(url, job, seconds=0.1)])
    assert isinstance(refused.exception, RecordError)
    assert "is there and no recording, so it is not replaced" in str(refused.exception)
    assert job.read_text() == '{"custom_id": "a"}\n' and not Handler.questions
    for path in (recorded, empty):
        Handler.questions = []
        result = CliRunner().invoke(app, ["record", *arguments(url, path, seconds=0.1)])
        assert result.exit_code == 0, result.stderr
        assert prompts(path) == [64, 70]
