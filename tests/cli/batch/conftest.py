"""Jobs for a server with the batch service, and one that a test may stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.jobs import completion_line, write_job
from tests.cli.stubs import StubServer

MODEL = "stub"


@pytest.fixture
def own_stub(tmp_path: Path) -> Iterator[StubServer]:
    """The same for a test that stops it."""
    server = StubServer(tmp_path / "own", "--state-dir", str(tmp_path / "own" / "state"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    lines = [completion_line(f"line-{index}", model=MODEL) for index in range(20)]
    return write_job(tmp_path / "jobs.jsonl", lines)


@pytest.fixture
def slow_jobs(tmp_path: Path) -> Path:
    lines = [completion_line(f"line-{index}", "slow", model=MODEL) for index in range(3)]
    return write_job(tmp_path / "slow.jsonl", lines)
