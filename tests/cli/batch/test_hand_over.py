"""`echo-sgl batch run` against a server with the batch service, which gets the whole file."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from typer.testing import CliRunner

from echo_sgl.cli import app
from echo_sgl.cli.batch import hand_over
from echo_sgl.cli.batch.client import AwayError, BatchClient, BatchServiceError, wait_ended
from tests.cli.conftest import StartCli
from tests.cli.jobs import (
    WAIT_S,
    completion_line,
    names,
    run_cli,
    wait_until,
    write_job,
)
from tests.cli.stubs import StubServer

MODEL = "stub"


def num_batches(stub: str) -> int:
    return len(httpx.get(f"{stub}/v1/batches", params={"limit": 100}).json()["data"])


def test_run_hands_the_file_over_and_fetches_the_results(
    stub: str, jobs: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    command = ("batch", "run", "-i", jobs, "-o", output, "--url", stub, "--json")
    result = run_cli(*command)
    assert result.returncode == 0, result.stderr
    summary = orjson.loads(result.stdout)
    assert (summary["lines"], summary["ok"], summary["failed"]) == (20, 20, 0)
    assert sorted(names(output)) == sorted(f"line-{index}" for index in range(20))
    again = orjson.loads(run_cli(*command).stdout)
    assert again["batch_id"] == summary["batch_id"]
    anew = orjson.loads(run_cli(*command, "--overwrite").stdout)
    assert anew["batch_id"] != summary["batch_id"]


def test_two_runs_that_begin_at_once_make_one_batch(
    stub: str, jobs: Path, tmp_path: Path, cli: StartCli
) -> None:
    def batch_ids() -> set[str]:
        return {batch["id"] for batch in BatchClient(stub, None).list(100)["data"]}

    output, before = tmp_path / "out.jsonl", batch_ids()
    with jobs.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a run that hands it over
        runs = [cli("batch", "run", jobs, "--url", stub, "-o", output) for _ in range(2)]
        told = [next(line for line in run.stderr or () if "another run" in line) for run in runs]
    assert set(told) == {f"echo-sgl: another run hands {jobs} over; waiting for it\n"}
    for run in runs:
        run.communicate(timeout=WAIT_S)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(batch_ids() - before) == 1
    assert sorted(names(output)) == sorted(f"line-{index}" for index in range(20))


def test_run_that_is_interrupted_goes_on_with_the_same_batch(
    stub: str, slow_jobs: Path, tmp_path: Path, cli: StartCli
) -> None:
    output = tmp_path / "out.jsonl"
    process = cli("batch", "run", slow_jobs, "--output", output, "--url", stub)
    assert process.stderr is not None
    first = process.stderr.readline()
    assert "is submitted" in first
    wait_until(lambda: "in_progress" in process.stderr.readline(), "it is watched")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not output.exists()
    batch_id = first.split()[1]
    assert "cancel" in run_cli("batch", "cancel", batch_id, "--url", stub).stdout
    wait_until(
        lambda: "cancelled" in run_cli("batch", "status", batch_id, "--url", stub).stdout,
        "it is cancelled",
    )
    second = cli("batch", "run", slow_jobs, "--output", output, "--url", stub)
    assert second.stderr is not None
    assert f"going on with {batch_id}" in second.stderr.readline()
    run_cli("batch", "cancel", batch_id, "--url", stub)
    assert second.wait(60) == 1


def test_run_with_overwrite_says_to_go_on_without_it(
    stub: str, slow_jobs: Path, tmp_path: Path, cli: StartCli
) -> None:
    output = tmp_path / "[a] out.jsonl"
    process = cli("batch", "run", slow_jobs, "-o", output, "--url", stub, "--overwrite")
    assert process.stderr is not None
    batch_id = process.stderr.readline().split()[1]
    wait_until(lambda: "in_progress" in process.stderr.readline(), "it is watched")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "run the same command again without --overwrite" in process.stderr.read()
    run_cli("batch", "cancel", batch_id, "--url", stub)


def test_run_waits_for_a_server_that_is_away_and_computes_nothing_twice(
    own_stub: StubServer, jobs: Path, tmp_path: Path, cli: StartCli
) -> None:
    output = tmp_path / "out.jsonl"
    first = cli("batch", "run", jobs, "--output", output, "--url", own_stub.url)
    assert first.stderr is not None
    batch_id = first.stderr.readline().split()[1]
    first.send_signal(signal.SIGINT)
    first.wait(60)
    watched = run_cli("batch", "watch", batch_id, "--url", own_stub.url, "--every", "0.1")
    assert watched.returncode == 0, watched.stderr
    output.unlink(missing_ok=True)
    own_stub.stop()
    second = cli("batch", "run", jobs, "--output", output, "--url", own_stub.url)
    assert second.stderr is not None
    assert f"no server is ready at {own_stub.url}" in second.stderr.readline()
    own_stub.start()
    assert f"going on with {batch_id}" in second.stderr.readline()
    assert second.wait(60) == 0
    assert len(names(output)) == len(own_stub.answered()) == 20


def test_run_fetches_what_was_answered_before_it_was_cancelled(
    own_stub: StubServer, jobs: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    command = ("batch", "run", jobs, "--output", output, "--url", own_stub.url, "--json")
    batch_id = orjson.loads(run_cli(*command).stdout)["batch_id"]
    # As after a cancel that came while the last answer was written.
    [database] = (tmp_path / "own").rglob("jobs.sqlite3")
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        changed = connection.execute("UPDATE batches SET status = 'cancelled', ends_as = NULL")
        assert changed.rowcount == 1
    output.unlink()
    again = run_cli(*command)
    assert (again.returncode, orjson.loads(again.stdout)["batch_id"]) == (0, batch_id)
    assert len(names(output)) == len(own_stub.answered()) == 20


def test_a_server_that_is_busy_or_behind_a_proxy_is_waited_for() -> None:
    replies = [(503, {}), (200, "in_progress"), (502, {}), (429, {}), (200, "completed")]
    batch = {"id": "batch_1", "endpoint": "x", "completion_window": "24h", "created_at": 0}
    answers = iter([httpx.Response(code, json=batch | {"status": body}) for code, body in replies])
    client, said, shown = BatchClient("http://server", None), [], []
    client._http = httpx.Client(
        base_url="http://server", transport=httpx.MockTransport(lambda request: next(answers))
    )
    ended = wait_ended(client, "batch_1", 0.0, shown.append, said.append)
    assert ended == batch | {"status": "completed"}
    assert [batch["status"] for batch in shown] == ["in_progress", "completed"]
    assert ["503" in said[0], "502" in said[1], len(said)] == [True, True, 2]


def test_a_file_whose_batch_is_refused_is_not_left_behind(stub: str, jobs: Path) -> None:
    client = BatchClient(stub, None)
    jobs = jobs.rename(jobs.with_name("refused.jsonl"))
    too_many = {str(index): "x" for index in range(17)}
    with pytest.raises(BatchServiceError, match="16"):
        client.submit(jobs, endpoint="/v1/completions", window="1h", metadata=too_many)
    files = httpx.get(f"{stub}/v1/files", params={"limit": 100}).json()["data"]
    client.close()
    assert files
    assert jobs.name not in [file["filename"] for file in files]


def test_run_waits_where_there_is_no_room_and_makes_one_batch_though_answers_are_lost(
    stub: str, jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(hand_over, "EVERY_S", 0.01)
    create, faults = (
        BatchClient.create,
        iter([AwayError("full", 429, 0.01), AwayError("lost", 502)]),
    )

    def creating(self: BatchClient, file_id: str, **given: Any) -> dict[str, Any]:
        """The first is refused; the second is made, and its answer does not arrive."""
        fault = next(faults)
        if fault.status_code == 502:
            create(self, file_id, **given)
        raise fault

    monkeypatch.setattr(BatchClient, "create", creating)
    num_before = num_batches(stub)
    output = tmp_path / "waited.jsonl"
    arguments = ["batch", "run", str(jobs), "--output", str(output), "--url", stub]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert num_batches(stub) == num_before + 1
    assert len(names(output)) == 20


def test_run_does_not_wait_for_room_that_is_not_expected(
    stub: str, jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: BatchClient, jobs: Path) -> str:
        raise AwayError("10,000 files are stored for this key. Delete some", 429)

    monkeypatch.setattr(BatchClient, "upload", refuse)
    arguments = ["batch", "run", str(jobs), "--output", str(tmp_path / "o"), "--url", stub]
    with pytest.raises(AwayError, match="Delete some"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_when_to_come_back_is_what_the_server_says() -> None:
    answers = iter(
        [
            httpx.Response(429, headers={"retry-after": "7"}),
            httpx.Response(429, headers={"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}),
            httpx.Response(429),
        ]
    )
    client, found = BatchClient("http://server", None), []
    client._http = httpx.Client(
        base_url="http://server", transport=httpx.MockTransport(lambda request: next(answers))
    )
    for _ in range(3):
        with pytest.raises(AwayError) as caught:
            client.list(1)
        found.append(caught.value.retry_after_s)
    assert found == [7.0, None, None]


def test_an_upload_that_found_no_room_is_not_left_behind(
    stub: str, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: BatchClient, file_id: str, **given: Any) -> dict[str, Any]:
        raise AwayError("too many open batches", 429)

    monkeypatch.setattr(BatchClient, "create", refuse)
    client = BatchClient(stub, None)
    jobs = jobs.rename(jobs.with_name("no-room.jsonl"))
    with pytest.raises(AwayError, match="too many"):
        client.submit(jobs, endpoint="/v1/completions", window="1h", metadata={})
    files = httpx.get(f"{stub}/v1/files", params={"limit": 100}).json()["data"]
    client.close()
    assert jobs.name not in [file["filename"] for file in files]


def test_run_finds_its_batch_behind_pages_of_newer_ones(
    stub: str, jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = BatchClient(stub, None)
    pairs = {"key": "first"}
    first = client.submit(jobs, endpoint="/v1/completions", window="1h", metadata=pairs)
    for _ in range(3):
        client.submit(jobs, endpoint="/v1/completions", window="1h", metadata={"key": "later"})
    assert len(client.list(2)["data"]) == 2
    list_page = BatchClient.list
    monkeypatch.setattr(
        BatchClient, "list", lambda self, limit, after=None: list_page(self, min(limit, 2), after)
    )
    found = client.find("key", "first")
    assert found is not None
    assert found["id"] == first["id"]
    assert client.find("key", "none") is None
    client.close()


def test_run_does_not_write_over_what_it_did_not_make(
    stub: str, jobs: Path, tmp_path: Path
) -> None:
    output = tmp_path / "precious.jsonl"
    output.write_text("mine\n")
    result = run_cli("batch", "run", jobs, "--output", output, "--url", stub)
    assert result.returncode == 2
    assert "holds data of something else" in result.stderr
    assert output.read_text() == "mine\n"


def test_results_that_are_gone_are_told_as_such_and_computed_anew_when_told_to(
    stub: str, jobs: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    run = ("batch", "run", jobs, "-o", output, "--url", stub, "--json")
    first = orjson.loads(run_cli(*run).stdout)["batch_id"]
    output_file = httpx.get(f"{stub}/v1/batches/{first}").json()["output_file_id"]
    assert httpx.delete(f"{stub}/v1/files/{output_file}").status_code == 200
    results = run_cli("batch", "results", first, "-o", tmp_path / "again.jsonl", "--url", stub)
    again = run_cli(*run)
    for refused in (results, again):
        assert refused.returncode == 2
        assert f"{output_file} no more: the results have expired or were deleted" in refused.stderr
        assert "stay on the server" not in refused.stderr
    assert "run the same command with --overwrite" in again.stderr
    assert len(names(output)) == 20
    anew = orjson.loads(run_cli(*run, "--overwrite").stdout)
    assert (anew["batch_id"] == first, anew["ok"]) == (False, 20)
    assert orjson.loads(run_cli(*run).stdout)["batch_id"] == anew["batch_id"]


@pytest.mark.parametrize("mode", [(), ("--direct",)])
def test_lines_that_failed_end_run_and_watch_with_code_1(
    stub: str, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    lines = [completion_line("good", model=MODEL), completion_line("wrong", "bad", model=MODEL)]
    mixed = write_job(tmp_path / "mixed.jsonl", lines)
    command = ("batch", "run", mixed, "-o", tmp_path / "out.jsonl", "--url", stub, "--json", *mode)
    for _ in range(2):
        result = run_cli(*command)
        assert result.returncode == 1, result.stderr
    assert (names(tmp_path / "out.jsonl"), names(tmp_path / "out.errors.jsonl")) == (
        ["good"],
        ["wrong"],
    )
    if batch_id := orjson.loads(result.stdout).get("batch_id"):
        assert run_cli("batch", "watch", batch_id, "--url", stub).returncode == 1


def test_run_sends_the_lines_itself_when_told_to(stub: str, jobs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    result = run_cli("batch", "run", jobs, "--output", output, "--url", stub, "--direct", "--json")
    assert result.returncode == 0, result.stderr
    assert "batch_id" not in orjson.loads(result.stdout)
    assert len(names(output)) == 20
