"""`batch run` on several servers, plain OpenAI-compatible endpoints that may die."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from eval.servers.stub_server import MODEL
from tests.cli.conftest import StartCli
from tests.cli.jobs import completion_line, names, records, run_cli, wait_until, write_job
from tests.cli.stubs import StubServer

NUM_LINES = 240
NUM_DOCUMENTS = 12


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[list[StubServer]]:
    """Two plain endpoints: no batches, no /v1/files."""
    servers = [StubServer(tmp_path / name, "--delay-ms", "20") for name in ("one", "two")]
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        server.stop()


def prompt(index: int) -> str:
    return f"{'document' * 20} {index % NUM_DOCUMENTS:03} {'text ' * 20} question {index}"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    lines = [completion_line(f"{n}", prompt(n), model=MODEL) for n in range(NUM_LINES)]
    return write_job(tmp_path / "jobs.jsonl", lines)


def test_a_job_is_shared_by_prefix_and_each_line_is_answered_by_one_server(
    stubs: list[StubServer], jobs: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    urls = [option for server in stubs for option in ("--url", f"{server.url}/v1")]
    command = ("batch", "run", "-i", jobs, "-o", output, *urls, "--window", "4", "--json")
    result = run_cli(*command)
    assert result.returncode == 0, result.stderr
    assert sorted(names(output), key=int) == [str(index) for index in range(NUM_LINES)]
    shares = [server.answered() for server in stubs]
    assert sorted(shares[0] + shares[1]) == sorted(prompt(index) for index in range(NUM_LINES))
    counts = {server.url: len(share) for server, share in zip(stubs, shares, strict=True)}
    summary = orjson.loads(result.stdout)
    assert summary["by_server"] == counts
    # Each change of hands cuts one document; half of the rest can change hands log2 times.
    documents = [{text.split(" question")[0] for text in share} for share in shares]
    assert len(documents[0] & documents[1]) < NUM_DOCUMENTS / 2
    assert orjson.loads(run_cli(*command).stdout)["already_done"] == NUM_LINES


@pytest.fixture
def adapted(tmp_path: Path) -> Iterator[StubServer]:
    """A plain endpoint that lists a LoRA adapter, too."""
    server = StubServer(tmp_path / "adapted", "--adapter", "sql")
    server.start()
    yield server
    server.stop()


def test_an_adapter_answers_the_lines_that_name_it_as_it_is_listed(
    adapted: StubServer, tmp_path: Path
) -> None:
    lines = [completion_line(name, model=name) for name in (MODEL, "sql", f"{MODEL}:sql")]
    jobs, output = write_job(tmp_path / "jobs.jsonl", lines), tmp_path / "out.jsonl"
    result = run_cli("batch", "run", jobs, "-o", output, "--url", adapted.url)
    assert result.returncode == 0, result.stderr
    found = {one["custom_id"]: one["response"]["body"]["model"] for one in records(output)}
    assert found == {MODEL: MODEL, "sql": f"{MODEL}:sql", f"{MODEL}:sql": f"{MODEL}:sql"}


def test_lines_of_a_server_that_dies_are_taken_over_by_the_other(
    stubs: list[StubServer], jobs: Path, tmp_path: Path, cli: StartCli
) -> None:
    output = tmp_path / "out.jsonl"
    urls = [option for server in stubs for option in ("--url", server.url)]
    process = cli("batch", "run", jobs, "--output", output, *urls, "--window", "4", "--json")
    wait_until(lambda: len(stubs[1].answered()) >= 20, "the second server has done some lines")
    stubs[1].kill()
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert f"lost the server at {stubs[1].url}" in stderr
    assert sorted(names(output), key=int) == [str(index) for index in range(NUM_LINES)]
    summary = orjson.loads(stdout)
    assert (summary["ok"], summary["failed"], summary["left"]) == (NUM_LINES, 0, 0)
    calls = Counter(stubs[0].answered() + stubs[1].answered())
    assert set(calls) == {prompt(index) for index in range(NUM_LINES)}
    assert sum(calls.values()) <= NUM_LINES + 4  # what was in the window when it died


def test_a_server_that_comes_back_gets_lines_again(
    stubs: list[StubServer], tmp_path: Path, cli: StartCli
) -> None:
    stubs[0].kill()
    stubs[1].kill()
    lines = [completion_line(f"{index}", f"p {index}", model=MODEL) for index in range(40)]
    jobs, output = write_job(tmp_path / "jobs.jsonl", lines), tmp_path / "out.jsonl"
    urls = [option for server in stubs for option in ("--url", server.url)]
    process = cli("batch", "run", jobs, "--output", output, *urls)
    assert process.stderr is not None
    assert "no server is ready at" in process.stderr.readline()
    stubs[1].start()
    assert process.wait(300) == 0
    assert len(names(output)) == len(stubs[1].answered()) == 40


def test_a_line_that_ends_the_server_fails_alone_after_three_crashes(
    stubs: list[StubServer], tmp_path: Path, cli: StartCli
) -> None:
    server = stubs[0]
    lines = [completion_line(f"{index}", f"p {index}", model=MODEL) for index in range(60)]
    lines.insert(7, completion_line("poison", "die", model=MODEL))
    jobs, output = write_job(tmp_path / "jobs.jsonl", lines), tmp_path / "out.jsonl"
    process = cli("batch", "run", jobs, "--output", output, "--url", server.url, "--window", "16")
    assert process.stderr is not None
    assert server.process is not None
    for _ in range(3):
        server.process.wait(300)
        wait_until(lambda: "lost the server" in process.stderr.readline(), "the loss is said")
        server.start()
    assert process.wait(300) == 1
    assert sorted(names(output), key=int) == [str(index) for index in range(60)]
    failed = records(output.with_name("out.errors.jsonl"))
    assert [record["custom_id"] for record in failed] == ["poison"]
    assert failed[0]["error"]["code"] == "server_crashed"
    assert "the last time on no other request" in failed[0]["error"]["message"]


def test_a_server_that_is_named_twice_is_a_mistake(jobs: Path, tmp_path: Path) -> None:
    urls = ("--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:1/v1")
    result = run_cli("batch", "run", jobs, "--output", tmp_path / "out.jsonl", *urls)
    assert result.returncode == 2
    assert "named twice" in result.stderr
