"""Files of text and what is not: unpacked by content, or refused with what to do."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import pytest

from echo_sgl.cli.tuning.replay_load import read_job
from echo_sgl.sim.job_lines import read_job_lines
from echo_sgl.sim.text_files import open_text_file
from echo_sgl.sim.trace_columns import TraceFileError
from echo_sgl.sim.trace_files import read_trace_file
from eval.workloads import WorkloadError, read_lines

TRACE = b"t_s,context_tokens,generated_tokens\n0,5,5\n"
LINE = json.dumps(
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": "hi"},
    }
).encode()


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t"])
def test_a_packed_text_is_unpacked_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(TRACE))
    with open_text_file(path) as file:
        assert file.read() == TRACE
    assert len(read_trace_file(path).trace) == 1
    assert next(read_lines(path)) == (1, TRACE.decode().splitlines(keepends=True)[0])
    path.write_bytes(gzip.compress(LINE))
    assert len(read_job_lines(path)) == len(read_job(path)) == 1


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"PAR1\x15\x04", "it is a Parquet file; write its rows as CSV or JSON lines"),
        (b"\x28\xb5\x2f\xfd\x00", "it is packed with zstd; unpack it, or pack it with gzip"),
        (b"PK\x03\x04\x14", "it is a zip archive; unpack it"),
        ("t_s".encode("utf-16"), "it is text in UTF-16; write it in UTF-8"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_its_name(
    tmp_path: Path, start: bytes, said: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(start)
    with pytest.raises(TraceFileError, match=f"trace .* cannot be read: {said}"):
        read_trace_file(path)
    with pytest.raises(TraceFileError, match=f"jobs .* cannot be read: {said}"):
        read_job_lines(path)
    with pytest.raises(TraceFileError, match=f"job file .* cannot be read: {said}"):
        read_job(path)
    with pytest.raises(WorkloadError, match=said):
        list(read_lines(path))


def test_a_damaged_zip_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(LINE * 9))
    packed[10:20] = b"\xff" * 10
    path = tmp_path / "jobs.jsonl.gz"
    path.write_bytes(packed)
    with pytest.raises(WorkloadError, match="cannot be read"):
        list(read_lines(path))
    with pytest.raises(TraceFileError, match="cannot be read"):
        read_job_lines(path)


def test_a_pipe_is_read_as_a_file(tmp_path: Path) -> None:
    """As a shell's <(...) gives one: it cannot be read twice."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(TRACE),))
    writer.start()
    assert len(read_trace_file(path).trace) == 1
    writer.join()
