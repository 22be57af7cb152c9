"""The servers and processes that the tests of the command line share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from eval.servers.server import Server
from tests.cli.jobs import start_cli
from tests.cli.odd_server import OddServer, serving_odd
from tests.cli.stubs import StubServer

NAMED = ("--served-model-name", "tiny")
KV_POOL = ("--max-total-tokens", "20000")
REFUSING = ("--max-running-requests", "2", "--max-queued-requests", "1")
SMALL = (*REFUSING, "--api-key", "secret", *KV_POOL)
StartCli = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def server(echo_server: Server) -> Server:
    return echo_server


@pytest.fixture
def small_server(server_for: Callable[..., Server]) -> Server:
    """Stock SGLang that refuses with 503 what is more than three requests at a time."""
    return server_for((*SMALL, *NAMED))


@pytest.fixture
def doomed_server(server_for: Callable[..., Server]) -> Server:
    """The small server, for a test that ends it: whoever else needs it goes before."""
    return server_for((*SMALL, *NAMED))


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server whose model is made up; the batch service is the real one."""
    folder = tmp_path_factory.mktemp("stub")
    server = StubServer(folder, "--state-dir", str(folder / "state"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def cli() -> Iterator[StartCli]:
    """Start commands that are sure to be gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: object) -> subprocess.Popen[str]:
        started.append(start_cli(*args))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def odd() -> Iterator[OddServer]:
    with serving_odd() as server:
        yield server
