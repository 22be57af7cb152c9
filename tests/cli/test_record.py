"""`echo-sgl record` against an HTTP server that answers as Echo's route does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from echo_sgl.cli import app
from echo_sgl.cli.record import Collected, RecordError
from echo_sgl.engine.recording import COLUMNS
from echo_sgl.sim.trace_files import read_trace_file
from echo_sgl.types import Task

OLD = [3.0, 10, 0, 2, "online", [9]]
ROWS = [
    [8.0, 70, 64, 5, "online", [1, 2]],
    [7.5, 64, 0, 4, "online", [1]],
    [7.0, 30, 0, 4, "offline", [3]],
]


class Handler(BaseHTTPRequestHandler):
    """Has noted `OLD` before; each later question finds what is left of `ROWS`."""

    questions: list[dict[str, list[str]]]

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        self.questions.append(query)
        after = int(query["after"][0].rpartition(":")[2] or 0)
        rows = [OLD] if len(self.questions) == 1 else ROWS[after - 1 :]
        state = {"replica": 0, "block_tokens": 64, "columns": COLUMNS, "rows": rows}
        state |= {"next": 1 if len(self.questions) == 1 else 1 + len(ROWS), "num_lost": 0}
        body = json.dumps({"replicas": [state]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.questions = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_recording_is_a_trace_that_plan_reads(url: str, tmp_path: Path) -> None:
    output = tmp_path / "recording.jsonl"
    arguments = ["record", "--url", url, "--seconds", "0.1", "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    online = read_trace_file(output).trace
    assert list(online.at_s) == [0.0, 0.5]
    assert list(online.prompt_tokens) == [64, 70]
    assert [list(online.request(number).blocks) for number in (0, 1)] == [[1], [1, 2]]
    assert list(read_trace_file(output, task=Task.OFFLINE).trace.prompt_tokens) == [30]
    ids = {question["recording"][0] for question in Handler.questions}
    assert len(ids) == 1
    assert len(ids.pop()) == 32


def test_what_was_lost_is_counted_but_not_before_the_start() -> None:
    collected = Collected()
    state = {"replica": 1, "block_tokens": 64, "columns": COLUMNS, "rows": []}
    collected.take([{**state, "next": 7, "num_lost": 3}])
    assert (collected.after, collected.num_lost) == ("1:7", 0)
    collected.take([{**state, "next": 9, "num_lost": 2}])
    assert (collected.after, collected.num_lost) == ("1:9", 2)


@pytest.mark.parametrize(
    ("name", "problem"), [("no/folder.jsonl", "does not exist"), ("trace.csv", r"name it \.jsonl")]
)
def test_an_output_that_cannot_be_is_refused_before_recording(
    tmp_path: Path, name: str, problem: str
) -> None:
    arguments = ["record", "--output", str(tmp_path / name)]
    with pytest.raises(RecordError, match=problem):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
