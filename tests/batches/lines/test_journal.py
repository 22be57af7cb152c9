"""The journal: nothing finished is lost, nothing is done twice, and files are not mixed up."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_sgl.batches.lines.journal import Journal, JournalError, JournalPaths

SHA = "a" * 64


def record(name: str) -> bytes:
    return orjson.dumps({"id": "batch_req_1", "custom_id": name, "response": {"body": {}}})


@pytest.fixture
def paths(tmp_path: Path) -> JournalPaths:
    return JournalPaths.beside(tmp_path / "out.jsonl")


def write(paths: JournalPaths, *names: str, is_ok: bool = True) -> None:
    journal = Journal(paths, SHA)
    journal.append([(is_ok, record(name)) for name in names])
    journal.close()


def finished(paths: JournalPaths) -> frozenset[str]:
    journal = Journal(paths, SHA)
    journal.close()
    return journal.finished


def test_the_files_stand_beside_the_output(tmp_path: Path) -> None:
    paths = JournalPaths.beside(tmp_path / "out.jsonl")
    assert paths.errors == tmp_path / "out.errors.jsonl"
    assert paths.state == tmp_path / "out.jsonl.state.json"


def test_answers_and_failures_go_to_their_files_and_are_both_finished(
    paths: JournalPaths,
) -> None:
    write(paths, "a", "b")
    write(paths, "c", is_ok=False)
    assert paths.output.read_bytes() == record("a") + b"\n" + record("b") + b"\n"
    assert paths.errors.read_bytes() == record("c") + b"\n"
    assert finished(paths) == {"a", "b", "c"}


@given(cut=st.integers(min_value=1, max_value=len(record("last"))))
def test_a_last_record_torn_anywhere_is_cut_and_done_again(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    paths = JournalPaths.beside(tmp_path_factory.mktemp("torn") / "out.jsonl")
    write(paths, "first", "last")
    os.truncate(paths.output, paths.output.stat().st_size - cut)
    assert finished(paths) == {"first"}
    write(paths, "last")
    assert paths.output.read_bytes() == record("first") + b"\n" + record("last") + b"\n"


def test_a_last_line_of_zeros_as_a_power_cut_leaves_it_is_cut(paths: JournalPaths) -> None:
    write(paths, "a")
    with paths.output.open("ab") as file:
        file.write(b"\0" * 100)
    assert finished(paths) == {"a"}
    assert paths.output.read_bytes() == record("a") + b"\n"


def test_damage_in_the_middle_is_refused_and_nothing_is_cut(paths: JournalPaths) -> None:
    write(paths, "a", "b")
    damaged = paths.output.read_bytes().replace(b"{", b"[", 1)
    paths.output.write_bytes(damaged)
    with pytest.raises(JournalError, match="line 1 is no record"):
        Journal(paths, SHA)
    assert paths.output.read_bytes() == damaged


def test_another_job_file_is_refused_with_the_way_out(paths: JournalPaths) -> None:
    write(paths, "a")
    with pytest.raises(JournalError, match=r"another job file.*--overwrite"):
        Journal(paths, "b" * 64)
    assert finished(paths) == {"a"}


def test_overwrite_starts_from_nothing(paths: JournalPaths) -> None:
    write(paths, "a")
    write(paths, "b", is_ok=False)
    Journal(paths, "b" * 64, overwrite=True).close()
    assert paths.output.read_bytes() == paths.errors.read_bytes() == b""


@pytest.mark.parametrize("state", [None, b"", b"{}", b"[]", b"nonsense"])
def test_data_without_a_usable_state_file_is_never_touched(
    paths: JournalPaths, state: bytes | None
) -> None:
    paths.output.write_bytes(b"somebody's notes")
    if state is not None:
        paths.state.write_bytes(state)
    with pytest.raises(JournalError, match="does not say from which job file"):
        Journal(paths, SHA)
    assert paths.output.read_bytes() == b"somebody's notes"


def test_a_resume_that_names_another_error_file_is_refused(paths: JournalPaths) -> None:
    write(paths, "a", is_ok=False)
    write(paths, "b")
    other = JournalPaths.beside(paths.output, paths.output.with_name("other.jsonl"))
    with pytest.raises(JournalError, match="name the same --errors"):
        Journal(other, SHA)


def test_two_runs_on_one_output_are_refused(paths: JournalPaths) -> None:
    journal = Journal(paths, SHA)
    with pytest.raises(JournalError, match="another `batch run` is writing"):
        Journal(paths, SHA)
    journal.close()
    Journal(paths, SHA).close()


def test_output_and_errors_must_differ(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="must differ"):
        JournalPaths.beside(tmp_path / "o.jsonl", tmp_path / "sub" / ".." / "o.jsonl")


@pytest.mark.parametrize("name", ["/dev/null", "/proc/nowhere/out.jsonl"])
def test_an_output_that_cannot_be_resumed_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"regular file|cannot be written"):
        Journal(JournalPaths.beside(Path(name), tmp_path / "errors.jsonl"), SHA)


def test_a_full_disk_leaves_only_whole_records(paths: JournalPaths) -> None:
    journal = Journal(paths, SHA)
    journal.append([(True, record("a"))])
    whole = paths.output.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, hard))
    try:
        with pytest.raises(JournalError, match="cannot be written"):
            journal.append([(True, record("b"))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert paths.output.read_bytes() == whole
    journal.append([(True, record("b"))])
    journal.close()
    assert finished(paths) == {"a", "b"}


WRITER = """
import sys
from pathlib import Path
from echo_sgl.batches.lines.journal import Journal, JournalPaths

journal = Journal(JournalPaths.beside(Path(sys.argv[1])), "a" * 64)
for index in range(10**9):
    journal.append([(True, b'{"custom_id":"%d"}' % index)])
    print(index, flush=True)
"""


def test_what_a_killed_writer_said_was_written_is_there(paths: JournalPaths) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(paths.output)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    said = {writer.stdout.readline().strip() for _ in range(50)}
    writer.kill()
    said |= {line.strip() for line in writer.stdout if line.endswith("\n")}
    writer.wait()
    writer.stdout.close()
    assert said <= finished(paths)
