"""Servers and models that the whole suite shares: a start costs half a minute, so few are made."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from echo_sgl.cpu import activate
from eval.models import demo_model
from eval.server import CPU_ARGS, Server, start_server, stop_server, wait_ready

LOGS_DIR = Path(__file__).resolve().parent.parent / "build" / "logs"
MAX_ALIVE_SERVERS = int(os.environ.get("ECHO_TEST_MAX_SERVERS", "3"))  # 2.6 GiB each
# An idle scheduler polls at full speed: one that waits its turn would take half of the machine.
POOL_ARGS = ("--max-total-tokens", "40000", "--random-seed", "0", "--sleep-on-idle")


class ServerFactory(Protocol):
    """Returns a ready server with these arguments; equal arguments give the same server."""

    def __call__(
        self,
        args: tuple[str, ...] = (),
        config: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        model: Path | None = None,
    ) -> Server: ...


class ServerPool:
    """Ready servers by their arguments, the least recently used one first."""

    def __init__(self, max_alive: int) -> None:
        self._alive: OrderedDict[object, Server] = OrderedDict()
        self._max_alive = max_alive
        self._started = 0

    def get(
        self,
        args: tuple[str, ...] = (),
        config: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        model: Path | None = None,
    ) -> Server:
        model = model or demo_model("tiny")
        key = (args, str(config), tuple(sorted((env or {}).items())), model)
        server = self._alive.pop(key, None)
        if server is not None and server.process.poll() is not None:
            stop_server(server)
            server = None
        if server is None:
            self.shrink(self._max_alive - 1)
            server = self._start(model, args, config, env)
        self._alive[key] = server
        return server

    def shrink(self, num_left: int) -> None:
        while len(self._alive) > num_left:
            stop_server(self._alive.popitem(last=False)[1])

    def _start(
        self,
        model: Path,
        args: tuple[str, ...],
        config: Path | str | None,
        env: Mapping[str, str] | None,
    ) -> Server:
        self._started += 1
        log_path = LOGS_DIR / f"test-{os.getpid()}-{self._started}.log"
        device_args = CPU_ARGS if activate() else CPU_ARGS[2:]
        all_args = (*device_args, *POOL_ARGS, *args)  # the last of two equal options holds
        # One thread is as fast for a tiny model, and leaves a core to whoever asks.
        env = {"OMP_NUM_THREADS": "1", **(env or {})}
        server = start_server(model, all_args, config=config, env=env, log_path=log_path)
        try:
            wait_ready(server)
        except BaseException:
            stop_server(server)
            raise
        return server


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return demo_model("tiny")


@pytest.fixture(scope="session")
def server_for() -> Iterator[ServerFactory]:
    pool = ServerPool(MAX_ALIVE_SERVERS)
    yield pool.get
    pool.shrink(0)
