"""`echo-sgl batch submit|list|status|watch|...` against a server with the batch service."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from eval.servers.server import Server, free_port
from tests.cli.jobs import (
    completion_line,
    names,
    run_cli,
    write_job,
)

MODEL = "stub"


def submit(stub: str, jobs: Path) -> str:
    result = run_cli("batch", "submit", jobs, "--url", stub, "--window", "2h")
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_job_is_submitted_watched_and_fetched(stub: str, jobs: Path, tmp_path: Path) -> None:
    batch_id = submit(stub, jobs)
    assert batch_id.startswith("batch_")
    watched = run_cli("batch", "watch", batch_id, "--url", stub, "--every", "0.1")
    assert watched.returncode == 0, watched.stderr
    assert "completed  20 of 20 lines" in watched.stderr
    assert "hits 40.0%" in watched.stderr
    output = tmp_path / "out.jsonl"
    fetched = run_cli("batch", "results", batch_id, "-o", output, "--url", stub)
    assert fetched.returncode == 0, fetched.stderr
    assert sorted(names(output)) == sorted(f"line-{index}" for index in range(20))
    assert not (tmp_path / "out.errors.jsonl").exists()
    shown = run_cli("batch", "status", batch_id, "--url", stub).stdout
    assert "20 answered, 0 failed of 20" in shown
    document = orjson.loads(run_cli("batch", "status", batch_id, "--url", stub, "--json").stdout)
    assert document["completion_window"] == "2h"
    assert batch_id in run_cli("batch", "list", "--url", stub).stdout
    listed = orjson.loads(run_cli("batch", "list", "--url", stub, "--json").stdout)
    assert batch_id in [item["id"] for item in listed["data"]]


def test_a_batch_is_paused_resumed_cancelled_and_retried(stub: str, slow_jobs: Path) -> None:
    batch_id = submit(stub, slow_jobs)
    assert "(paused)" in run_cli("batch", "pause", batch_id, "--url", stub).stdout
    assert "(paused)" not in run_cli("batch", "resume", batch_id, "--url", stub).stdout
    early = run_cli("batch", "results", batch_id, "-o", slow_jobs.with_name("o"), "--url", stub)
    assert early.returncode == 2
    assert "wait for its end" in early.stderr
    assert "cancel" in run_cli("batch", "cancel", batch_id, "--url", stub).stdout
    watched = run_cli("batch", "watch", batch_id, "--url", stub, "--json", "--every", "0.1")
    assert watched.returncode == 1
    assert orjson.loads(watched.stdout.splitlines()[-1])["status"] == "cancelled"
    assert "in_progress" in run_cli("batch", "retry", batch_id, "--url", stub).stdout
    run_cli("batch", "cancel", batch_id, "--url", stub)


def test_a_file_with_bad_lines_is_reported_by_status(stub: str, tmp_path: Path) -> None:
    jobs = write_job(tmp_path / "bad.jsonl", [completion_line("a", model=MODEL), b"{"])
    batch_id = submit(stub, jobs)
    assert run_cli("batch", "watch", batch_id, "--url", stub, "--every", "0.1").returncode == 1
    shown = run_cli("batch", "status", batch_id, "--url", stub).stdout
    assert "line 2: the line is not valid JSON" in shown


def test_mistakes_end_with_code_2_and_say_what_to_do(stub: str, jobs: Path) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    for arguments, message in (
        (("list", "--url", away), "no server answers"),
        (("submit", jobs, "--url", stub, "--window", "3d"), "allowed are 1h to 24h"),
        (("submit", jobs, "--url", stub, "--metadata", "x"), "KEY=VALUE"),
        (("submit", jobs.with_name("gone"), "--url", stub), "cannot be read"),
        (("status", "batch_0", "--url", stub), "no batch has the id"),
        (("run", "--url", stub), "name the job file"),
        (("run", jobs, "-i", jobs, "-o", jobs.with_name("o"), "--url", stub), "name one job file"),
    ):
        result = run_cli("batch", *arguments)
        assert result.returncode == 2, arguments
        assert message in " ".join(result.stderr.split()), arguments


@pytest.mark.server
def test_a_server_without_the_service_is_named_as_such(server: Server, jobs: Path) -> None:
    result = run_cli("batch", "submit", jobs, "--url", server.url)
    assert result.returncode == 2
    assert "has no batch service" in result.stderr
