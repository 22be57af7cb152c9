"""What a client was told stays, when all that the disk was not told to keep is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from tests.batches.client import WAIT_S, job, running_stub
from tests.cli.stubs import StubServer

SOURCE = Path(__file__).with_name("last_synced.c")
NUM_LINES = 300
SAFE = ("-m", "eval.servers.stub_server")
UNSAFE = (
    "-c",
    "from echo_sgl.batches.store import database\n"
    "prepare = database._prepare_sqlite\n"
    "def prepare_unsafely(connection, record):\n"
    "    prepare(connection, record)\n"
    "    connection.execute('PRAGMA synchronous = OFF')\n"
    "database._prepare_sqlite = prepare_unsafely\n"
    "from eval.servers.stub_server import main\n"
    "main()",
)


class Machine:
    """A stub server whose power fails: `state` is what it wrote, `after` what its disk keeps."""

    def __init__(self, folder: Path, program: tuple[str, ...]) -> None:
        self.state, self.after = folder / "state", folder / "after"
        self._copies = folder / "copies"
        self._copies.mkdir()
        library = folder / "last_synced.so"
        command = ["cc", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True)
        (folder / "echo.toml").write_text("[batches]\nwindow_lines = 16\n")
        options = ("--state-dir", str(self.state), "--config", str(folder / "echo.toml"))
        self.server = StubServer(folder / "server", *options, "--delay-ms", "5")
        settings = {
            "LD_PRELOAD": library,
            "SYNCED_ROOT": self.state,
            "SYNCED_COPIES": self._copies,
        }
        env = [f"{name}={value}" for name, value in settings.items()]
        arguments = self.server._command[3:]  # behind: python -m eval.servers.stub_server
        self.server._command = ["env", *env, sys.executable, *program, *arguments]

    def lose_power(self) -> None:
        self.server.kill()
        for path, inode in self._durable().items():
            target = self.after / path.relative_to(self.state)
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = self._copies / inode
            if copy.exists():
                shutil.copy(copy, target)
            else:
                target.touch()  # the name was made durable, and nothing of the content
        self.after.mkdir(exist_ok=True)
        with (self.after / "jobs.sqlite3-wal").open("ab") as wal:
            wal.write(os.urandom(5000))  # a torn write that was on its way

    def _durable(self) -> dict[Path, str]:
        """Inodes by the paths that they were last known to be durable under."""
        log = self._copies / "log"
        inodes: dict[Path, str] = {}
        for entry in log.read_text().splitlines() if log.exists() else ():
            kind, _, rest = entry.partition(" ")
            if kind == "D":
                gone = [path for path in inodes if path.parent == Path(rest)]
                for path in gone:
                    del inodes[path]
            else:
                inode, _, path_text = rest.partition(" ")
                inodes[Path(path_text)] = inode
        return inodes


@dataclass(frozen=True, slots=True)
class Promised:
    """What the client was told before the power failed."""

    file_id: str
    content: bytes
    waiting_id: str
    running_id: str
    num_answered: int


def promise(url: str) -> Promised:
    client = openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0)
    running = create(client, job([f"prompt {index}" for index in range(NUM_LINES)]))
    found = until(
        lambda: client.batches.retrieve(running.id),
        lambda batch: batch.request_counts is not None and batch.request_counts.completed >= 60,
    )
    content = os.urandom(3_000_000)
    file = client.files.create(file=("random", content), purpose="batch")
    waiting = create(client, job(["slow"]))
    found = client.batches.retrieve(running.id)
    assert found.request_counts is not None
    return Promised(file.id, content, waiting.id, running.id, found.request_counts.completed)


def create(client: openai.OpenAI, content: bytes) -> Batch:
    file = client.files.create(file=("jobs.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def until(look: Callable[[], Batch], condition: Callable[[Batch], bool]) -> Batch:
    deadline_s = time.monotonic() + WAIT_S
    while not condition(found := look()):
        assert time.monotonic() < deadline_s, found
    return found


@pytest.fixture
def machine_of(tmp_path: Path) -> Iterator[Callable[[tuple[str, ...]], Machine]]:
    machines: list[Machine] = []

    def start(program: tuple[str, ...]) -> Machine:
        machines.append(Machine(tmp_path, program))
        machines[-1].server.start()
        return machines[-1]

    yield start
    for machine in machines:
        machine.server.kill()


def test_what_was_answered_before_the_power_failed_is_kept(
    machine_of: Callable[[tuple[str, ...]], Machine],
) -> None:
    machine = machine_of(SAFE)
    promised = promise(machine.server.url)
    machine.lose_power()

    async def after() -> None:
        async with running_stub(machine.after) as stub:
            content = await stub.client.files.content(promised.file_id)
            assert content.content == promised.content
            assert (await stub.client.batches.retrieve(promised.waiting_id)).status
            running = await stub.client.batches.retrieve(promised.running_id)
            assert running.request_counts is not None
            assert running.request_counts.completed >= promised.num_answered
            ended = await stub.ended(promised.running_id)
            assert len(await stub.records(ended.output_file_id)) == NUM_LINES

    asyncio.run(after())


def test_the_test_above_would_notice_a_store_that_does_not_sync(
    machine_of: Callable[[tuple[str, ...]], Machine],
) -> None:
    machine = machine_of(UNSAFE)
    promised = promise(machine.server.url)
    machine.lose_power()

    async def after() -> None:
        async with running_stub(machine.after) as stub:
            with pytest.raises(openai.NotFoundError):
                await stub.client.batches.retrieve(promised.running_id)

    asyncio.run(after())
