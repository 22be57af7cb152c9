"""`echo-sgl batch run` against real servers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import orjson
import pytest

from eval.servers.server import LOCAL, Server, free_port, start_server, stop_server
from tests.cli.conftest import StartCli
from tests.cli.jobs import (
    chat_line,
    completion_line,
    names,
    num_lines,
    num_posts,
    records,
    run_cli,
    wait_until,
    write_job,
)
from tests.servers import ServerPool

DOCUMENT = "class Queue:\n    def put(self, item): return self.items.append(item)\n" * 8


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return tmp_path / "jobs.jsonl"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.mark.server
def test_every_line_is_answered_once_and_a_second_run_sends_nothing(
    server: Server, jobs: Path, output: Path
) -> None:
    lines = [completion_line(f"text-{index}", f"{DOCUMENT} {index}") for index in range(12)]
    lines += [chat_line(f"chat-{index}", f"{DOCUMENT} {index}") for index in range(12)]
    write_job(jobs, [*lines, completion_line("too-long", max_tokens=10**6)])
    options = ("--window", "4", "--json")
    command = ("batch", "run", jobs, "--url", f"{server.url}/v1", "--output", output, *options)
    result = run_cli(*command)
    assert result.returncode == 1, result.stderr
    errors = output.with_name("out.errors.jsonl")
    assert sorted(names(output)) == sorted(orjson.loads(line)["custom_id"] for line in lines)
    assert names(errors) == ["too-long"]
    refusal = records(errors)[0]["response"]
    assert refusal["status_code"] == 400
    assert "1000000 tokens for the completion" in refusal["body"]["error"]["message"]
    summary = orjson.loads(result.stdout)
    assert (summary["lines"], summary["ok"], summary["failed"], summary["left"]) == (25, 24, 1, 0)
    assert summary["generated_tokens"] == 24 * 4
    assert 0 < summary["cached_tokens"] < summary["prompt_tokens"]
    assert summary["hit_ratio"] == summary["cached_tokens"] / summary["prompt_tokens"]

    num_before, content = num_posts(server.log()), output.read_bytes()
    again = run_cli(*command)
    assert again.returncode == 1
    assert orjson.loads(again.stdout)["already_done"] == 25
    assert num_posts(server.log()) == num_before
    assert output.read_bytes() == content


@pytest.mark.server
def test_lines_are_counted_as_offline_by_the_server_unless_flex_is_off(
    server: Server, jobs: Path, output: Path
) -> None:
    def finished(task: str) -> float:
        figures = orjson.loads(run_cli("stats", "--url", server.url, "--json").stdout)
        return float(figures[task]["requests"].get("finished", 0))

    write_job(jobs, [completion_line(f"{index}") for index in range(5)])
    offline, online = finished("offline"), finished("online")
    run_cli("batch", "run", jobs, "--url", server.url, "--output", output)
    wait_until(lambda: finished("offline") == offline + 5, "five offline requests counted")
    plain = ("--url", server.url, "--output", output, "--overwrite", "--no-flex")
    run_cli("batch", "run", jobs, *plain)
    wait_until(lambda: finished("online") >= online + 5, "five online requests counted")
    assert finished("offline") == offline + 5


@pytest.mark.server
def test_bad_lines_are_all_reported_and_nothing_is_sent(
    server: Server, jobs: Path, output: Path
) -> None:
    bad = [b"{", completion_line("good"), completion_line("good"), completion_line("x", model="y")]
    write_job(jobs, [*bad, completion_line("s", stream=True)])
    num_before = num_posts(server.log())
    result = run_cli("batch", "run", jobs, "--url", server.url, "--output", output)
    assert result.returncode == 2
    for expected in (
        "jobs.jsonl:1: the line is not valid JSON",
        "jobs.jsonl:3: custom_id 'good' stands in line 2 already",
        "jobs.jsonl:4: body.model is 'y'; the server has tiny",
        "jobs.jsonl:5: body.stream is true",
        "4 of 5 lines",
        "--skip-invalid",
    ):
        assert expected in result.stderr
    assert num_posts(server.log()) == num_before
    assert not output.exists()


@pytest.mark.server
def test_skip_invalid_carries_on_with_the_good_lines(
    server: Server, jobs: Path, output: Path
) -> None:
    write_job(jobs, [b"{", completion_line("good"), completion_line("x", model="y")])
    command = ("--url", server.url, "--output", output, "--skip-invalid", "--json")
    result = run_cli("batch", "run", jobs, *command)
    assert result.returncode == 0, result.stderr
    assert names(output) == ["good"]
    summary = orjson.loads(result.stdout)
    assert (summary["ok"], summary["skipped"], summary["left"]) == (1, 2, 0)


@pytest.mark.server
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_half_way_resumes_without_repeating_finished_lines(
    signum: signal.Signals, server: Server, cli: StartCli, jobs: Path, output: Path
) -> None:
    num_jobs, window = 40, 3
    lines = [completion_line(f"{index}", f"x = {index}", max_tokens=24) for index in range(40)]
    write_job(jobs, lines)
    command = ("batch", "run", jobs, "--url", server.url, "--output", output, "--window", window)
    num_before = num_posts(server.log())
    process = cli(*command, "--json")
    wait_until(lambda: num_lines(output) >= 5, "five lines in the output")
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    done = output.read_bytes()
    assert 5 <= len(names(output)) < num_jobs
    if signum is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, stderr
        assert "run the same command again" in stderr
        summary = orjson.loads(stdout)
        assert summary["interrupted"] is True
        assert summary["ok"] == len(done.splitlines())

    assert run_cli(*command).returncode == 0
    assert output.read_bytes().startswith(done)
    assert sorted(names(output), key=int) == [str(index) for index in range(num_jobs)]
    assert num_posts(server.log()) - num_before <= num_jobs + window


@pytest.mark.server
def test_a_line_that_the_server_aborts_is_retried_and_then_reported(
    server: Server, cli: StartCli, jobs: Path, output: Path
) -> None:
    write_job(jobs, [completion_line("long", max_tokens=15_000)])
    options = ("--url", server.url, "--output", output, "--max-retries", "1", "--json")
    process = cli("batch", "run", jobs, *options)
    while process.poll() is None:
        LOCAL.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=60)
    stdout, stderr = process.communicate()
    assert "line 1 (long) failed (200: the server aborted the request); retry 1 of 1" in stderr
    summary = orjson.loads(stdout)
    assert (summary["ok"], summary["failed"], summary["retries"]) == (0, 1, 1)
    assert names(output.with_name("out.errors.jsonl")) == ["long"]


@pytest.mark.server
def test_a_changed_job_file_is_refused_with_the_way_out(
    server: Server, jobs: Path, output: Path
) -> None:
    command = ("batch", "run", jobs, "--url", server.url, "--output", output)
    write_job(jobs, [completion_line("a")])
    assert run_cli(*command).returncode == 0
    write_job(jobs, [completion_line("b")])
    refused = run_cli(*command)
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr
    assert names(output) == ["a"]
    assert run_cli(*command, "--overwrite").returncode == 0
    assert names(output) == ["b"]


@pytest.mark.server
def test_a_full_server_is_waited_for_until_it_has_answered_every_line(
    small_server: Server, jobs: Path, output: Path
) -> None:
    write_job(jobs, [completion_line(f"{index}", max_tokens=8) for index in range(40)])
    arguments = ("--url", small_server.url, "--output", output, "--no-flex", "--max-retries", "0")
    result = run_cli("batch", "run", jobs, *arguments, "--api-key", "secret", "--json")
    assert result.returncode == 0, result.stderr
    assert sorted(names(output), key=int) == [str(index) for index in range(40)]
    assert orjson.loads(result.stdout)["retries"] > 0
    assert "the server takes no more work (503: The request queue is full.)" in result.stderr


@pytest.mark.server
def test_a_wrong_api_key_ends_with_code_2_and_nothing_written(
    small_server: Server, jobs: Path, output: Path
) -> None:
    write_job(jobs, [completion_line("a")])
    command = ("batch", "run", jobs, "--url", small_server.url, "--output", output)
    result = run_cli(*command, "--api-key", "wrong")
    assert result.returncode == 2
    assert "refuses the API key" in result.stderr
    assert not output.exists()


@pytest.mark.server
def test_a_server_that_dies_half_way_is_waited_for_and_the_job_completes(
    doomed_server: Server,
    server_for: ServerPool,
    cli: StartCli,
    jobs: Path,
    output: Path,
    tiny_model: Path,
) -> None:
    write_job(jobs, [completion_line(f"{index}", max_tokens=48) for index in range(30)])
    options = ("--url", doomed_server.url, "--no-flex", "--window", "2", "--api-key", "secret")
    running = cli("batch", "run", jobs, "--output", output, *options, "--json")
    wait_until(lambda: num_lines(output) >= 5, "five lines in the output")
    os.killpg(doomed_server.process.pid, signal.SIGKILL)
    doomed_server.process.wait()
    assert 5 <= num_lines(output) < 30
    late = output.with_name("late.jsonl")
    started_late = cli("batch", "run", jobs, "--output", late, *options)
    command = doomed_server.process.args
    assert isinstance(command, list)
    end_of_port = command.index("--port") + 2
    port, args = command[end_of_port - 1], command[end_of_port:]
    again = start_server(
        tiny_model,
        (*args, "--port", port),  # the last of two equal options holds
        log_path=doomed_server.log_path.with_suffix(".again.log"),
        launch=server_for.zygote.launch,
    )
    try:
        stdout, stderr = running.communicate(timeout=600)
        _, late_stderr = started_late.communicate(timeout=600)
        assert list(again.scratch.iterdir())
    finally:
        stop_server(again)
    assert not again.scratch.exists()
    everything = [str(index) for index in range(30)]
    assert running.returncode == 0, stderr
    assert sorted(names(output), key=int) == everything
    assert orjson.loads(stdout)["failed"] == 0
    assert "lost the server" in stderr
    assert "waiting for it" in stderr
    assert started_late.returncode == 0, late_stderr
    assert sorted(names(late), key=int) == everything
    assert f"no server is ready at {doomed_server.url}" in late_stderr


def test_a_server_that_is_not_there_is_waited_for_until_interrupted(
    cli: StartCli, jobs: Path, output: Path
) -> None:
    write_job(jobs, [completion_line("a")])
    url = f"http://127.0.0.1:{free_port()}"
    process = cli("batch", "run", jobs, "--url", url, "--output", output)
    assert process.stderr is not None
    assert f"no server is ready at {url}" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not output.exists()


def test_bad_lines_are_reported_even_without_a_server(jobs: Path, output: Path) -> None:
    write_job(jobs, [b"{"] * 60 + [completion_line("a")])
    url = f"http://127.0.0.1:{free_port()}"
    result = run_cli("batch", "run", jobs, "--url", url, "--output", output)
    assert result.returncode == 2
    assert "jobs.jsonl:50:" in result.stderr
    assert "jobs.jsonl:51:" not in result.stderr
    assert "10 more lines" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.jsonl", "--output", "out.jsonl"), "missing.jsonl cannot be read"),
        (("jobs.jsonl", "--output", "jobs.jsonl"), "is the job file itself"),
        (("jobs.jsonl", "--output", "jobs.jsonl", "--overwrite"), "is the job file itself"),
        (("jobs.jsonl", "--output", "o", "--url", "127.0.0.1:30000"), "http://HOST:PORT"),
        (("jobs.jsonl", "--output", "o", "--window", "0"), "--window"),
    ],
)
def test_a_users_mistake_ends_with_code_2_and_says_what_to_do(
    arguments: tuple[str, ...],
    message: str,
    jobs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = write_job(jobs, [completion_line("a")]).read_bytes()
    monkeypatch.chdir(jobs.parent)
    result = run_cli("batch", "run", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert jobs.read_bytes() == content
