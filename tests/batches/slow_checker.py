"""A checker of job files that takes as long as a test wants."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


class SlowChecker:
    """Stands in for the checker's process; it gives its output only when it is let go."""

    def __init__(self, folder: Path, output: bytes) -> None:
        self._go = folder / "go"
        self._pid = folder / "pid"
        self._output = folder / "output"
        self._output.write_bytes(output)
        self.command = (sys.executable, "-c", self._program)

    @property
    def _program(self) -> str:
        return f"""if True:
            import os, pathlib, sys, time
            sys.stdin.read()
            draft = pathlib.Path({str(self._pid)!r} + ".draft")
            draft.write_text(str(os.getpid()))
            draft.replace({str(self._pid)!r})
            while not os.path.exists({str(self._go)!r}):
                time.sleep(0.01)
            sys.stdout.buffer.write(pathlib.Path({str(self._output)!r}).read_bytes())
        """

    @property
    def is_there(self) -> bool:
        return self._pid.exists()

    @property
    def is_running(self) -> bool:
        return Path(f"/proc/{self._pid.read_text()}").exists()

    def terminate(self) -> None:
        os.kill(int(self._pid.read_text()), signal.SIGTERM)

    def let_go(self) -> None:
        self._go.touch()
