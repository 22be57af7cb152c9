"""A private PostgreSQL cluster on a free port, as a user that is not root."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.servers.server import free_port

MISSING = "PostgreSQL is not installed (Debian: apt-get install postgresql)"


def binaries() -> Path | None:
    """Where `initdb` and `postgres` are, or None."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    folders += [Path(on_path).parent] if on_path else []
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


@contextlib.contextmanager
def running_postgres(folder: Path) -> Iterator[str]:
    """Run a cluster until the block ends; gives the URL of its database."""
    port, user = free_port(), _user()
    data = Path(tempfile.mkdtemp(prefix="echo-pg-"))  # pytest's own folders are root's alone
    if user is not None:
        shutil.chown(data, user)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options = {"user": user, "cwd": data, **quiet}
    command = [folder / "initdb", "-D", data / "db", "-U", "echo", "-A", "trust", "-E", "UTF8"]
    subprocess.run([*map(str, command), "--locale=C"], check=True, **options)
    server = [folder / "postgres", "-D", data / "db", "-p", port, "-k", data]
    settings = ["-c", "listen_addresses=127.0.0.1", "-c", "max_connections=100", "-c", "fsync=off"]
    process = subprocess.Popen([*map(str, server), *settings], **options)
    try:
        ready = [str(folder / "pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-t", "1"]
        while subprocess.run(ready, check=False, **quiet).returncode:
            assert process.poll() is None, "postgres ended"
        yield f"postgresql://echo@127.0.0.1:{port}/postgres"
    finally:
        process.send_signal(signal.SIGQUIT)  # nothing of it is needed any more
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(data, ignore_errors=True)


def _user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
