"""Real servers for the whole suite: a start costs five seconds of both cores, so few are made."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from echo_sgl.cpu import OVERLAP_ENV, activate
from eval.servers.models import demo_model
from eval.servers.server import CPU_ARGS, Server, start_server, stop_server, wait_ready
from tests.quick_start.zygote import Zygote

# SGLang checks after every step that free, cached and locked tokens add up to the pool.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
COMMON_ARGS = (
    "--enable-metrics",
    "--enable-cache-report",
    "--chunked-prefill-size",
    "256",
    "--max-total-tokens",
    "8000",
)
NAMED = ("--served-model-name", "tiny", "--max-running-requests", "16")
HERE = Path(__file__).resolve().parent
LOGS_DIR = HERE.parent / "build" / "logs"
SERVER_GIB = 2.6
# An idle scheduler polls at full speed: one that waits its turn would take half of the machine.
POOL_ARGS = ("--max-total-tokens", "40000", "--random-seed", "0", "--sleep-on-idle")


def max_alive_servers() -> int:
    """How many servers a worker keeps: all workers' together fill three quarters of memory."""
    if given := os.environ.get("ECHO_TEST_MAX_SERVERS"):
        return int(given)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return min(4, max(2, int(0.75 * memory_gib / SERVER_GIB / num_workers)))


class ServerPool:
    """Ready servers: equal arguments give the same one, the least recently used one ends first.

    They are forks of one process that has SGLang imported, see `quick_start/zygote.py`.

    SGLang takes four seconds to end and sleeps meanwhile: others start beside that.
    """

    def __init__(self, max_alive: int) -> None:
        self._alive: OrderedDict[object, Server] = OrderedDict()
        self._ending: list[Server] = []
        self._max_alive = max_alive
        self._started = 0
        self.zygote = Zygote(LOGS_DIR / f"test-{os.getpid()}-zygote.log")

    def __call__(
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

    @contextmanager
    def once(
        self,
        args: tuple[str, ...],
        config: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Iterator[Server]:
        """A server for one test: several ranks or replicas take a core even while idle."""
        self.shrink(self._max_alive - 1)
        server = self._start(demo_model("tiny"), args, config, env)
        try:
            yield server
        finally:
            self._end(server)

    def shrink(self, num_left: int) -> None:
        self._see_off([one for one in self._ending if one.process.poll() is not None])
        while len(self._alive) > num_left:
            self._end(self._alive.popitem(last=False)[1])

    def close(self) -> None:
        """End all servers and wait until they are gone."""
        self.shrink(0)
        self._see_off(list(self._ending))

    def _end(self, server: Server) -> None:
        server.process.terminate()
        self._ending.append(server)

    def _see_off(self, servers: list[Server]) -> None:
        """Wait for these, which were told to end, and clean up after them."""
        for server in servers:
            stop_server(server)
            self._ending.remove(server)

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
        # Overlap scheduling is what servers with a GPU run.
        env = {"OMP_NUM_THREADS": "1", OVERLAP_ENV: "1", **(env or {})}
        server = start_server(
            model, all_args, config=config, env=env, log_path=log_path, launch=self.zygote.launch
        )
        try:
            wait_ready(server)
        except BaseException:
            stop_server(server)
            raise
        return server
