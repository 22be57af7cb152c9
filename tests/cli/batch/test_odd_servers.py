"""Commands against servers that answer something else than they should, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from echo_sgl.cli.batch.client import AwayError, BatchClient, BatchServiceError
from echo_sgl.cli.batch.service import endpoint_of
from echo_sgl.cli.connection import ApiKeyError, ProxyError
from echo_sgl.cli.server_route import ServerRouteError
from echo_sgl.cli.tuning.replay_load import read_job
from echo_sgl.errors import EchoError
from tests.cli.jobs import completion_line, write_job
from tests.cli.odd_server import REPLICA, OddServer, run

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n0,20,3\n0.5,40,2\n"
KEY = "ключ"
BATCH: dict[str, Any] = {
    "id": "batch_1",
    "status": "completed",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "created_at": 0,
    "output_file_id": "file-1",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files that the commands read."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path / "jobs.jsonl", [completion_line("a")])
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "folder").mkdir()
    return tmp_path


BUDGET = "budget --slo ttft_p99=1s --trace azure.csv --output new.toml"
OF_ECHO = (
    "explain job-17",
    "explain job-17 --json",
    "trace --output t.json",
    "steps dump",
    "calibrate --output p.json",
    BUDGET,
    "record --seconds 0.1 --output r.jsonl",
)
OF_BATCHES = (
    "batch list",
    "batch status batch_1",
    "batch watch batch_1",
    "batch submit jobs.jsonl",
    "batch cancel batch_1",
    "batch results batch_1 -o out.jsonl",
)


@pytest.mark.parametrize(
    "answer",
    ["{}", "[]", "null", "3", '{"replicas": []}', '{"replicas": [{}]}', '{"replicas": 1}'],
)
@pytest.mark.parametrize("command", OF_ECHO)
def test_a_server_without_echo_that_answers_everything_is_named_as_such(
    odd: OddServer, command: str, answer: str
) -> None:
    odd.usual = 200, answer
    with pytest.raises(ServerRouteError, match=r"not Echo's\. Start the server with Echo"):
        run(odd, command)


@pytest.mark.parametrize("answer", ["{}", "[]", "null", '{"data": {}}', '{"data": [{}]}'])
@pytest.mark.parametrize("command", OF_BATCHES)
def test_a_server_without_batches_that_answers_everything_is_named_as_such(
    odd: OddServer, command: str, answer: str
) -> None:
    odd.usual = 200, answer
    with pytest.raises(BatchServiceError, match=r"not answer as OpenAI.* is --url right"):
        run(odd, command)
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "wants an API key"),
        (404, "Start the server with Echo"),
        (500, "/echo/steps answers 500: out of order. The server, or a proxy before it, failed"),
    ],
)
def test_a_refusal_of_our_routes_is_told_as_what_it_is(
    odd: OddServer, status: int, said: str
) -> None:
    odd.usual = status, "out of\n order"
    with pytest.raises(ServerRouteError, match=said):
        run(odd, "steps dump")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "it wants a key, and this command sends none"),
        (404, "Start the server with --enable-metrics"),
        (500, "/metrics answers 500: out of order. The server, or a proxy before it, failed"),
    ],
)
@pytest.mark.parametrize("command", ["stats", "top --once"])
def test_a_refusal_of_the_metrics_is_told_as_what_it_is(
    odd: OddServer, command: str, status: int, said: str
) -> None:
    odd.usual = status, "out of\n order"
    result = run(odd, command)
    assert result.exit_code == 1
    assert said in result.stderr


# Files


def test_answers_and_failed_lines_of_a_batch_never_go_to_one_file(odd: OddServer) -> None:
    odd.paths = {"/v1/batches/batch_1": (200, json.dumps(BATCH))}
    for errors in ("out.jsonl", "folder/../out.jsonl"):
        with pytest.raises(EchoError, match="they must differ"):
            run(odd, f"batch results batch_1 -o out.jsonl --errors {errors}")
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-o .", "which is a folder; name a file in it"),
        ("-o folder", "which is a folder; name a file in it"),
        ("-o out.jsonl --errors folder", "--errors is folder, which is a folder"),
        ("-o /proc/x/y", "/proc/x/y cannot be written"),
        ("-o jobs.jsonl/y", "jobs.jsonl/y cannot be written"),
    ],
)
def test_results_that_cannot_be_written_are_refused(
    odd: OddServer, options: str, said: str
) -> None:
    odd.paths = {"/v1/batches/batch_1": (200, json.dumps(BATCH))}
    with pytest.raises(EchoError, match=said):
        run(odd, f"batch results batch_1 {options}")


def test_results_go_into_what_is_no_file_and_leave_it_what_it_is(odd: OddServer) -> None:
    pipe, got = Path("pipe"), []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    odd.paths = {
        "/v1/batches/batch_1": (200, json.dumps(BATCH | {"error_file_id": "file-2"})),
        "/v1/files/file-2/content": (200, "a failed line"),
    }
    assert run(odd, "batch results batch_1 -o out.jsonl --errors pipe").exit_code == 0
    reader.join(60)
    assert got == ["a failed line"]
    assert pipe.is_fifo()


def test_a_batch_that_failed_has_no_results_and_takes_none_away(odd: OddServer) -> None:
    problems = {"data": [{"message": "no such model", "code": "model_not_found", "line": 3}]}
    failed = BATCH | {"status": "failed", "output_file_id": None, "errors": problems}
    odd.paths = {"/v1/batches/batch_1": (200, json.dumps(failed))}
    Path("out.jsonl").write_text("of before\n")
    with pytest.raises(EchoError, match=r"no results: .*\n(.*\n)*.*line 3: no such model"):
        run(odd, "batch results batch_1 -o out.jsonl")
    assert Path("out.jsonl").read_text() == "of before\n"


@pytest.mark.parametrize("width", ["20", "80"])
def test_ids_stand_in_a_list_whole_however_narrow_the_terminal_is(
    odd: OddServer, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    ids = [f"batch_{index:032x}" for index in range(3)]
    odd.usual = 200, json.dumps({"data": [BATCH | {"id": id} for id in ids]})
    _, *rows = run(odd, "batch list").stdout.splitlines()
    assert [row.split()[0] for row in rows] == ids


def test_a_server_that_knows_batches_but_not_how_to_pause_them_is_told_apart(
    odd: OddServer,
) -> None:
    odd.usual = 404, '{"detail": "Not Found"}'
    for action in ("pause", "resume", "retry"):
        with pytest.raises(BatchServiceError, match=f"cannot {action} a batch: only echo-sgl's"):
            run(odd, f"batch {action} batch_1")
    with pytest.raises(BatchServiceError, match="has no batch service"):
        run(odd, "batch cancel batch_1")


@pytest.mark.parametrize(
    ("status", "is_there"), [(404, False), (401, False), (501, False), (500, None), (503, None)]
)
def test_a_batch_service_that_fails_is_not_taken_for_none(
    odd: OddServer, status: int, is_there: bool | None
) -> None:
    """Else the lines of a job that it works on would be sent a second time."""
    odd.usual = status, "out of order"
    client = BatchClient(odd.url, None)
    found: bool | None = None
    with contextlib.suppress(AwayError):
        found = client.has_service()
    client.close()
    assert found is is_there


@pytest.mark.parametrize(
    ("output", "said"),
    [("nodir/x.csv", "folder that does not exist"), ("folder", "folder cannot be written: Is a")],
)
def test_steps_that_cannot_be_written_are_refused(odd: OddServer, output: str, said: str) -> None:
    odd.usual = 200, json.dumps({"replicas": [REPLICA]})
    assert run(odd, "steps dump --output steps.csv").exit_code == 0
    assert Path("steps.csv").read_text().split() == ["replica,time_s", "0,0.5"]
    with pytest.raises(EchoError, match=said):
        run(odd, f"steps dump --output {output}")


def test_a_job_for_load_may_have_a_byte_order_mark_and_blank_lines(folder: Path) -> None:
    job, line = folder / "marked.jsonl", completion_line("a")
    job.write_bytes(b"\xef\xbb\xbf\r\n" + line + b"\n \n\n" + line)
    assert len(read_job(job)) == 2
    job.write_bytes(b"\xef\xbb\xbf" + line + b"\n\n{")
    with pytest.raises(EchoError, match="line 3: the line is not valid JSON"):
        read_job(job)


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n", b"\n \n"])
def test_a_batch_goes_where_its_first_line_that_is_not_blank_says(
    folder: Path, before: bytes
) -> None:
    job = folder / "marked.jsonl"
    job.write_bytes(before + completion_line("a") + b"\n")
    assert endpoint_of(job) == "/v1/completions"


# Keys


@pytest.mark.parametrize("command", [*OF_ECHO, *OF_BATCHES, "batch run jobs.jsonl -o o.jsonl"])
def test_a_key_that_no_request_can_carry_is_refused_without_showing_it(
    odd: OddServer, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(ApiKeyError, match="allowed are ASCII letters") as caught:
        run(odd, command)
    assert KEY not in str(caught.value)


# Proxies


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "foo://127.0.0.1:1", "http://x:y"])
@pytest.mark.parametrize("command", ["stats", "explain job-17", "batch list"])
def test_a_proxy_that_cannot_be_used_is_named_as_what_is_wrong(
    odd: OddServer, command: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ProxyError, match=r"ALL_PROXY names cannot be used.*or unset"):
        run(odd, command)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("azure.csv", "azure.csv is there and no preset, so it is not replaced"),
        ("folder", "folder is there and no preset"),
        ("nowhere/new.toml", "folder that does not exist"),
    ],
)
def test_a_budget_is_not_searched_for_where_it_cannot_be_kept(
    odd: OddServer, folder: Path, output: str, said: str
) -> None:
    with pytest.raises(EchoError, match=said):
        run(odd, BUDGET.replace("new.toml", output))
    assert not odd.keys
    assert (folder / "azure.csv").read_text() == AZURE
