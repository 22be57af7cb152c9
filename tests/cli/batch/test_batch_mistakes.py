"""`echo-sgl batch` given what it cannot use: one sentence and exit code 2, and nothing is sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import orjson
import pytest
from httpx._multipart import FileField
from typer.testing import CliRunner

from echo_sgl.batches.lines.job_file import JobFileError
from echo_sgl.cli import app
from echo_sgl.cli.batch.client import BatchClient, OutputError, check_writable
from echo_sgl.cli.text import TextError, batch_id
from tests.cli.jobs import completion_line, names, run_cli, write_job

MODEL = "stub"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return write_job(tmp_path / "jobs.jsonl", [completion_line("a", model=MODEL)])


def refusal(*arguments: object) -> str:
    """What a command says that ends with exit code 2, in one line."""
    result = run_cli(*arguments)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    [line] = result.stderr.splitlines()
    return line


def uploads(stub: str) -> list[str]:
    """Names of the files that the server holds."""
    return [file["filename"] for file in httpx.get(f"{stub}/v1/files").json()["data"]]


# Job files


@pytest.mark.parametrize("command", ["submit", "run", "run --direct"])
def test_a_pipe_is_refused_as_a_job_file_for_it_can_be_read_only_once(
    stub: str, jobs: Path, command: str
) -> None:
    before = uploads(stub)
    read_end, write_end = os.pipe()
    os.write(write_end, jobs.read_bytes())
    os.close(write_end)
    pipe = f"/proc/{os.getpid()}/fd/{read_end}"
    output = () if command == "submit" else ("-o", jobs.with_name("out.jsonl"))
    said = refusal("batch", *command.split(), pipe, *output, "--url", stub)
    os.close(read_end)
    assert f"job file {pipe} is no regular file" in said
    assert "Write the lines to a file first" in said
    assert uploads(stub) == before


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("command", ["submit", "run"])
def test_a_file_without_lines_is_named_as_one(
    stub: str, jobs: Path, command: str, content: bytes
) -> None:
    jobs.write_bytes(content)
    output = () if command == "submit" else ("-o", jobs.with_name("out.jsonl"))
    said = refusal("batch", command, jobs, *output, "--url", stub)
    assert f"job file {jobs} holds no lines; it needs one JSON object a line" in said


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def shrink(path: Path) -> None:
    os.truncate(path, 1)


@pytest.mark.parametrize("change", [grow, shrink])
def test_a_file_that_changes_while_it_is_uploaded_is_named_as_what_is_wrong(
    stub: str, jobs: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = uploads(stub)
    render = FileField.render_data

    def render_changed(self: FileField) -> Iterator[bytes]:
        """The file's length is told by now, its content is not read."""
        change(jobs)
        return render(self)

    monkeypatch.setattr(FileField, "render_data", render_changed)
    client = BatchClient(stub, None)
    with pytest.raises(JobFileError, match="was changed while it was uploaded"):
        client.upload(jobs)
    client.close()
    assert uploads(stub) == before


def test_a_job_file_whose_name_is_not_utf_8_is_handed_over(stub: str, jobs: Path) -> None:
    job = jobs.rename(jobs.with_name(os.fsdecode(b"caf\xe9.jsonl")))
    submitted = run_cli("batch", "submit", job, "--url", stub)
    assert submitted.returncode == 0, submitted.stderr
    assert "caf?.jsonl" in uploads(stub)
    done = run_cli("batch", "run", job, "-o", job.with_name("out.jsonl"), "--url", stub)
    assert done.returncode == 0, done.stderr


# Results


@pytest.mark.parametrize(
    "options", ["-o .", "--output=", "--output folder", "-o out.jsonl --errors folder"]
)
@pytest.mark.parametrize("mode", [(), ("--direct",)])
def test_run_refuses_a_folder_as_output_as_results_does(
    stub: str,
    jobs: Path,
    options: str,
    mode: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(jobs.parent)
    jobs.with_name("folder").mkdir()
    said = refusal("batch", "run", jobs, *options.split(), *mode, "--url", stub)
    assert "which is a folder; name a file in it" in said


@pytest.mark.parametrize("mode", [(), ("--direct",)])
def test_results_may_have_a_name_that_is_not_utf_8(
    stub: str, jobs: Path, mode: tuple[str, ...]
) -> None:
    output = jobs.with_name(os.fsdecode(b"caf\xe9.jsonl"))
    for _ in range(2):
        done = run_cli("batch", "run", jobs, "-o", output, "--url", stub, "--json", *mode)
        assert done.returncode == 0, done.stderr
        assert orjson.loads(done.stdout)["output"] == str(jobs.with_name("caf?.jsonl"))
    assert names(output) == ["a"]


@pytest.mark.parametrize("output", ["jobs.jsonl/out", "/proc/x/y", f"{'o' * 250}.jsonl"])
def test_run_finds_out_that_results_cannot_be_written_before_it_hands_the_job_over(
    stub: str, jobs: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs.parent)
    before = uploads(stub)
    said = refusal("batch", "run", jobs, "-o", output, "--url", stub)
    assert f"{output} cannot be written" in said
    assert uploads(stub) == before


def test_what_is_tried_before_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    check_writable(path)
    assert not list(path.parent.iterdir())
    path.write_text("before")
    check_writable(path)
    assert [path.read_text()] == [file.read_text() for file in path.parent.iterdir()]
    check_writable(Path("/dev/null"))


def test_run_says_how_to_fetch_results_that_it_could_not_write(
    stub: str, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: BatchClient, file_id: str | None, path: Path) -> None:
        raise OutputError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(BatchClient, "download", refuse)
    arguments = ["batch", "run", str(jobs), "-o", str(jobs.with_name("o")), "--url", stub]
    with pytest.raises(OutputError, match=r"No space.* batch results batch_\w+ -o OUTPUT --url"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


# Text that no request can carry

NOT_UTF_8 = os.fsdecode(b"a\xff")


@pytest.mark.parametrize("given", [NOT_UTF_8, "a\x01b", "", "..", "a?limit=1", "a#b"])
@pytest.mark.parametrize(
    "command",
    ["status", "watch", "cancel", "retry", "pause", "resume", "results -o o", "list --after"],
)
def test_an_id_that_no_batch_can_have_is_refused_before_anything_is_asked(
    stub: str, command: str, given: str
) -> None:
    arguments = ["batch", *command.split(), given, "--url", stub]
    with pytest.raises(TextError, match=r"allowed are letters.* `echo-sgl batch list`") as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("given", ["batch_1", "batches/x-1", "YWI6Yw=="])
def test_an_id_as_other_servers_have_them_is_taken(given: str) -> None:
    assert batch_id(given) == given


def test_an_id_that_is_empty_is_refused_as_such(stub: str) -> None:
    assert "ID is empty" in refusal("explain", "", "--url", stub)


@pytest.mark.parametrize(
    "arguments",
    [
        ("batch", "submit", "jobs.jsonl", "--metadata", f"k={NOT_UTF_8}"),
        ("batch", "submit", "jobs.jsonl", "--window", NOT_UTF_8),
        ("explain", NOT_UTF_8),
    ],
)
def test_text_that_is_not_utf_8_is_refused_by_its_name(
    stub: str, jobs: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jobs.parent)
    said = refusal(*arguments, "--url", stub)
    assert "whose bytes are not UTF-8" in said
    assert arguments[-2].removeprefix("explain") in said
