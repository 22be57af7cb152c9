"""What `echo-sgl batch run --json` prints where the job did not get done."""

from __future__ import annotations

import signal
from pathlib import Path

import orjson
import pytest

from echo_sgl.cli.batch import hand_over
from echo_sgl.cli.batch.client import AwayError, BatchClient
from eval.servers.server import free_port
from tests.cli.conftest import StartCli
from tests.cli.jobs import completion_line, run_cli, wait_until, write_job


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """One line that is answered at once, and one that never is."""
    lines = [completion_line(name, name, model="stub") for name in ("quick", "slow")]
    return write_job(tmp_path / "jobs.jsonl", lines)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_a_batch_that_failed_is_printed_with_its_problems(
    stub: str, tmp_path: Path, output: Path
) -> None:
    jobs = write_job(tmp_path / "unknown.jsonl", [completion_line("a", model="unknown")])
    result = run_cli("batch", "run", jobs, "-o", output, "--url", stub, "--json")
    assert result.returncode == 1, result.stderr
    document = orjson.loads(result.stdout)
    [problem] = document["problems"]
    assert (document["status"], document["interrupted"]) == ("failed", False)
    assert (problem["line"], problem["code"]) == (1, "model_not_found")
    shown = run_cli("batch", "status", document["batch_id"], "--url", stub, "--json")
    assert orjson.loads(shown.stdout)["errors"]["data"] == document["problems"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_interrupted_prints_how_far_its_batch_has_come(
    signum: signal.Signals, stub: str, jobs: Path, output: Path, cli: StartCli
) -> None:
    process = cli("batch", "run", jobs, "-o", output, "--url", stub, "--json")
    assert process.stderr is not None
    batch_id = process.stderr.readline().split()[1]
    arguments = ("batch", "status", batch_id, "--url", stub)
    wait_until(lambda: "1 answered" in run_cli(*arguments).stdout, "the quick line is answered")
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    run_cli("batch", "cancel", batch_id, "--url", stub)
    document = orjson.loads(stdout)
    assert (process.returncode, document["interrupted"]) == (130, True), stderr
    assert (document["batch_id"], document["status"]) == (batch_id, "in_progress")
    assert (document["lines"], document["ok"], document["left"]) == (2, 1, 1)
    assert f"{batch_id} goes on" in stderr


def test_a_run_that_was_interrupted_before_it_had_a_batch_says_that_it_has_none(
    jobs: Path, output: Path, cli: StartCli
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    process = cli("batch", "run", jobs, "-o", output, "--url", url, "--json")
    assert process.stderr is not None
    assert "no server is ready" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    document = orjson.loads(process.communicate(timeout=60)[0])
    assert (document["batch_id"], document["lines"], document["left"]) == (None, None, None)
    assert document["interrupted"] is True


@pytest.mark.parametrize("fault", [AwayError("away"), KeyboardInterrupt()])
def test_what_was_seen_last_is_printed_where_the_server_does_not_say(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: BatchClient, batch_id: str) -> None:
        raise fault

    monkeypatch.setattr(BatchClient, "get", refuse)
    client, batch = BatchClient("http://server", None), {"id": "batch_1"}
    assert hand_over._last_look(client, batch) == batch
    client.close()
