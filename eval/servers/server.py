"""Start and stop real SGLang servers: free port, readiness by condition, end by pid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from echo_sgl.config import CONFIG_ENV

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
# SGLang takes ports of its own between 22,000 and 29,999, and Linux those of outgoing connections
# from 32,768 on.
LISTEN_PORTS = (10_000, 22_000)
CPU_ARGS = ("--device", "cpu", "--dtype", "float32")
# For servers on this machine. They speak plain HTTP, and what `httpx.get` does for each call, to
# read the certificates, takes 40 ms of a core that the servers need.
LOCAL = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))


class ServerStartError(RuntimeError):
    """The server ended or did not become ready; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: where it listens, its process, its log and its temporary files."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path
    scratch: Path

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    """A port that nobody listens on, and that no outgoing connection is given by chance.

    A server binds it half a minute later. Ports that the kernel hands out itself are often taken
    by then, and two that are chosen at once should differ.
    """
    while True:
        port = random.SystemRandom().randrange(*LISTEN_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def running_server(
    model: Path | str,
    args: Sequence[str] = (),
    *,
    config: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    log_path: Path,
) -> Iterator[Server]:
    """Run `sglang serve` (Echo on when `config` names a preset or file) until the block ends.

    Errors: `ServerStartError` when the process ends before it is ready.
    """
    server = start_server(model, args, config=config, env=env, log_path=log_path)
    try:
        wait_ready(server)
        yield server
    finally:
        stop_server(server)


def start_server(
    model: Path | str,
    args: Sequence[str] = (),
    *,
    config: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    log_path: Path,
    launch: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> Server:
    """Start the process, with `launch`, and return at once; see `wait_ready`."""
    port = free_port()
    command = [sys.executable, "-m", "echo_sgl.cli", "serve", "--config", str(config)]
    if config is None:
        command = [sys.executable, str(Path(sys.executable).with_name("sglang")), "serve"]
    command += ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), *args]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="echo-server-"))
    with log_path.open("wb") as log:
        process = launch(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_server_env(env, scratch, is_local=Path(model).exists()),
            start_new_session=True,
            preexec_fn=_die_with_parent,  # it only sets a flag
        )
    return Server(f"http://127.0.0.1:{port}", process, log_path, scratch)


def wait_ready(server: Server, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Return once the server answers a generated token on `/health_generate`."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if server.process.poll() is not None:
            raise ServerStartError(_start_failure(server, "ended"))
        with contextlib.suppress(httpx.TransportError):
            if LOCAL.get(f"{server.url}/health_generate", timeout=30).status_code == 200:
                return
        time.sleep(0.2)
    raise ServerStartError(_start_failure(server, f"was not ready after {timeout_s:.0f} s"))


def stop_server(server: Server) -> None:
    """End the server politely by its pid, then for sure its process group; delete its scratch."""
    # A signal to the whole group would kill its ranks first, which SGLang reports as a crash.
    server.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    # SGLang leaves its sockets and a folder of metrics behind, thousands after a few test runs.
    shutil.rmtree(server.scratch, ignore_errors=True)


def _die_with_parent() -> None:
    """Ask Linux to end the server when whoever started it is killed and cannot stop it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _server_env(
    extra: Mapping[str, str] | None, scratch: Path, *, is_local: bool
) -> dict[str, str]:
    """`is_local`: the model is a folder, so that nothing has to be fetched."""
    env = {key: value for key, value in os.environ.items() if key != CONFIG_ENV}
    # Without a bytecode cache every start compiles SGLang anew and takes twice as long.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # Compiled kernels are kept beside temporary files unless they are given a place to stay.
    kernels = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor-echo"} | env
    offline = {"HF_HUB_OFFLINE": "1"} if is_local else {}
    return kernels | offline | {"TMPDIR": str(scratch)} | dict(extra or {})


def _start_failure(server: Server, what: str) -> str:
    return f"the server {what}; the end of {server.log_path}:\n{server.log()[-4000:]}"
