"""Start servers as forks of a process that has imported SGLang already.

Each of a server's three processes takes eleven seconds of a core to import the same modules, most
of the time that a test waits for a server. A zygote imports them once. What is asked of it runs
in a fork, as if Python had been started anew: with its own environment, arguments and outputs, and
as a child of whoever asked, who is made the reaper of orphans for this. So does what a server
spawns, by a zygote of its own that it is born with.

Variables that modules read while they are imported have to be set for the zygote itself.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "echo_sgl.cli",
)
# Their first import decides by the environment how a process counts.
LATE = ("prometheus_client", "echo_sgl.engine")
MAX_MESSAGE = 2**20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Zygote:
    """One's own zygote: starts with the first process that is asked of it."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._channel: socket.socket | None = None

    def launch(
        self,
        command: Sequence[str],
        *,
        stdout: BinaryIO,
        stderr: BinaryIO | int = subprocess.STDOUT,
        env: Mapping[str, str],
        **_: Any,
    ) -> Forked:
        """Like `subprocess.Popen` of a Python command with a session of its own."""
        if self._channel is None:
            self._channel = _start(self._log_path)
        args = list(command)
        fork = {"arguments": args[1:], "env": dict(env), "cwd": os.getcwd(), "leads": True}
        errors = stdout if isinstance(stderr, int) else stderr
        return Forked(args, _ask(self._channel, fork, [stdout.fileno(), errors.fileno()]))

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Like `subprocess.run` of a Python command whose outputs are kept as text."""
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = self.launch(command, stdout=stdout, stderr=stderr, env=env)
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            said = [_text(output) for output in (stdout, stderr)]
        return subprocess.CompletedProcess(process.args, code, *said)


class Forked:
    """As much of `subprocess.Popen` as a server's process needs."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _text(output: BinaryIO) -> str:
    output.seek(0)
    return output.read().decode()


def _start(log_path: Path) -> socket.socket:
    """A fresh Python that imports, then waits for orders at the other end of this socket."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with theirs, log_path.open("wb") as log:
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, __file__, str(theirs.fileno())]
        subprocess.Popen(
            command,
            env=env,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if ours.recv(1) != b"r":
        raise RuntimeError(f"SGLang could not be imported:\n{log_path.read_text()[-4000:]}")
    return ours


def _ask(channel: socket.socket, fork: dict[str, Any], fds: Sequence[int]) -> int:
    socket.send_fds(channel, [pickle.dumps(fork)], list(fds))
    answer = channel.recv(MAX_MESSAGE)
    if not answer:
        raise RuntimeError(f"the zygote ended before it started {fork['arguments']}")
    return int(answer)


def _serve(channel: socket.socket) -> Callable[[], None] | None:
    """Fork until the asker is gone; in a fork, return what it has to do."""
    while True:
        message, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 64)
        if not message:
            return None
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            if pid := os.fork():
                os.write(tell, str(pid).encode())
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.001)
            for end in (told, tell):
                os.close(end)
            channel.close()
            return functools.partial(_become, pickle.loads(message), fds)
        os.waitpid(between, 0)  # from here on whoever asked is the parent
        channel.send(os.read(told, 32))
        for fd in (*fds, told, tell):
            os.close(fd)


def _become(fork: dict[str, Any], fds: list[int]) -> None:
    os.environ.clear()
    os.environ.update(fork["env"])
    os.chdir(fork["cwd"])
    tempfile.tempdir = None  # where it is depends on the environment
    if fork["leads"]:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        for target, fd in enumerate(fds, start=1):
            os.dup2(fd, target)
            os.close(fd)
        os.execv = lambda _, argv: _run(argv[1:])
    else:
        _renumber(dict(zip(fds, fork["numbers"], strict=True)))
    _bear_own_zygote()
    _run(fork["arguments"])


def _renumber(numbers: dict[int, int]) -> None:
    """Give each descriptor the number that the command line names, whatever has it now."""
    aside = max(*numbers, *numbers.values()) + 1
    for fd in numbers:
        os.dup2(fd, aside + fd)
    for fd in numbers:
        os.close(fd)
    for fd, number in numbers.items():
        os.dup2(aside + fd, number, inheritable=False)
        os.close(aside + fd)


def _bear_own_zygote() -> None:
    """What this process spawns with `multiprocessing` is a fork of what it is now."""
    from multiprocessing import util

    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _live(theirs)
    theirs.close()
    anew = util.spawnv_passfds

    def spawn(path: str, arguments: list[Any], fds: Sequence[int]) -> int:
        words = [os.fsdecode(argument) for argument in arguments]
        if "--multiprocessing-fork" not in words:
            return anew(path, arguments, fds)
        words = words[words.index("-c") :]
        fork = {"arguments": words, "env": dict(os.environ), "cwd": os.getcwd(), "leads": False}
        return _ask(ours, fork | {"numbers": list(fds)}, fds)

    util.spawnv_passfds = spawn


def _run(arguments: list[str]) -> None:
    """Do what `python ARGUMENTS` does, for `-c`, `-m` and a script."""
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], sys.modules["__main__"].__dict__)
    elif kind == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(kind, run_name="__main__")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _live(channel: socket.socket) -> None:
    """Serve; a fork ends with the code that Python would end with."""
    if (become := _serve(channel)) is None:
        os._exit(0)
    become()
    raise SystemExit(0)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in MODULES:
        importlib.import_module(name)
    if early := [name for name in LATE if name in sys.modules]:
        raise RuntimeError(f"{early} should be imported by each server by itself")
    gc.freeze()  # the collector's marks would copy every page that the forks share
    channel.send(b"r")
    _live(channel)


if __name__ == "__main__":
    main()
